"""One model object with which several replicas compute in turn, each with numbers of its own.

The user's own object computes, and never a copy of it: a copy would lose hooks on parameters, the
compiled or scripted code, and whatever a loss knows of the model.
"""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.model.device import CPU, Device, rehouse

# What every module has; the rest are attributes that its author gave it. The mode is one of these.
_EVERY = frozenset(vars(nn.Module())) - {"training"}
# What may change in place between two steps; anything else is replaced, or is everybody's.
_MUTABLE = (list, dict, set, deque, bytearray, Tensor, np.ndarray)


@dataclass
class ReplicaTensors:
    """What one replica has of its own: parameters, buffers, and the attributes of its modules."""

    parameters: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    attributes: list[dict[str, Any]]  # of each module, in order


class SharedModel:
    """Puts what a replica holds into the model before it computes, and takes it out afterwards."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self.owners = _owners(model)
        self.gradients = {name: p.grad for name, p in self.parameters.items()}
        self.objects = dict(model.named_buffers())  # the user's own
        self.beside: dict[torch.device, dict[str, Tensor]] = {}  # copies of what is not trained
        self.users = self._now()
        self.inside: ReplicaTensors | None = self.users

    def _now(self) -> ReplicaTensors:
        return ReplicaTensors(
            {name: p.data for name, p in self.parameters.items()},
            {name: b.detach().clone() for name, b in self.model.named_buffers()},
            [_attributes(module) for module in self.modules],
        )

    def begin(self) -> None:
        """What the model holds now is what it was passed in with, and what replicas begin with."""
        self.inside = self.users = self._now()
        self.beside.clear()

    def held(self, parameters: Mapping[str, Tensor], device: Device = CPU) -> ReplicaTensors:
        """What a new replica on `device` begins with; `parameters` are its own already."""
        shared = [*self.modules, *self.parameters.values(), *self.model.buffers()]
        memo = {id(one): one for one in shared}
        attributes = [
            {name: _own(value, memo) for name, value in mine.items()}
            for mine in self.users.attributes
        ]
        buffers = {
            name: buffer.to(device.place, copy=True) for name, buffer in self.users.buffers.items()
        }
        if device.place not in self.beside:
            self.beside[device.place] = {
                name: tensor.to(device.place)
                for name, tensor in self.users.parameters.items()
                if name not in parameters and tensor.device != device.place
            }
        return ReplicaTensors({**self.beside[device.place], **parameters}, buffers, attributes)

    def enter(self, held: ReplicaTensors) -> nn.Module:
        """Let the model be this replica's, until another one enters."""
        if self.inside is held:
            return self.model
        self.leave()
        for name, tensor in held.parameters.items():
            rehouse(self.parameters[name], tensor)
        with torch.no_grad():
            for name, (module, key) in self.owners.items():
                now, mine = getattr(module, key), held.buffers.get(name)
                if mine is None:
                    setattr(module, key, None)
                elif _alike(now, mine):
                    now.copy_(mine)
                elif held is self.users and _alike(self.objects.get(name), mine):
                    setattr(module, key, self.objects[name].copy_(mine))
                else:  # it lay on another device, or a module has put another one in its place
                    setattr(module, key, mine.clone())
        for module, attributes in zip(self.modules, held.attributes, strict=True):
            for name in _attributes(module):
                if name not in attributes:
                    del vars(module)[name]
            vars(module).update(attributes)
        self.inside = held
        return self.model

    def leave(self, held: ReplicaTensors | None = None) -> None:
        """Take out whatever is inside, or `held` if it is that."""
        inside = self.inside
        if inside is None or (held is not None and inside is not held):
            return
        now = {name: getattr(module, key) for name, (module, key) in self.owners.items()}
        inside.buffers = {name: b.detach().clone() for name, b in now.items() if b is not None}
        inside.attributes = [_attributes(module) for module in self.modules]
        self.inside = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Afterwards the model is the user's again, as it was unless the result was written."""
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> nn.Module:
        """Let the model be as the user passed it in; what is written from now on is the user's."""
        if self.inside is not self.users:
            self.enter(self.users)
            for name, parameter in self.parameters.items():
                parameter.grad = self.gradients[name]
        return self.model


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever is done with the model meanwhile, afterwards it is as it was."""
    shared = SharedModel(model)
    shared.enter(shared.held({name: p.detach().clone() for name, p in shared.parameters.items()}))
    try:
        yield
    finally:
        shared.give_back()


def _owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The module and the key there of each buffer, once; also of those that are still None."""
    found, seen = {}, set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) not in seen:
                found[f"{prefix}.{key}" if prefix else key] = (module, key)
                seen.add(id(buffer))
    return found


def _alike(one: Tensor | None, other: Tensor) -> bool:
    """Whether one can hold the values of the other."""
    if one is None or one.shape != other.shape:
        return False
    return one.dtype == other.dtype and one.device == other.device


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _EVERY}


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what a step might write to; what has no copy is shared."""
    if not isinstance(value, _MUTABLE):
        return value
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:  # a tensor inside a graph, a handle: its module makes it anew at each step
        return value
