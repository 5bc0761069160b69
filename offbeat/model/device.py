"""Where a replica computes: on the CPU, in the memory that it exchanges, or on an accelerator."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.data import random_state
from offbeat.model.table import Flat, Table


class Workspace:
    """Where a worker makes a payload: on the CPU, in the very buffers that it is sent from."""

    def at(self, out: list[Flat]) -> list[Flat]:
        """Where to make what is then sent from `out`."""
        return out

    def push(self, out: list[Flat]) -> None:
        """What has been made is to lie in `out`."""

    def pull(self, out: list[Flat]) -> None:
        """`out` has been changed, and so is what was made."""


class DeviceWorkspace(Workspace):
    """A payload that is made on an accelerator, and comes down with one copy for each shard."""

    def __init__(self, like: Sequence[Flat]):
        self.like = like
        self.flats: list[Flat] = []  # made when first needed: as large as the model
        self.made = False  # whether something is here that has not come down

    def at(self, out: list[Flat]) -> list[Flat]:
        self.flats = self.flats or [flat.zeros() for flat in self.like]
        self.made = True
        return self.flats

    def push(self, out: list[Flat]) -> None:
        if self.made:  # not if somebody else has written what is to be sent
            for flat, mine in zip(out, self.flats, strict=True):
                flat.copy_(mine)
        self.made = False

    def pull(self, out: list[Flat]) -> None:
        for flat, mine in zip(out, self.flats, strict=True):
            mine.copy_(flat)


class Device:
    """The CPU: a replica computes with what it exchanges, and nothing is copied."""

    shares = True  # whether parameters may lie where they are pulled to

    def __init__(self, place: torch.device):
        self.place = place

    def __str__(self) -> str:
        return str(self.place)

    @property
    def in_use(self) -> bool:
        """Whether this process has begun on a device of this kind, which is not forked with it."""
        return False

    def enter(self) -> None:
        """From now on this process computes here."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same for a while."""
        yield

    def flats(self, tables: Sequence[Table]) -> list[Flat]:
        """Memory for tables."""
        return [Flat(table) for table in tables]

    def workspace(self, flats: Sequence[Flat]) -> Workspace:
        """Where payloads with the layout of `flats` are made."""
        return Workspace()

    def move(self, model: nn.Module) -> None:
        """Bring a model here; its parameters stay the objects that they are."""

    def batch(self, batch: Any) -> Any:
        """A batch whose tensors lie here."""
        return batch


class Accelerator(Device):
    """A device with memory of its own: parameters lie there, and what is exchanged on the host."""

    shares = False

    @property
    def in_use(self) -> bool:
        return in_use(self.place.type)

    def enter(self) -> None:
        torch.get_device_module(self.place.type).set_device(self.place)
        random_state.draw_on(self.place)

    @contextmanager
    def entered(self) -> Iterator[None]:
        module = torch.get_device_module(self.place.type)
        before = module.current_device()
        self.enter()
        try:
            yield
        finally:
            random_state.draw_no_more_on(self.place)
            module.set_device(before)

    def flats(self, tables: Sequence[Table]) -> list[Flat]:
        return [
            Flat(table, torch.zeros(table.nbytes, dtype=torch.uint8, device=self.place))
            for table in tables
        ]

    def workspace(self, flats: Sequence[Flat]) -> Workspace:
        return DeviceWorkspace(flats)

    def move(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.device != self.place:
                rehouse(parameter, parameter.detach().to(self.place))
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != self.place:
                    setattr(module, name, buffer.to(self.place))

    def batch(self, batch: Any) -> Any:
        if isinstance(batch, tuple | list):
            items = [self.batch(item) for item in batch]
            return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
        if type(batch) is dict:
            return {key: self.batch(item) for key, item in batch.items()}
        if isinstance(batch, Tensor):
            # From pinned memory that is done while the host goes on; whoever computes waits for it.
            return batch.to(self.place, non_blocking=True)
        return batch.to(self.place) if callable(getattr(batch, "to", None)) else batch


CPU = Device(torch.device("cpu"))
_TASKS = Path("/proc/self/task")


class BesideComputing:
    """Copies from a device to the CPU that go on beside what it computes, where it can do both."""

    def __init__(self, place: torch.device):
        self.module: Any = torch.get_device_module(place.type)
        self.place = place
        self.stream = self.module.Stream(place) if hasattr(self.module, "Stream") else None

    def room(self, size: int) -> Tensor:
        """Memory of the CPU that the device may write while the CPU does something else."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self.stream is not None)

    def copy(self, into: Tensor, tensor: Tensor) -> None:
        """Copy what has been asked of the device so far."""
        if self.stream is None:
            into.copy_(tensor)
            return
        self.stream.wait_stream(self.module.current_stream(self.place))
        with self.module.stream(self.stream):
            into.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Until everything is copied."""
        if self.stream is not None:
            self.stream.synchronize()


def in_use(kind: str) -> bool:
    """Whether this process has begun on a kind of device: what is there cannot be forked."""
    begun = getattr(torch.get_device_module(kind), "is_initialized", None)
    return bool(begun is not None and begun())


def autograd_begun() -> bool:
    """Whether this process has threads for backward passes on devices.

    PyTorch starts them with the first backward pass of all, even on the CPU, where it sees a
    device; a process that is forked from this one can then make no backward pass any more.
    """
    return any(_title(task).startswith("pt_autograd") for task in _TASKS.iterdir())


def _title(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # it has ended meanwhile
        return ""


def rehouse(parameter: Tensor, place: Tensor) -> None:
    """Let a parameter lie in other memory, on any device; it stays the same object."""
    try:
        parameter.data = place
    except RuntimeError:  # PyTorch does so for its own devices, and exchanges others whole
        new = nn.Parameter(place, parameter.requires_grad)
        torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)
