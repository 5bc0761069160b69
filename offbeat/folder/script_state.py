"""What a script keeps beside its model (averages, best scores, counters), as tensors and JSON."""

import math
from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from offbeat.errors import CheckpointError, ConfigError
from offbeat.folder.checkpoint import Checkpoint, RunFolder, check_storable
from offbeat.folder.disk import make_folder

_TENSOR, _TUPLE, _DICT, _NUMBER = "tensor", "tuple", "dict", "number"


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state and takes it back, as PyTorch's do."""

    def state_dict(self) -> Mapping[str, Any]:
        """All that has to be kept."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take that back."""


Kept = Stateful | MutableMapping[str, Any]


def check_kept(name: str, kept: Any) -> None:
    """Refuse what cannot be kept, before the first step."""
    if not isinstance(kept, Stateful | MutableMapping):
        raise ConfigError(
            f"run.state cannot keep {name}, a {type(kept).__name__}: pass a dict, or an object "
            "with state_dict and load_state_dict"
        )
    encode({name: kept})


def encode(objects: Mapping[str, Kept]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of all objects: named tensors, and JSON that has them in their places."""
    tensors: dict[str, Tensor] = {}
    told = {
        name: _told(kept.state_dict() if isinstance(kept, Stateful) else dict(kept), name, tensors)
        for name, kept in objects.items()
    }
    check_storable(tensors)
    return tensors, told


def _told(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Plain values as they are, all others as one word and what it says."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu()
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise ConfigError(
                    f"run.state cannot keep {path}: {key!r} is its key, and keys are text or whole "
                    "numbers"
                )
        pairs = value.items()
        return {_DICT: [[key, _told(one, f"{path}.{key}", tensors)] for key, one in pairs]}
    if isinstance(value, list | tuple):
        each = [_told(one, f"{path}.{n}", tensors) for n, one in enumerate(value)]
        return each if isinstance(value, list) else {_TUPLE: each}
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: repr(float(value))}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(
        f"run.state cannot keep {path}, a {type(value).__name__}: it keeps tensors, numbers, text, "
        "lists and dicts; make one of these of it, for example torch.from_numpy or float"
    )


def _again(told: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(told, list):
        return [_again(one, tensors) for one in told]
    if not isinstance(told, dict):
        return told
    ((kind, inside),) = told.items()
    if kind == _TENSOR:
        return tensors[inside].clone()
    if kind == _TUPLE:
        return tuple(_again(one, tensors) for one in inside)
    if kind == _NUMBER:
        return float(inside)
    return {key: _again(one, tensors) for key, one in inside}


class ScriptStates:
    """The objects of a worker's script, and those of all, in the run's folder."""

    def __init__(
        self,
        folder: RunFolder,
        worker: int,
        objects: Mapping[bool, Mapping[str, Kept]],
        every: int | None,
    ):
        """`objects` are those of each worker (False) and those of all (True).

        They are saved `every` so many versions, or after each epoch.
        """
        own = (folder.inside(f"state/worker-{worker}"), objects[False], True)
        common = (folder.inside("state/shared"), objects[True], worker == 0)
        self.each = [one for one in (own, common) if one[1]]
        self.every = every
        self.version = self.epoch = 0  # at which they were saved last

    def save_if_due(self, version: int, epoch: int) -> None:
        """Keep them if it is time to."""
        due = epoch > self.epoch if self.every is None else version >= self.version + self.every
        if due:
            self.save(version)
            self.epoch = epoch

    def save(self, version: int) -> None:
        """Keep what the objects are, at the version that the model holds."""
        self.version = version
        for folder, objects, mine in self.each:
            if mine:
                tensors, told = encode(objects)
                make_folder(folder.checkpoints)
                folder.save(version, tensors, {"state": told})

    def restore(self, version: int, epoch: int) -> None:
        """Give the objects what was kept last, at `version` or before, if anything was."""
        self.version, self.epoch = version, epoch
        for folder, objects, mine in self.each:
            found = folder.at_most(version, forget=mine)
            if found is not None:
                _give(objects, found, str(folder.path))


def _give(objects: Mapping[str, Kept], found: Checkpoint, where: str) -> None:
    try:
        told: dict[str, Any] = found.meta["state"]
        states = {name: _again(one, found.tensors) for name, one in told.items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged, or not of a script ({error})") from error
    if states.keys() != objects.keys():
        raise CheckpointError(
            f"the run kept {', '.join(states)} and the script has {', '.join(objects)} now: pass "
            "the same names to run.state"
        )
    for name, kept in objects.items():
        if isinstance(kept, Stateful):
            kept.load_state_dict(states[name])
        else:
            kept.clear()
            kept.update(states[name])
