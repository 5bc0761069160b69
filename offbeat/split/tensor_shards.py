"""Which modules the processes of a stage share among them: those that `layout_shards` names."""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from offbeat.config.text import nearest
from offbeat.errors import ConfigError

ANNOTATION = "layout_shards"
COLUMN, GATHERED, ROW = "column", "gathered", "row"
WORDS = (COLUMN, GATHERED, ROW)

_EXAMPLE = (
    f'write for example {ANNOTATION} = {{"blocks.*.up": "column", "blocks.*.down": "row", '
    '"head": "gathered"}'
)


@dataclass(frozen=True)
class Shards:
    """A plan of names: the word for each shared module, and where each parameter is cut.

    Parameters have their names in the store; `dims` has those alone of which a process has a part.
    """

    count: int
    words: Mapping[str, str]
    dims: Mapping[str, int]

    def own(self, name: str, tensor: Tensor, shard: int) -> Tensor:
        """The part of the parameter `name`, or of what belongs to it, that `shard` has: a view."""
        dim = self.dims.get(name)
        # A counter of an optimiser belongs to a parameter and is no part of one.
        return tensor if dim is None or not tensor.dim() else piece(tensor, dim, shard, self.count)

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a part of `name`, whose whole has `shape`."""
        dim = self.dims.get(name)
        if dim is None:
            return shape
        return (*shape[:dim], shape[dim] // self.count, *shape[dim + 1 :])


def piece(tensor: Tensor, dim: int, shard: int, count: int) -> Tensor:
    """One of `count` equal parts of a tensor, as a view."""
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, shard * size, size)


def planned(model: nn.Module) -> dict[str, str]:
    """The words for modules of `model`, by itself and by all annotated modules in it."""
    words: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        plan = getattr(module, ANNOTATION, None)
        if plan is not None:
            words |= _matched(module, name, plan)
    for name in words:
        _check_kind(model.get_submodule(name), name)
    return words


def find(model: nn.Module, count: int) -> Shards:
    """How `count` processes share the modules that have a word."""
    words = planned(model)
    if not words:
        raise ConfigError(_how_to_annotate(model, count))
    cuts: dict[int, tuple[str, int]] = {}
    for name, word in words.items():
        for key, dim in _cuts(model.get_submodule(name), name, word, count):
            parameter = getattr(model.get_submodule(name), key)
            if parameter is not None:
                cuts[id(parameter)] = (name, dim)
    _check_ties(model, words, cuts)
    names = {id(p): name for name, p in model.named_parameters()}
    return Shards(count, words, {names[key]: dim for key, (_, dim) in cuts.items()})


def dims(module: nn.Module, word: str) -> dict[str, int]:
    """Along which dimension each parameter of a module is cut; the others stay whole."""
    if isinstance(module, nn.Embedding):
        return {"weight": 0 if word == ROW else 1}
    return {"weight": 1} if word == ROW else {"weight": 0, "bias": 0}


# ---------------------------------------------------------------- finding


def _matched(module: nn.Module, prefix: str, plan: Any) -> dict[str, str]:
    """The words for the modules inside `module` that its plan names."""
    kind = type(module).__name__
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(
            f"{ANNOTATION} of {kind} must be a dict of names, not {plan!r}; {_EXAMPLE}"
        )
    known = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    found: dict[str, str] = {}
    for pattern, word in plan.items():
        if word not in WORDS:
            raise ConfigError(
                f"{ANNOTATION} of {kind} says {word!r} of {pattern!r}"
                f"{nearest(str(word), WORDS)}; it takes {', '.join(WORDS)}"
            )
        matches = fnmatch.filter(known, str(pattern))
        if not matches:
            raise ConfigError(
                f"{ANNOTATION} names {pattern!r}, which is no module of {kind}"
                f"{nearest(str(pattern), known)}"
            )
        found |= {f"{prefix}.{name}" if prefix else name: word for name in matches}
    return found


def _cuts(module: nn.Module, name: str, word: str, count: int) -> Iterator[tuple[str, int]]:
    """The parameters that are cut and where, if their sizes allow it."""
    for key, dim in dims(module, word).items():
        parameter = getattr(module, key)
        if parameter is None:
            continue
        if parameter.shape[dim] % count:
            raise ConfigError(
                f"{name}.{key} of shape {tuple(parameter.shape)} is cut along its size of "
                f"{parameter.shape[dim]}, which does not divide by tp={count}: write a tp that "
                f"divides it, or leave {name!r} out of {ANNOTATION}"
            )
        yield key, dim


def _check_kind(module: nn.Module, name: str) -> None:
    plain = (nn.Linear.forward, nn.Embedding.forward)
    if not isinstance(module, nn.Linear | nn.Embedding) or type(module).forward not in plain:
        raise ConfigError(
            f"{ANNOTATION} names {name!r}, a {type(module).__name__}: only nn.Linear and "
            "nn.Embedding can be shared among processes; name those inside it, or leave it whole"
        )
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    ):
        raise ConfigError(
            f"{name!r} is an Embedding with max_norm, scale_grad_by_freq or sparse, which need the "
            f"whole of it: leave it out of {ANNOTATION}"
        )


def _check_ties(
    model: nn.Module, words: Mapping[str, str], cuts: Mapping[int, tuple[str, int]]
) -> None:
    """Refuse a parameter that one module has whole and another in parts, or in other parts."""
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in cuts:
                continue
            first, dim = cuts[id(parameter)]
            here = dims(module, words[name]).get(key) if name in words else None
            if here != dim:
                raise ConfigError(
                    f"{name or type(module).__name__} and {first} share {key!r}, and "
                    f"{ANNOTATION} does not cut both alike: for an Embedding that is 'row' write "
                    f"'gathered' for the Linear, or leave out both"
                )


def _how_to_annotate(model: nn.Module, count: int) -> str:
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name]
    shown = f"; its Linear modules are {', '.join(linear[:6])}" if linear else ""
    more = ", ..." if len(linear) > 6 else ""
    return (
        f"tp={count} needs to know which modules of {type(model).__name__} its processes share: "
        f"{_EXAMPLE} in the class or on the model{shown}{more}"
    )
