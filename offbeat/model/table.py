"""The name table: where each tensor lies in a flat shard, and who may see it."""

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offbeat.errors import CheckpointError, ConfigError

ALIGNMENT = 64  # bytes; a cache line, so that two tensors never share one
# Of others PyTorch adds a multiple with one rounding in the body of a vector and with two in its
# last elements, so that it would matter where a tensor lies.
EXACT = (torch.float32, torch.float64)
BLOCK = 1 << 18  # elements of fewer bits that are added up in one go
# Makes a tensor the sum of others, with these shares.
Sum = Callable[[Tensor, Sequence[Tensor], Sequence[float]], None]
Policy = Literal["shared", "averaged", "local"]
BUFFER_POLICIES = ("averaged", "local")


@dataclass(frozen=True)
class Entry:
    """One tensor of the model: where it lies and whether it leaves the worker."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    policy: Policy
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * _numel(self.shape)


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True)
class Span:
    """A stretch of a flat buffer that holds tensors of one dtype, so that it can be one vector."""

    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class Table:
    """The entries of one shard, in order, with their offsets."""

    entries: tuple[Entry, ...]
    spans: tuple[Span, ...] = ()
    nbytes: int = 0
    payload_bytes: int = 0  # of the tensors themselves, without padding
    _index: dict[str, Entry] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "Table":
        """Lay the entries out dtype by dtype, each on a 64-byte boundary."""
        placed: list[Entry] = []
        spans: list[Span] = []
        offset = 0
        for dtype in dict.fromkeys(entry.dtype for entry in entries):
            start = offset
            for entry in entries:
                if entry.dtype is dtype:
                    placed.append(Entry(entry.name, entry.shape, dtype, entry.policy, offset))
                    offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
            spans.append(Span(dtype, start, offset))
        index = {entry.name: entry for entry in placed}
        payload = sum(entry.nbytes for entry in placed)
        return cls(tuple(placed), tuple(spans), offset, payload, index)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Entry:
        return self._index[name]


class Flat:
    """One buffer with the layout of a table: every tensor is a view of it, a copy is one copy."""

    def __init__(self, table: Table, buffer: Tensor | None = None):
        self.table = table
        self.buffer = torch.zeros(table.nbytes, dtype=torch.uint8) if buffer is None else buffer
        self.spans = [self.buffer[s.start : s.stop].view(s.dtype) for s in table.spans]
        self.views = {
            entry.name: self.buffer[entry.offset : entry.offset + entry.nbytes]
            .view(entry.dtype)
            .view(entry.shape)
            for entry in table
        }

    @cached_property
    def bytes(self) -> memoryview:
        """What lies on the CPU, byte by byte."""
        array: Any = self.buffer.numpy()
        return memoryview(array)

    def copy_(self, other: "Flat") -> "Flat":
        self.buffer.copy_(other.buffer, non_blocking=not self.buffer.is_cpu)
        return self

    def zeros(self) -> "Flat":
        """Zeros of the same layout, on the same device."""
        return Flat(self.table, torch.zeros_like(self.buffer))

    def clone(self) -> "Flat":
        return Flat(self.table, self.buffer.clone())

    def zero_(self) -> "Flat":
        self.buffer.zero_()
        return self

    def subtract(self, one: "Flat", other: "Flat") -> "Flat":
        """Become `one` − `other`."""
        for out, a, b in zip(self.spans, one.spans, other.spans, strict=True):
            torch.sub(a, b, out=out)
        return self

    def combine(
        self, flats: Sequence["Flat"], shares: Sequence[float], add_up: "Sum | None" = None
    ) -> "Flat":
        """Become Σ shareᵢ · flatᵢ, added up in this order."""
        for i, span in enumerate(self.spans):
            (add_up or combine)(span, [flat.spans[i] for flat in flats], shares)
        return self

    def add_(self, other: "Flat", scale: float = 1.0) -> "Flat":
        for mine, theirs in zip(self.spans, other.spans, strict=True):
            mine.add_(theirs, alpha=scale)
        return self

    def scale_(self, factor: float) -> "Flat":
        for mine in self.spans:
            mine.mul_(factor)
        return self

    def finite(self) -> bool:
        """Whether no element is infinite or not a number.

        A sum is infinite or no number if any element is; only where it is, elements are asked.
        """
        for span in self.spans:
            if not math.isfinite(span.sum().item()) and not bool(torch.isfinite(span).all()):
                return False
        return True


def combine(out: Tensor, tensors: Sequence[Tensor], shares: Sequence[float]) -> None:
    """Make `out` Σ shareᵢ · tensorᵢ, the same bits wherever it is added up and cut.

    Training of fewer bits are added up in float32 and rounded once.
    """
    if out.dtype in EXACT:
        combine_as_is(out, tensors, shares)
        return
    for start in range(0, out.numel(), BLOCK):
        few = slice(start, start + BLOCK)
        total = tensors[0][few].float().mul_(shares[0])
        _add(total, [tensor[few].float() for tensor in tensors[1:]], shares[1:])
        out[few].copy_(total)


def combine_as_is(out: Tensor, tensors: Sequence[Tensor], shares: Sequence[float]) -> None:
    """The same without looking at the bits."""
    torch.mul(tensors[0], shares[0], out=out)
    _add(out, tensors[1:], shares[1:])


def _add(out: Tensor, tensors: Sequence[Tensor], shares: Sequence[float]) -> None:
    for tensor, share in zip(tensors, shares, strict=True):
        out.add_(tensor, alpha=share)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def named(prefix: str, flats: Iterable[Flat]) -> dict[str, Tensor]:
    """Every tensor of `flats` by its name, so that no shard is seen in what is written down."""
    return {f"{prefix}{name}": view for flat in flats for name, view in flat.views.items()}


def fill(flats: Iterable[Flat], tensors: Mapping[str, Tensor]) -> None:
    """Take over the tensors that lie in `flats` from named ones."""
    for flat in flats:
        for name, view in flat.views.items():
            view.copy_(tensors[name])


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """What tensors take up, or cost to send."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---------------------------------------------------------------- from a model


def parameter_entries(model: nn.Module) -> list[Entry]:
    """The trainable parameters: what the store holds and updates. Frozen ones stay in the model."""
    entries = [
        Entry(name, tuple(p.shape), p.dtype, "shared")
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    if not entries:
        raise ConfigError(
            "the model has no trainable parameter: set requires_grad_(True) on what to train"
        )
    odd = [entry for entry in entries if not entry.dtype.is_floating_point]
    if odd:
        raise ConfigError(
            f"parameter {odd[0].name!r} has dtype {odd[0].dtype}: only real floating-point "
            "parameters can be trained"
        )
    return entries


def buffer_entries(model: nn.Module, policies: Mapping[str, Policy]) -> list[Entry]:
    """Buffers such as batch-norm statistics: each worker's own, averaged for evaluation."""
    names = [name for name, _ in model.named_buffers()]
    for pattern, policy in policies.items():
        if policy not in BUFFER_POLICIES:
            raise ConfigError(
                f"policy {policy!r} of {pattern!r} must be one of {', '.join(BUFFER_POLICIES)}"
            )
        matches = fnmatch.filter(names, pattern)
        trained = fnmatch.filter([n for n, _ in model.named_parameters()], pattern)
        if not matches and trained:
            raise ConfigError(
                f"{trained[0]!r} is a parameter and always shared; only buffers can be {policy}: "
                "freeze it with requires_grad_(False) to keep it out of training"
            )
        if not matches and not trained:
            raise ConfigError(f"policy for {pattern!r}: the model has no tensor of that name")

    def policy_of(name: str) -> Policy:
        found: Policy = "averaged"
        for pattern, policy in policies.items():
            if fnmatch.fnmatch(name, pattern):
                found = policy
        return found

    return [
        Entry(name, tuple(buffer.shape), buffer.dtype, policy_of(name))
        for name, buffer in model.named_buffers()
    ]


def fingerprint(model: nn.Module) -> list[str]:
    """One line per tensor of the model; two workers whose lists differ do not train one model."""
    return [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in model.state_dict().items()
    ]


def check_tensors(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor | Entry], where: str
) -> None:
    """Two models fit if names and shapes do; otherwise name the first tensor that differs."""
    for name, tensor in wanted.items():
        if name not in found:
            raise CheckpointError(f"{where} is of another model: it has no tensor {name!r}")
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{where} is of another model: {name!r} is {_describe(found[name])} there "
                f"and {_describe(tensor)} here"
            )
    extra = [name for name in found if name not in wanted]
    if extra:
        raise CheckpointError(f"{where} is of another model: {extra[0]!r} is not in this one")


def _describe(tensor: Tensor | Entry) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


# ---------------------------------------------------------------- placement on shards


@dataclass(frozen=True)
class BySize:
    """Shards of about equal bytes."""

    shards: int = 1


@dataclass(frozen=True)
class ByCount:
    """Shards of about equal numbers of tensors, neighbours together."""

    shards: int = 1


@dataclass(frozen=True)
class ByWeight:
    """Shards whose bytes are in proportion to the weights of the devices that hold them."""

    weights: tuple[float, ...]


@dataclass(frozen=True)
class Staged:
    """A table for the parameters of each stage of a split model, so that a stage needs no other."""

    groups: tuple[tuple[str, ...], ...]
    shards: int = 1  # processes that hold them, each some tables whole


Placement = BySize | ByCount | ByWeight | Staged


def count(placement: Placement) -> int:
    """How many shards there are, and so how many processes may hold the store."""
    return len(placement.weights) if isinstance(placement, ByWeight) else placement.shards


def dealt(tables: Sequence[Table], processes: int) -> list[list[int]]:
    """Which tables each process holds, about equal bytes each; the first has the first table."""
    found: list[list[int]] = [[] for _ in range(processes)]
    load = [0] * processes
    for number in sorted(range(len(tables)), key=lambda i: (-tables[i].nbytes, i)):
        least = min(range(processes), key=lambda p: (bool(found[p]), load[p], p))
        found[least].append(number)
        load[least] += tables[number].nbytes
    return sorted(sorted(numbers) for numbers in found)


def place(entries: Sequence[Entry], placement: Placement) -> list[Table]:
    """Spread the entries over shards; no shard stays empty."""
    if isinstance(placement, Staged):
        if placement.shards > len(placement.groups):
            raise ConfigError(
                f"{placement.shards} shards for {len(placement.groups)} stages with parameters: "
                "a shard holds whole stages; use fewer shards or more stages"
            )
        known = {entry.name: entry for entry in entries}
        return [Table.of([known[name] for name in names]) for names in placement.groups]
    if isinstance(placement, ByWeight):
        weights = list(placement.weights)
        if not weights or min(weights) <= 0:
            raise ConfigError(f"device weights must be positive, not {placement.weights}")
    else:
        weights = [1.0] * placement.shards
    shards = len(weights)
    if not 1 <= shards <= len(entries):
        raise ConfigError(
            f"{shards} shards for {len(entries)} tensors: use between 1 and {len(entries)} shards"
        )
    order = {entry.name: index for index, entry in enumerate(entries)}
    groups: list[list[Entry]] = [[] for _ in weights]
    if isinstance(placement, ByCount):
        for index, entry in enumerate(entries):
            groups[index * shards // len(entries)].append(entry)
    else:
        load = [0.0] * shards
        # Largest first onto the shard that is relatively emptiest: close to balanced and stable.
        for entry in sorted(entries, key=lambda entry: (-entry.nbytes, order[entry.name])):
            empty = [i for i in range(shards) if not groups[i]]
            remaining = len(entries) - sum(len(group) for group in groups)
            choices = empty if empty and remaining <= len(empty) else range(shards)
            best = min(choices, key=lambda i: ((load[i] + entry.nbytes) / weights[i], i))
            groups[best].append(entry)
            load[best] += entry.nbytes
    return [Table.of(sorted(group, key=lambda entry: order[entry.name])) for group in groups]
