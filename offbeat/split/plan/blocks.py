"""Where a model may be cut: its blocks in the order they run, found by its structure alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from offbeat.config.text import nearest
from offbeat.errors import ConfigError

ANNOTATION = "layout_blocks"
WHOLE = "(whole model)"
# Wrappers that merge gradients of replicas while the backward pass goes on.
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
LATE_IS_FINE = "ReplicateModule"

Step = str | Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Block:
    """What runs between two places where a model may be cut; it takes and returns one value.

    `uses` are full names of modules, parameters and buffers. Without a `step` the block is the
    module `name`; with one, it is a method of the module `owner`, or a function of it.
    """

    name: str
    uses: tuple[str, ...]
    owner: str = ""
    step: Step | None = None

    def run(self, model: nn.Module, value: Any) -> Any:
        """What the block makes of `value`, with the modules of `model`, whole or in part."""
        if self.step is None:
            return model.get_submodule(self.uses[0])(value)
        owner = model.get_submodule(self.owner)
        return (
            getattr(owner, self.step)(value)
            if isinstance(self.step, str)
            else self.step(owner, value)
        )


@dataclass(frozen=True)
class Tie:
    """One parameter under several names, in the blocks with the numbers `blocks`."""

    names: tuple[str, ...]
    blocks: tuple[int, ...]


def whole(model: nn.Module) -> tuple[Block, ...]:
    """A model that is not cut: one block."""
    return (Block(WHOLE, ("",)),)


def find(model: nn.Module) -> tuple[Block, ...]:
    """The blocks of a Sequential, a ModuleList or ModuleDict, or an annotated model, in order."""
    _refuse_wrapped(model)
    blocks = tuple(_expand(model, "", top=True))
    if not blocks:
        raise ConfigError(f"{type(model).__name__} is empty: give it modules to split")
    _check_complete(model, blocks)
    return blocks


def number(blocks: Sequence[Block], name: str) -> int:
    """The place of the block `name`, or of the first block inside the module of that name."""
    for index, block in enumerate(blocks):
        if block.name == name or block.name.startswith(f"{name}."):
            return index
    known = [block.name for block in blocks]
    shown = ", ".join(known if len(known) <= 8 else [*known[:4], "...", *known[-3:]])
    raise ConfigError(f"there is no block {name!r}{nearest(name, known)}; the model has {shown}")


def ties(model: nn.Module, blocks: Sequence[Block]) -> tuple[Tie, ...]:
    """Parameters that are in several blocks: gradients of all of them have to be summed."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for mine in names.values():
        held = tuple(
            index for index, block in enumerate(blocks) if any(uses(block, name) for name in mine)
        )
        if len(held) > 1:
            found.append(Tie(tuple(mine), held))
    return tuple(found)


def uses(block: Block, name: str) -> bool:
    """Whether the tensor or module `name` belongs to `block`."""
    return any(not use or name == use or name.startswith(f"{use}.") for use in block.uses)


def wrappers(model: nn.Module) -> list[str]:
    """Kinds of data-parallel wrappers in a model."""
    found = set()
    for module in model.modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        if LATE_IS_FINE not in kinds:
            found |= set(kinds) & set(WRAPPERS)
    return sorted(found)


# ---------------------------------------------------------------- finding


def _expand(module: nn.Module, name: str, top: bool = False) -> Iterator[Block]:
    """The blocks of `module`, whose full name is `name`."""
    steps = getattr(module, ANNOTATION, None)
    if steps is not None:
        yield from _annotated(module, name, steps)
    elif _is_chain(module):
        # named_children leaves out a module that comes a second time, and it runs a second time.
        for key, child in module.named_modules(remove_duplicate=False):
            if key and "." not in key:
                yield from _expand(child, _join(name, key))
    elif top:
        raise ConfigError(_how_to_annotate(module))
    else:
        yield Block(name, (name,))


def _is_chain(module: nn.Module) -> bool:
    """Whether running the children in order is all that the module does."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    # Hooks of the container would not be called if its children ran on their own.
    return plain and not module._forward_hooks and not module._forward_pre_hooks


def _annotated(module: nn.Module, name: str, steps: Any) -> Iterator[Block]:
    if isinstance(steps, str) or not isinstance(steps, Sequence) or not steps:
        raise ConfigError(
            f"{ANNOTATION} of {type(module).__name__} must list its blocks in order, "
            f"not {steps!r}; {_EXAMPLE}"
        )
    for entry in steps:
        if isinstance(entry, str):
            yield from _expand(_child(module, entry), _join(name, entry))
            continue
        if not isinstance(entry, Sequence) or not entry:
            raise ConfigError(
                f"{entry!r} in {ANNOTATION} of {type(module).__name__} is no block; {_EXAMPLE}"
            )
        step, *used = entry
        for use in used:
            _find_part(module, use)
        if isinstance(step, str):
            if not callable(getattr(module, step, None)):
                raise ConfigError(
                    f"{ANNOTATION} names {step!r}, which is no method of "
                    f"{type(module).__name__}{nearest(step, _methods(module))}"
                )
            label = step
        elif callable(step):
            label = getattr(step, "__name__", type(step).__name__)
        else:
            raise ConfigError(f"{step!r} in {ANNOTATION} is neither a method's name nor a function")
        yield Block(_join(name, label), tuple(_join(name, use) for use in used), name, step)


def _child(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        known = [known for known, _ in module.named_modules() if known]
        method = callable(getattr(module, name, None))
        hint = (
            f"; for the method, write ({name!r}, ...) with the modules that it uses"
            if method
            else nearest(name, known)
        )
        raise ConfigError(
            f"{ANNOTATION} names {name!r}, which is no module of {type(module).__name__}{hint}"
        ) from None


def _find_part(module: nn.Module, name: Any) -> None:
    """Refuse a name that is neither a module nor a tensor of `module`."""
    known = [known for known, _ in module.named_modules(remove_duplicate=False) if known]
    known += [known for known, _ in _state(module)]
    if name not in known:
        raise ConfigError(
            f"{ANNOTATION} names {name!r}, which is no module and no parameter of "
            f"{type(module).__name__}{nearest(str(name), known)}"
        )


def _methods(module: nn.Module) -> list[str]:
    return [name for name, value in vars(type(module)).items() if callable(value)]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


# ---------------------------------------------------------------- errors

_EXAMPLE = (
    f'write for example {ANNOTATION} = [("embed", "token", "place"), "layers", "head"]: '
    "modules by name, and methods in brackets with the modules that they use"
)


def _how_to_annotate(model: nn.Module) -> str:
    children = [f'"{name}"' for name, _ in model.named_children()]
    kind = type(model).__name__
    if not children:
        return f"{kind} has no modules inside, so it cannot be split: write pp=1"
    return (
        f"{kind} has a forward of its own, so its blocks are not known: say in which order they "
        f"run with {ANNOTATION} = [{', '.join(children)}] in the class or on the model; what "
        f'happens between them goes into methods, as ("method", "module", ...)'
    )


def _refuse_wrapped(model: nn.Module) -> None:
    if type(model).__name__ in WRAPPERS[:2]:
        raise ConfigError(
            f"the model is wrapped in {type(model).__name__}: give the model itself, and write "
            "replicas= for more copies of it"
        )


def _check_complete(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Refuse an annotation that leaves a parameter or buffer to nobody."""
    for name, _ in _state(model):
        if not any(uses(block, name) for block in blocks):
            raise ConfigError(
                f"no block has {name!r}: add its module to {ANNOTATION} of {type(model).__name__}, "
                "by name or in the brackets of the method that uses it"
            )
