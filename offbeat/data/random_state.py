"""The generators that anybody's code may draw from: PyTorch's, Python's and NumPy's, as one.

PyTorch's are that of the CPU, and that of each device on which this process computes.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_devices: list[torch.device] = []
os.register_at_fork(after_in_child=_devices.clear)  # a process that is forked has none of them


def draw_on(device: torch.device) -> None:
    """This process computes on `device` too, so its generator is one of those meant here."""
    _devices.append(device)


def draw_no_more_on(device: torch.device) -> None:
    """The other way round."""
    _devices.remove(device)


def seed_all(seed: int) -> None:
    """Whatever is drawn from now on depends on `seed`, a number of 63 bits, and nothing else."""
    torch.default_generator.manual_seed(seed)
    for device in _devices:
        module = torch.get_device_module(device.type)
        with module.device(device):
            module.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


class RandomState:
    """Where the generators stand, to go on from there later."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.devices = {d: torch.get_device_module(d.type).get_rng_state(d) for d in _devices}
        self.python, self.numpy = random.getstate(), np.random.get_state(legacy=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self._all() == other._all()

    __hash__ = None  # type: ignore[assignment]

    def _all(self) -> tuple[Any, ...]:
        numpy: Any = self.numpy
        moving = {key: value for key, value in numpy.items() if key != "state"}
        state = numpy["state"]
        devices = [state.tolist() for state in self.devices.values()]
        torch_, numpys = self.torch.tolist(), (moving, state["pos"], state["key"].tolist())
        return torch_, devices, self.python, numpys

    def recall(self) -> None:
        torch.set_rng_state(self.torch)
        for device, state in self.devices.items():
            torch.get_device_module(device.type).set_rng_state(state, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn inside, those outside draw as if it had not been."""
    before = RandomState()
    try:
        yield
    finally:
        before.recall()
