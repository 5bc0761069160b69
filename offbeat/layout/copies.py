"""A copy of a model to try things on, so that trials leave no trace in the model itself."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def tried(model: nn.Module) -> Iterator[nn.Module]:
    """A copy for a trial: parameters, buffers, modes and whatever else a module may count.

    Generators of random numbers, Python's and NumPy's too, are afterwards what they were.
    """
    with same_chance(model):
        yield copy.deepcopy(model)


@contextmanager
def same_chance(model: nn.Module) -> Iterator[None]:
    """Whatever is drawn here, what is drawn afterwards does not change."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
