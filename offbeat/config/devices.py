"""Which device each worker computes on, as a user writes it, and whether it is there."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec
import torch

from offbeat.engine.local.process import fork, startable
from offbeat.engine.signals import children_kept
from offbeat.errors import ConfigError
from offbeat.model.device import CPU, Accelerator, Device, autograd_begun, in_use

AUTO = "auto"
EXAMPLES = "write device='cuda:0', 'cuda:0,cuda:1' for one per worker, 'auto' or 'cpu'"


@dataclass(frozen=True)
class Devices:
    """One device for all workers, or one for each; or one for each process of each worker."""

    names: tuple[str, ...] = ("cpu",)
    processes: int = 1  # of a worker that have a device of their own

    def __str__(self) -> str:
        return ",".join(self.names)

    def of(self, worker: int, process: int = 0) -> Device:
        """Where a worker computes, or one of its processes."""
        number = worker * self.processes + process % self.processes
        name = self.names[number % len(self.names)]
        return CPU if name == "cpu" else Accelerator(torch.device(name))

    @property
    def single(self) -> Device:
        """The one that all compute on in one process."""
        if len(set(self.names)) > 1:
            raise ConfigError(
                f"device={self!s} is one for each worker, and here they all compute in one "
                f"process: write device={self.names[0]!r}"
            )
        return self.of(0)

    @property
    def kinds(self) -> set[str]:
        """Of accelerators: cuda, xpu and the like."""
        return {name.partition(":")[0] for name in self.names} - {"cpu", AUTO}

    def begun(self, worker: int) -> Device:
        """Where a worker computes, in its own process; a scheduler may have chosen what it sees."""
        if self.names == (AUTO,):
            return Devices(_begun(())).of(worker)
        found = self.of(worker)
        _begun((str(found),))
        return found


def devices_of(wanted: str | Sequence[str] | None, workers: int, processes: int = 1) -> Devices:
    """What a user asks for, if it is there; nothing is begun on a device in this process.

    A worker may be several processes.
    """
    if named(wanted) == (AUTO,):
        return Devices(_look(()), processes)
    found = asked_for(wanted, workers, processes)
    there = tuple(dict.fromkeys(name for name in found.names if name != "cpu"))
    if there:
        _look(there)
    return found


def asked_for(wanted: str | Sequence[str] | None, workers: int, processes: int = 1) -> Devices:
    """The same where workers compute on other machines, and look there."""
    names = named(wanted)
    if len(names) not in (1, workers, workers * processes):
        each = "" if processes == 1 else f" of {processes} processes"
        raise ConfigError(f"{len(names)} devices for {workers} workers{each}: {EXAMPLES}")
    return Devices(names, processes if len(names) == workers * processes else 1)


def named(wanted: str | Sequence[str] | None) -> tuple[str, ...]:
    """The devices that a user names, as PyTorch writes them, or the word auto alone."""
    words = wanted.split(",") if isinstance(wanted, str) else list(wanted or ("cpu",))
    return (AUTO,) if words == [AUTO] else tuple(map(_name, words))


def expected(wanted: str | Sequence[str] | None) -> torch.device:
    """Where a worker will compute, before it is known which one it is."""
    names = set(named(wanted))
    if len(names) > 1 or AUTO in names:
        raise ConfigError(
            "each worker has a device of its own, which is known in the loop alone: ask "
            "run.device inside for x, y in run.batches(...)"
        )
    return torch.device(names.pop())


def _name(word: Any) -> str:
    """One of a kind is the first of that kind."""
    try:
        found = torch.device(word.strip() if isinstance(word, str) else word)
        module = None if found.type == "cpu" else torch.get_device_module(found.type)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(f"{word!r} is no device: {EXAMPLES}") from error
    return "cpu" if module is None else f"{found.type}:{found.index or 0}"


def check_forkable(devices: Devices) -> None:
    """Refuse to fork a process that has begun on a device: what is there is not forked with it."""
    for kind in sorted(devices.kinds | {"cuda"}):
        if in_use(kind):
            raise ConfigError(
                f"{kind} is in use in this process already, and a process that uses it cannot be "
                "forked: build the model on the CPU, do nothing on the device before training, "
                f"and say device='{kind}:0'; or use engine='sim'"
            )
    if autograd_begun():
        raise ConfigError(
            "this process has made a backward pass where PyTorch sees a device, and what it keeps "
            "for that cannot be forked: make it after training, or in a process of its own"
        )


# ---------------------------------------------------------------- asked where it can be


@cache
def _look(names: tuple[str, ...]) -> tuple[str, ...]:
    """Begin on these devices, and return them; without names, on all that there are.

    It is done in a child, because this process may have to be forked.
    """
    if any(in_use(kind) for kind in Devices(names).kinds):
        return _begun(names)  # a child could not do it any more
    read, write = os.pipe()
    with open(read, "rb") as answer:
        try:
            with children_kept(), startable("the process that looks for devices"):
                child = fork("offbeat devices", partial(_answer, write, names))
        finally:
            os.close(write)
        told = answer.read()
    words = child.reap()
    if words is not None:
        raise ConfigError(words.message)
    return tuple(msgspec.json.decode(told, type=list[str]))


def _answer(write: int, names: tuple[str, ...]) -> None:
    os.write(write, msgspec.json.encode(_begun(names)))


def _begun(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        kind = torch.accelerator.current_accelerator(check_available=True)
        count = 0 if kind is None else torch.accelerator.device_count()
        return tuple(f"{kind}:{index}" for index in range(count)) or ("cpu",)
    for name in names:
        try:
            torch.zeros(1, device=name)
        except Exception as error:  # whatever a device's own library raises
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"device {name!r} is not there ({first}): {EXAMPLES}") from error
    return names
