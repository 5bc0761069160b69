"""A rule over named tensors: a PyTorch optimiser with its groups, schedule and clipping."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat import optim
from offbeat.config.task import OptimizerFactory
from offbeat.discipline.discipline import Discipline
from offbeat.discipline.parts import Rule
from offbeat.errors import ConfigError, OffbeatError
from offbeat.log.records import Settings
from offbeat.model.table import Flat
from offbeat.rules.constraint import Constraint
from offbeat.rules.fused import FusedRule
from offbeat.rules.schedule import Schedule, before_any_step, move_on


@dataclass(frozen=True)
class Clip:
    """Limit the norm of the whole gradient, or the size of each element, before a step."""

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for limit in (self.norm, self.value):
            if limit is not None and not limit > 0:
                raise ConfigError(f"a clipping limit must be positive, not {limit!r}")

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        self.limit(gradients)
        if self.norm is not None and gradients:
            scale = self.scale([torch.linalg.vector_norm(gradient) for gradient in gradients])
            for gradient in gradients:
                gradient.mul_(scale)

    def limit(self, gradients: Sequence[Tensor]) -> None:
        """Limit the size of each element, which needs no other gradient."""
        if self.value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.value, self.value)

    def scale(self, norms: Sequence[Tensor]) -> Tensor:
        """What to multiply every gradient by, from the norms of all of them."""
        assert self.norm is not None
        # The same arithmetic as clip_grad_norm_, so that one worker equals a plain loop.
        total = torch.linalg.vector_norm(torch.stack(list(norms)))
        return torch.clamp(self.norm / (total + 1e-6), max=1.0)


# Settings that may change without giving what the rule keeps another meaning, and those that a
# schedule adds for itself.
FREE = frozenset({
    *("lr", "initial_lr", "weight_decay", "decoupled_weight_decay", "lr_decay", "eps", "params"),
    *("foreach", "fused", "capturable", "differentiable"),
    *("max_lr", "min_lr", "max_momentum", "base_momentum"),
})  # fmt: skip

# A group of parameters with settings of its own: names, and what the optimiser is told of them.
Group = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """Everything needed to make an updater, at the store or at a worker."""

    factory: OptimizerFactory
    groups: tuple[Group, ...]
    schedule: Schedule | None = None
    clip: Clip | None = None
    constraints: tuple[Constraint, ...] = ()
    users: bool = True  # whether the rule is the user's, and not one that a discipline brings


class Updater:
    """The rule at work on some tensors."""

    def __init__(self, recipe: Recipe, tensors: Mapping[str, Tensor], flat: Flat | None = None):
        """`flat` is where all these tensors lie side by side, if they do."""
        self.recipe = recipe
        self.names: list[str] = []
        groups = []
        for names, settings in recipe.groups:
            # A group without any of these tensors stays, so that every shard has the same groups.
            mine = [name for name in names if name in tensors]
            self.names += mine
            groups.append({**settings, "params": [tensors[name] for name in mine]})
        self.tensors = {name: tensors[name] for name in self.names}
        self.rule = made(recipe.factory, groups)
        self.settings = _telling(self.rule.param_groups)  # before a schedule changes them
        self.first = self.rates()
        self.obeyed: Settings | None = None  # what a script has set otherwise
        if any("lr" not in group for group in self.rule.param_groups):
            raise ConfigError(
                f"{type(self.rule).__name__} has no learning rate named lr, "
                "so neither schedules nor staleness weights can act on it"
            )
        self.scheduler = recipe.schedule.factory(self.rule) if recipe.schedule else None
        plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        if self.scheduler is not None and (plateau or not isinstance(self.scheduler, LRScheduler)):
            raise ConfigError(
                f"{type(self.scheduler).__name__} needs a metric at each step; "
                "use a schedule that depends on the step alone"
            )
        self.moved = 0  # how often the schedule has moved on
        self.stepped = False  # whether the rule has made a step
        self._fused = None if flat is None else FusedRule.of(self.rule, flat, self.tensors)
        self._flat = flat
        limits = [(limit, limit.among(self.names)) for limit in recipe.constraints]
        self.limits = [(limit, names) for limit, names in limits if names]

    def step(self, gradients: Mapping[str, Tensor | None], rate: float = 1.0) -> None:
        """One step along `gradients`, with every learning rate scaled by `rate` for this step."""
        self.separate()
        for name, tensor in self.tensors.items():
            tensor.grad = gradients.get(name)
        self._step_at(rate)
        for tensor in self.tensors.values():
            tensor.grad = None
        self.constrain()

    def step_along(self, gradient: Flat, rate: float = 1.0) -> None:
        """The same along the gradient of all tensors, at once where the rule allows it."""
        fused = self._fused
        if fused is not None and self.stepped and fused.is_plain():
            # The first step is the rule's own: its scheduler warns if it has seen none.
            fused.descend(gradient.spans[0], rate)
            self.constrain()
        elif fused is not None and fused.enter(gradient.spans[0]):
            self._step_at(rate)
            fused.leave()
            self.constrain()
        else:
            self.step(gradient.views, rate)

    def join_all(self) -> None:
        """Show tensors of few bits as one vector too, as logs of old have it."""
        if self._flat is not None:
            dtypes = [span.dtype for span in self._flat.table.spans]
            self._fused = FusedRule.of(self.rule, self._flat, self.tensors, dtypes)

    @torch.no_grad()
    def constrain(self) -> None:
        """Bring the parameters back to where the constraints hold."""
        for limit, names in self.limits:
            for name in names:
                limit.apply(self.tensors[name])
                found = self.value(name)
                if not found.is_set_to(self.tensors[name]):  # of a rule that looks ahead
                    limit.apply(found)

    def obey(self, settings: Settings | None) -> None:
        """Take the settings that a contribution came with; None are those of the beginning."""
        fixed = self.recipe.schedule is not None or not self.recipe.users
        if settings == self.obeyed or fixed:
            return
        self.obeyed = settings
        for number, (group, first) in enumerate(
            zip(self.rule.param_groups, self.first, strict=True)
        ):
            for key, value in (first | (settings[number] if settings else {})).items():
                # JSON has no tuples; Adam's betas are one.
                group[key] = tuple(value) if isinstance(first[key], tuple) else value

    def separate(self) -> None:
        """From now on every tensor has a state of its own."""
        if self._fused is not None:
            self._fused.part()
            self._fused = None

    def step_in_place(self, rate: float = 1.0) -> None:
        """One step along the gradients the tensors already carry."""
        self._step_at(rate)
        self.constrain()

    def _step_at(self, rate: float) -> None:
        if rate == 1.0:
            self._step()
            return
        rates = [group["lr"] for group in self.rule.param_groups]
        for group, lr in zip(self.rule.param_groups, rates, strict=True):
            group["lr"] = lr * rate
        self._step()
        for group, lr in zip(self.rule.param_groups, rates, strict=True):
            group["lr"] = lr

    def _step(self) -> None:
        self.rule.step()
        self.stepped = True

    def advance(self, version: int, epoch: int, progress: int = 0) -> None:
        """Let the schedule catch up with the run."""
        if self.scheduler is None or self.recipe.schedule is None:
            return
        target = self.recipe.schedule.target(version, epoch, progress)
        # Whoever joins late, or leaves steps to others, moves its schedule on before any step.
        with nullcontext() if self.stepped else before_any_step():
            self.moved = move_on(self.scheduler, self.moved, target)

    @property
    def kind(self) -> str:
        """The rule's class by name: state of one kind means nothing to another."""
        return f"{type(self.rule).__module__}.{type(self.rule).__qualname__}"

    def unlike(self, meta: Mapping[str, Any]) -> str | None:
        """Why state beside this `meta` means nothing to this rule, in words; None if it does."""
        if meta["rule"] != self.kind:
            return f"that rule was {_last(meta['rule'])} and this one is {_last(self.kind)}"
        theirs = meta.get("settings")
        if theirs is None:  # older ones have only what a schedule may have made of them
            theirs = _telling(meta["groups"])
        if theirs == self.settings:
            return None
        for one, other in zip(theirs, self.settings, strict=False):
            for key in sorted({*one, *other}):
                if one.get(key) != other.get(key):
                    return f"{key} was {one.get(key)} and is {other.get(key)}"
        return (
            f"it had {len(theirs)} kinds of parameter groups and this one has {len(self.settings)}"
        )

    def value(self, name: str) -> Tensor:
        """The tensor to evaluate and save: for a rule that looks ahead, where it really is."""
        tensor = self.tensors[name]
        if isinstance(self.rule, optim.BlockMomentum):
            return self.rule.eval_tensor(tensor)
        return tensor

    def reset(self) -> None:
        """Forget momentum and the like, keep the rates."""
        self.rule.state.clear()
        if self._fused is not None:
            self._fused.forget()

    # ------------------------------------------------------------ state as named tensors

    def tensors_of_state(self) -> dict[str, Tensor]:
        """The rule's state as `name/key` tensors; numbers become 0-d tensors."""
        if self._fused is not None and self._fused.named is not None:
            return self._fused.named
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            for key, value in self.rule.state.get(tensor, {}).items():
                if isinstance(value, Tensor):
                    found[f"{name}/{key}"] = value
                elif isinstance(value, int | float):
                    found[f"{name}/{key}"] = torch.tensor(value, dtype=torch.float64)
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the rule's state from named tensors, as `tensors_of_state` gave them."""
        self.reset()
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            if name in self.tensors:
                mine = self.tensors[name]
                # As rules have it: what they count may stay on the CPU, whatever they work on.
                place = mine.device if value.dim() else value.device
                self.rule.state[mine][key] = value.to(place, copy=True)

    def rates(self) -> list[dict[str, Any]]:
        """Settings of each group that a schedule may have changed, as plain numbers."""
        return [
            {key: value for key, value in group.items() if key != "params" and is_plain(value)}
            for group in self.rule.param_groups
        ]

    def meta(self) -> dict[str, Any]:
        scheduler = {}
        if self.scheduler is not None:
            scheduler = {k: v for k, v in self.scheduler.state_dict().items() if is_plain(v)}
        return {
            "rule": self.kind,
            "settings": self.settings,
            "groups": self.rates(),
            "moved": self.moved,
            "scheduler": scheduler,
            "obeyed": self.obeyed,
        }

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        for group, saved in zip(self.rule.param_groups, meta["groups"], strict=True):
            for key, value in saved.items():
                # JSON has no tuples; Adam's betas are one.
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        self.moved, self.obeyed = meta["moved"], meta.get("obeyed")
        if self.scheduler is not None:
            self.scheduler.load_state_dict(dict(meta["scheduler"]))


def made(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimiser that a user's factory makes, if it is one that can be used here."""
    example = "pass a factory such as optimizer=partial(torch.optim.SGD, lr=0.1)"
    try:
        rule = factory(groups)
    except OffbeatError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the optimiser cannot be made ({type(error).__name__}: {error}): {example}"
        ) from error
    if not isinstance(rule, torch.optim.Optimizer):
        raise ConfigError(f"optimizer made {type(rule).__name__}, which is no optimiser: {example}")
    closure = inspect.signature(inspect.unwrap(type(rule).step)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(rule).__name__} computes the loss several times within one step, and a store "
            "has only gradients: use an optimiser whose step needs no closure, such as "
            "torch.optim.Adam"
        )
    return rule


def _telling(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings of groups that say what a rule's state means, each once, as JSON has them."""
    found: list[dict[str, Any]] = []
    for group in groups:
        plain = {k: v for k, v in group.items() if k not in FREE and is_plain(v)}
        told = {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}
        if told not in found:
            found.append(told)
    return found


def _last(kind: str) -> str:
    return kind.rpartition(".")[2]


def is_plain(value: Any) -> bool:
    """Whether a setting can be told as JSON."""
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value) and not any(
            isinstance(item, Tensor) for item in value
        )
    return value is None or isinstance(value, bool | int | float | str)


def rule_factory(discipline: Discipline, optimizer: OptimizerFactory | None) -> OptimizerFactory:
    """What the store applies: the user's optimiser, or the rule the discipline brings."""
    rule = discipline.apply.rule
    if rule is not None:
        kind, settings = RULE_KINDS[rule.name]
        return partial(kind, **{name: _setting(rule, name) for name in settings})
    if optimizer is None:
        raise ConfigError(
            f"{discipline} applies your optimiser: pass "
            "optimizer=partial(torch.optim.SGD, lr=0.1) or another factory"
        )
    return optimizer


# By the name of a rule: what makes it, and which of its settings that takes.
RULE_KINDS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...]]] = {
    "sgd": (torch.optim.SGD, ("lr", "momentum", "nesterov")),
    "adagrad": (torch.optim.Adagrad, ("lr",)),
    "rms-momentum": (optim.RMSMomentum, ("lr", "rho", "momentum")),
    "block-momentum": (optim.BlockMomentum, ("lr", "momentum", "nesterov")),
    "delayed-nesterov": (optim.DelayedNesterov, ("lr", "momentum", "delay")),
}
_OPEN = {"momentum": 0.0, "delay": 1}  # where nobody has filled in the number of workers


def _setting(rule: Rule, name: str) -> Any:
    value = getattr(rule, name)
    return _OPEN[name] if value is None else value


def groups_of(
    model: nn.Module, choose: Callable[[nn.Module], Sequence[dict[str, Any]]] | None
) -> tuple[Group, ...]:
    """Parameter groups by name; `choose` returns PyTorch groups over the model's own parameters."""
    trainable = {p: name for name, p in model.named_parameters() if p.requires_grad}
    if choose is None:
        return ((tuple(trainable.values()), {}),)
    groups: list[Group] = []
    for group in choose(model):
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        names = [trainable[p] for p in members if p in trainable]
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append((tuple(names), settings))
    grouped = [name for names, _ in groups for name in names]
    for name in trainable.values():
        if grouped.count(name) != 1:
            raise ConfigError(
                f"parameter {name!r} is in {grouped.count(name)} parameter groups, not in one: "
                "list every trainable parameter once, or freeze it with requires_grad_(False)"
            )
    return tuple(groups)
