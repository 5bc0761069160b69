"""A copy of a model to try things on, so that trials leave no trace in the model itself."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from offbeat.data.random_state import undisturbed
from offbeat.model.shared_model import untouched


@contextmanager
def tried(model: nn.Module) -> Iterator[nn.Module]:
    """A copy for a trial: parameters, buffers, modes and whatever else a module may count.

    Of a model that has no copy it is the model itself, which is put back afterwards. Generators of
    random numbers, Python's and NumPy's too, are afterwards what they were.
    """
    with same_chance(model), ExitStack() as after:
        try:
            own = copy.deepcopy(model)
        except Exception:  # it holds a handle, a generator or a tensor inside a graph
            after.enter_context(untouched(model))
            own = model
        yield own


@contextmanager
def same_chance(model: nn.Module) -> Iterator[None]:
    """Whatever is drawn here, what is drawn afterwards does not change."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with undisturbed(), torch.random.fork_rng(devices=sorted(devices)):
        yield
