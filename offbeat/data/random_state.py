"""The generators that anybody's code may draw from: PyTorch's, Python's and NumPy's, as one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Whatever is drawn from now on depends on `seed`, a number of 63 bits, and nothing else."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


class RandomState:
    """Where the generators stand, to go on from there later."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.python, self.numpy = random.getstate(), np.random.get_state(legacy=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self._all() == other._all()

    __hash__ = None  # type: ignore[assignment]

    def _all(self) -> tuple[Any, ...]:
        numpy: Any = self.numpy
        moving = {key: value for key, value in numpy.items() if key != "state"}
        state = numpy["state"]
        return self.torch.tolist(), self.python, moving, state["pos"], state["key"].tolist()

    def recall(self) -> None:
        torch.set_rng_state(self.torch)
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
