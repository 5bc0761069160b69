"""How small a contribution is made on its way out, and what becomes of the part left unsent."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from inspect import signature
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.config.text import nearest, parse_call, split_arguments
from offbeat.errors import ConfigError, RunError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_INT32_MAX = torch.iinfo(torch.int32).max

Parts = dict[str, tuple[torch.dtype, int]]
"""Name of each tensor that travels, with its dtype and number of elements."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to calculate in: two-byte floats are too coarse for sums and for rounding."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert so that finite values stay finite, and what was not finite stays visible."""
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(tensor.dtype).max:
        return tensor.to(dtype)
    # Widened first: in bf16 the limit of fp16 would itself be rounded up, to beyond fp16.
    wide = tensor.to(_wide(tensor.dtype))
    return torch.where(wide.isinf(), wide, wide.clamp(-limit, limit)).to(dtype)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).to(_wide(tensor.dtype))


@dataclass(frozen=True, eq=False)
class Packed:
    """One tensor as it travels: a few plain tensors, and what it takes to undo the codec."""

    codec: "Codec"
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on the wire; the header is not counted."""
        return sum(part.numel() * part.element_size() for part in self.tensors.values())

    def header(self) -> dict[str, object]:
        """Everything but the tensors, ready for JSON; `from_header` reads it back."""
        return {
            "codec": str(self.codec),
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @staticmethod
    def from_header(header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> "Packed":
        """Put a header and its tensors together again; `decode` checks that they agree."""
        codec, shape, dtype = (header.get(key) for key in ("codec", "shape", "dtype"))
        if not isinstance(codec, str) or not isinstance(dtype, str) or dtype not in _DTYPES:
            raise RunError(f"damaged header of a packed tensor: codec {codec!r}, dtype {dtype!r}")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise RunError(f"damaged header of a packed tensor: shape {shape!r}")
        return Packed(parse(codec), tuple(shape), _DTYPES[dtype], dict(tensors))


@dataclass(frozen=True)
class Codec(ABC):
    """How one float tensor becomes a `Packed` and back.

    NaN and infinity are never hidden: what is decoded is then not finite either, so that
    the store's check sees it. Finite values stay finite.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.name

    def encode(self, tensor: Tensor, generator: torch.Generator | None = None) -> Packed:
        """Pack one float tensor of any shape; the generator drives stochastic rounding.

        Where nothing has to change, the result shares the tensor's memory: send it before
        the tensor is written again.
        """
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"codec {self} cannot pack a {tensor.layout} tensor; call .to_dense() on it first"
            )
        if tensor.dtype not in _DTYPES.values():
            raise ConfigError(
                f"codec {self} cannot pack {tensor.dtype}; convert to one of {', '.join(_DTYPES)}"
            )
        tensor = tensor.detach()
        return Packed(self, tuple(tensor.shape), tensor.dtype, self._pack(tensor, generator))

    def decode(self, packed: Packed) -> Tensor:
        """The dense tensor, with the shape and dtype of the original."""
        if packed.codec != self:
            raise ConfigError(
                f"codec {self} cannot decode what {packed.codec} packed; "
                "write packed.codec.decode(packed)"
            )
        expected = self.parts(packed.shape, packed.dtype)
        found = {name: (part.dtype, part.numel()) for name, part in packed.tensors.items()}
        if found != expected:
            raise RunError(f"damaged contribution: {self} carries {found} instead of {expected}")
        return self._unpack(packed).reshape(packed.shape)

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes on the wire for a tensor of this shape, known without encoding one."""
        return sum(part.itemsize * count for part, count in self.parts(shape, dtype).values())

    @abstractmethod
    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parts:
        """What travels for a tensor of this shape and dtype."""

    @abstractmethod
    def _pack(self, tensor: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]: ...

    @abstractmethod
    def _unpack(self, packed: Packed) -> Tensor: ...


@dataclass(frozen=True)
class Plain(Codec):
    """The tensor as it is: no copy, nothing lost."""

    name: ClassVar[str] = "plain"
    lossy: ClassVar[bool] = False

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parts:
        return {"values": (dtype, math.prod(shape))}

    def _pack(self, tensor: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"values": tensor}

    def _unpack(self, packed: Packed) -> Tensor:
        return packed.tensors["values"]


@dataclass(frozen=True)
class _Narrow(Codec):
    """Two-byte floats; what is beyond their range is sent as their largest value."""

    target: ClassVar[torch.dtype]

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parts:
        return {"values": (self.target, math.prod(shape))}

    def _pack(self, tensor: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"values": _cast(tensor, self.target)}

    def _unpack(self, packed: Packed) -> Tensor:
        return _cast(packed.tensors["values"], packed.dtype)


@dataclass(frozen=True)
class BF16(_Narrow):
    """Rounded to bfloat16: the range of float32 with 8 bits of precision."""

    name: ClassVar[str] = "bf16"
    target: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True)
class FP16(_Narrow):
    """Rounded to float16: 11 bits of precision, values clamped to ±65504."""

    name: ClassVar[str] = "fp16"
    target: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class Int8(Codec):
    """One scale, max|x|/127, and a byte for each value, rounded stochastically: unbiased.

    A tensor with a value that is not finite is sent with the scale NaN and decodes to all NaN.
    """

    name: ClassVar[str] = "int8"

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parts:
        return {"values": (torch.int8, math.prod(shape)), "scale": (torch.float32, 1)}

    def _pack(self, tensor: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        flat = _flat(tensor)
        low, high = torch.aminmax(flat) if flat.numel() else (torch.zeros(()), torch.zeros(()))
        scale = self._scale(max(-float(low), float(high)))
        if scale > 0:
            steps = flat / scale.to(flat.device, flat.dtype)
            below = steps.floor()
            draw = torch.rand(flat.shape, generator=generator, dtype=flat.dtype, device=flat.device)
            # The comparison is exact where floor(steps + draw) would round up whole numbers.
            below += draw < steps.sub_(below)
            values = below.clamp_(-127, 127).to(torch.int8)
        else:
            values = torch.zeros_like(flat, dtype=torch.int8)
        return {"values": values, "scale": scale.to(flat.device)}

    @staticmethod
    def _scale(peak: float) -> Tensor:
        if not math.isfinite(peak):
            return torch.tensor([math.nan])
        # The cap keeps 127 steps of the largest scale within float32.
        cap = torch.finfo(torch.float32).max / 128
        scale = torch.tensor([min(peak / 127, cap)], dtype=torch.float32)
        if scale < cap and float(scale) * 127 < peak:
            # Rounded down, the scale would not reach the peak, and clamping would add a bias.
            scale = torch.nextafter(scale, torch.tensor([math.inf]))
        return scale

    def _unpack(self, packed: Packed) -> Tensor:
        work = _wide(packed.dtype)
        values = packed.tensors["values"].to(work).mul_(packed.tensors["scale"].to(work))
        return _cast(values, packed.dtype)


@dataclass(frozen=True)
class TopK(Codec):
    """The ceil(ratio·n) values of largest magnitude; among equals the lowest index first."""

    name: ClassVar[str] = "topk"
    ratio: float = 0.01

    def __post_init__(self) -> None:
        try:
            ratio = float(self.ratio)
        except (TypeError, ValueError):
            ratio = math.nan
        if not 0 < ratio <= 1:
            raise ConfigError(
                f"topk keeps a ratio above 0 and at most 1, not {self.ratio!r}; "
                "write for example topk:0.01 for one value in a hundred"
            )
        object.__setattr__(self, "ratio", ratio)

    def __str__(self) -> str:
        return f"{self.name}:{self.ratio!r}"

    def kept(self, count: int) -> int:
        """How many of `count` values travel."""
        # As written in decimal: in binary 0.07 · 100 is a little more than 7.
        return math.ceil(Fraction(repr(self.ratio)) * count)

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parts:
        kept = self.kept(math.prod(shape))
        return {"indices": (torch.int32, kept), "values": (dtype, kept)}

    def _pack(self, tensor: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        flat = tensor.reshape(-1)
        if flat.numel() > _INT32_MAX:
            raise ConfigError(
                f"topk numbers values with 32 bits and cannot pack {flat.numel()} of them; "
                "split the tensor, or write bf16 or int8"
            )
        kept = self.kept(flat.numel())
        if kept == 0:
            return {"indices": flat.new_empty(0, dtype=torch.int32), "values": flat[:0]}
        # NaN counts as the largest, so that it is sent and seen.
        size = torch.where(flat.isnan(), math.inf, flat.abs())
        # torch.topk promises no order among equals; only the smallest kept value is taken from it.
        least = torch.topk(size, kept, sorted=False).values.min()
        above = (size > least).nonzero().reshape(-1)
        level = (size == least).nonzero().reshape(-1)[: kept - above.numel()]
        indices = torch.cat([above, level]).sort().values
        return {"indices": indices.to(torch.int32), "values": flat[indices]}

    def _unpack(self, packed: Packed) -> Tensor:
        indices, values = packed.tensors["indices"].long(), packed.tensors["values"]
        dense = values.new_zeros(math.prod(packed.shape))
        if ((indices < 0) | (indices >= dense.numel())).any():
            raise RunError(f"damaged contribution: {self} has an index outside {packed.shape}")
        return dense.scatter_(0, indices, values)


@dataclass(frozen=True)
class OneBit(Codec):
    """A bit for each value: the mean of the negatives, or the mean of the rest."""

    name: ClassVar[str] = "1bit"

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> Parts:
        return {
            "bits": (torch.uint8, -(-math.prod(shape) // 8)),
            "means": (torch.float32, 2),
        }

    def _pack(self, tensor: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        flat = _flat(tensor)
        negative = flat < 0
        below = int(negative.sum())
        means = torch.stack(
            [
                # Divided before the sum, which could overflow.
                flat.clamp(max=0).double().div_(max(below, 1)).sum(),
                flat.clamp(min=0).double().div_(max(flat.numel() - below, 1)).sum(),
            ]
        )
        rows = torch.nn.functional.pad(negative.to(torch.uint8), (0, -flat.numel() % 8))
        bits = (rows.reshape(-1, 8) << self._shifts(flat.device)).sum(1, dtype=torch.uint8)
        return {"bits": bits, "means": _cast(means, torch.float32)}

    def _unpack(self, packed: Packed) -> Tensor:
        bits = packed.tensors["bits"]
        below, rest = _cast(packed.tensors["means"], packed.dtype)
        negative = (bits.unsqueeze(1) >> self._shifts(bits.device)) & 1
        return torch.where(negative.reshape(-1)[: math.prod(packed.shape)].bool(), below, rest)

    @staticmethod
    def _shifts(device: torch.device) -> Tensor:
        return torch.arange(8, dtype=torch.uint8, device=device)


_CODECS: dict[str, type[Codec]] = {c.name: c for c in (Plain, BF16, FP16, Int8, TopK, OneBit)}


def parse(text: str) -> Codec:
    """The codec that a string names: `plain`, `int8`, `topk:0.01`, `topk:ratio=0.01` and so on."""
    name, _, rest = text.strip().partition(":")
    kind = _CODECS.get(name)
    if kind is None:
        raise ConfigError(
            f"unknown codec {text!r}{nearest(name, _CODECS)}; write one of {', '.join(_CODECS)} "
            "(topk takes the ratio to keep: topk:0.01)"
        )
    positional, named = split_arguments(rest, text)
    return kind(**parse_call(text, name, signature(kind).parameters, positional, named))


class ErrorFeedback:
    """What a lossy codec left unsent, kept per tensor and added to the next send.

    Everything sent so far plus the residual is everything given, up to rounding in the
    residual's dtype, which is float32 for two-byte tensors. A tensor that is not finite is
    sent as it is and leaves the residual as it was: one bad gradient, which the store
    refuses, must not spoil every later one.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.residual: dict[str, Tensor] = {}

    def pack(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> Packed:
        """Pack the tensor together with what its name still owes."""
        if not self.codec.lossy:
            return self.codec.encode(tensor, generator)
        owed = self.residual.get(name)
        if owed is not None and owed.shape != tensor.shape:
            raise ConfigError(
                f"{name} has shape {tuple(tensor.shape)}, but its residual has "
                f"{tuple(owed.shape)}; use one name per tensor, or reset() after the model changes"
            )
        with torch.no_grad():
            total = tensor.detach().to(_wide(tensor.dtype))
            if owed is not None:
                total = total + owed.to(total.device, total.dtype)
            packed = self.codec.encode(_cast(total, tensor.dtype), generator)
            # A new tensor each time, never written in place: state_dict() needs no copy.
            rest = self.codec.decode(packed).to(total.dtype)
            torch.sub(total, rest, out=rest)
        if bool(rest.isfinite().all()):
            self.residual[name] = rest
        return packed

    def reset(self) -> None:
        """Forget what is owed."""
        self.residual.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The residual by name; later sends do not change what was returned."""
        return dict(self.residual)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the residual of an earlier run."""
        if state and not self.codec.lossy:
            raise ConfigError(
                f"codec {self.codec} never sends a residual, but one is owed for "
                f"{', '.join(sorted(state))}; keep the earlier codec, or load an empty state"
            )
        self.residual = {name: tensor.detach().clone() for name, tensor in state.items()}
