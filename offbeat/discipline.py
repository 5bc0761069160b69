"""A discipline is one value made of five choices; the known systems are its named rows."""

# The named rows read as values (`SSP(slack=3)`), so they are spelled like classes.
# ruff: noqa: N802

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from offbeat.choices import (
    APPLIES,
    GATHERS,
    HOGWILD,
    RULES,
    SENDS,
    WEIGHS,
    Accumulated,
    All,
    Apply,
    Change,
    Constant,
    Count,
    Elastic,
    Gather,
    Gradient,
    InPlace,
    Inverse,
    Pair,
    Polynomial,
    Rule,
    Send,
    Weigh,
    Yours,
    at_least,
)
from offbeat.errors import ConfigError
from offbeat.spelling import (
    Choice,
    call_text,
    nearest,
    parse_call,
    read_value,
    split_arguments,
)


@dataclass(frozen=True)
class Discipline:
    """How workers and store keep step; `wait=None` lets a worker run any number of steps ahead."""

    send: Send = field(default_factory=Gradient)
    gather: Gather = field(default_factory=Count)
    wait: int | None = None
    weigh: Weigh = field(default_factory=Constant)
    apply: Apply = field(default_factory=Yours)
    # How the value was spelled by its named row; `replace` may outdate it, so `str` checks it.
    spelling: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        for family in (SENDS, GATHERS, WEIGHS, APPLIES):
            _check_kind(family, getattr(self, family.what))
        if self.wait is not None:
            at_least("wait", self.wait, 0)
        if isinstance(self.gather, All) and self.wait != 0:
            raise ConfigError(
                "gathering from all workers is a barrier, so wait must be 0; "
                "use Count(k) to gather without one"
            )
        if isinstance(self.send, Elastic) and self.gather != Count(1):
            raise ConfigError(
                "the elastic difference is exchanged one worker at a time: use gather=Count(1)"
            )
        plain = (self.wait, self.weigh, self.apply) == (None, Constant(), Yours())
        if self.pairs and not (isinstance(self.send, Gradient) and plain):
            raise ConfigError(
                "workers that meet in pairs apply their own gradients with your optimiser and "
                "never wait: use send=Gradient() and leave wait, weigh and apply out"
            )
        local = isinstance(self.send, Change | Elastic)
        if local and isinstance(self.apply, Yours):
            raise ConfigError(
                "a worker that makes local steps already uses your optimiser; "
                "give the store a rule, for example apply=Rule('sgd', lr=1.0) to add the change"
            )
        if self.wait is not None and isinstance(self.send, Elastic):
            raise ConfigError("the elastic exchange never waits: use wait=None")
        sparse = isinstance(self.send, Accumulated) and self.send.fetch > self.send.push
        if self.wait is not None and sparse:
            raise ConfigError("waiting happens at a pull, so it needs fetch to be at most push")
        averages = isinstance(self.send, Change) and self.send.state == "average"
        if averages and not isinstance(self.gather, All):
            raise ConfigError("averaging the updater's state needs gather=All()")

    @property
    def steps_locally(self) -> bool:
        """Whether the user's optimiser works at the worker rather than at the store."""
        return isinstance(self.send, Change | Elastic | InPlace)

    @property
    def brings_rule(self) -> bool:
        """Whether gradients are applied by a rule of the discipline's own, not the user's."""
        return isinstance(self.apply, Rule) and not self.steps_locally

    @property
    def descends(self) -> str:
        """What the store's rule is given: what it keeps of one means nothing for another."""
        if isinstance(self.send, Change):
            return "changes of local steps"
        if isinstance(self.send, Elastic):
            return "distances to the centre"
        if isinstance(self.send, InPlace):
            return "nothing, as workers write in place"
        if isinstance(self.send, Accumulated) and self.send.push > 1:
            return f"sums of {self.send.push} gradients"
        return "gradients"

    @property
    def pairs(self) -> bool:
        """Whether workers have parameters of their own and meet in pairs."""
        return isinstance(self.gather, Pair)

    @property
    def drops(self) -> bool:
        """Whether late contributions are dropped by design."""
        return isinstance(self.gather, All) and self.gather.backup > 0

    def check_order(self) -> None:
        """Refuse a discipline whose updates have no order to be simulated or replayed in."""
        if isinstance(self.send, InPlace):
            raise ConfigError(HOGWILD)

    def for_workers(self, workers: int) -> "Discipline":
        """The same discipline with every number that depends on `workers` filled in and checked."""
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, not {workers}")
        if isinstance(self.gather, All) and self.gather.backup >= workers:
            raise ConfigError(
                f"backup={self.gather.backup} leaves nobody to gather from: "
                f"with {workers} workers use backup={workers - 1} or less"
            )
        if isinstance(self.gather, Count) and self.gather.k > workers:
            raise ConfigError(
                f"an update cannot gather {self.gather.k} contributions from {workers} workers: "
                f"use {workers} or less, or more workers"
            )
        send, apply = self.send, self.apply
        if isinstance(send, Elastic) and send.alpha is None:
            send = dataclasses.replace(send, alpha=0.9 / workers)
        if isinstance(apply, Rule):
            if apply.momentum is None:
                apply = dataclasses.replace(apply, momentum=1 - 1 / workers)
            if apply.delay is None:
                apply = dataclasses.replace(apply, delay=workers)
        return dataclasses.replace(self, send=send, apply=apply)

    def __str__(self) -> str:
        if self.spelling and parse(self.spelling) == self:
            return self.spelling
        wait = "inf" if self.wait is None else str(self.wait)
        parts = {
            "send": SENDS.text(self.send),
            "gather": GATHERS.text(self.gather),
            "wait": wait,
            "weigh": WEIGHS.text(self.weigh),
            "apply": APPLIES.text(self.apply),
        }
        return "custom:" + ",".join(f"{key}={value}" for key, value in parts.items())


def _check_kind(family: Choice, value: Any) -> None:
    """Refuse what is not a value of the family; a function would have no name in a log."""
    if type(value) in family.words:
        return
    kinds = list(family.kinds.values())
    example = f"ob.{kinds[1].__name__}({repr(RULES[0]) if family is APPLIES else ''})"
    if isinstance(value, type) and value in kinds:
        raise ConfigError(
            f"{family.what}={value.__name__} is a class: write {family.what}=ob.{value.__name__}()"
        )
    names = ", ".join(kind.__name__ for kind in kinds)
    why = " (a function cannot be written to a log and replayed)" if callable(value) else ""
    raise ConfigError(
        f"{family.what} must be one of {names}, as in {family.what}={example}, not {value!r}{why}"
    )


# ---------------------------------------------------------------- the named rows

_Row = Callable[..., Discipline]
ROWS: dict[str, _Row] = {}
# Whole-number settings by name, so that an error speaks of the setting the user wrote.
_LEAST = {"slack": 0, "backup": 0} | dict.fromkeys(
    ("s", "h", "k", "period", "block", "push", "fetch", "every"), 1
)


def _named(name: str) -> Callable[[_Row], _Row]:
    """Register a row under its string name and let its value remember how it was spelled."""

    def wrap(row: _Row) -> _Row:
        signature = inspect.signature(row)

        def make(*args: Any, **kwargs: Any) -> Discipline:
            bound = signature.bind(*args, **kwargs)
            for key in bound.arguments.keys() & _LEAST.keys():
                at_least(key, bound.arguments[key], _LEAST[key])
            made = row(*args, **kwargs)
            given = [
                (key, value)
                for key, value in bound.arguments.items()
                if value != signature.parameters[key].default
            ]
            first = next(iter(signature.parameters.values()), None)
            bare = first and first.kind is not first.KEYWORD_ONLY and first.name != "weigh"
            words = [
                _argument_text(key, value, bare=bool(bare and first and key == first.name))
                for key, value in given
            ]
            spelling = f"{name}:{','.join(words)}" if words else name
            return dataclasses.replace(made, spelling=spelling)

        make.__name__, make.__qualname__, make.__doc__ = row.__name__, row.__name__, row.__doc__
        make.__signature__ = signature  # type: ignore[attr-defined]
        ROWS[name] = make
        return make

    return wrap


def _argument_text(key: str, value: Any, *, bare: bool) -> str:
    text = WEIGHS.text(value) if key == "weigh" else call_text(value)
    return text if bare else f"{key}={text}"


@_named("bsp")
def BSP(*, backup: int = 0) -> Discipline:
    """Lock-step: all gradients of a round make one update; the last `backup` are dropped."""
    return Discipline(Gradient(), All(backup), wait=0)


@_named("soft")
def SoftSync(s: int, weigh: Weigh = Inverse()) -> Discipline:  # noqa: B008
    """Any `s` gradients make one update, nobody waits, and stale ones count less."""
    return Discipline(Gradient(), Count(s), weigh=weigh)


@_named("ssp")
def SSP(slack: int, weigh: Weigh = Constant()) -> Discipline:  # noqa: B008
    """Stale-synchronous: nobody begins a step more than `slack` clocks ahead of the slowest."""
    return Discipline(Gradient(), Count(1), wait=slack, weigh=weigh)


@_named("asp")
def ASP(weigh: Weigh = Constant()) -> Discipline:  # noqa: B008
    """Free-running: every gradient is an update of its own, and nobody waits."""
    return Discipline(Gradient(), Count(1), weigh=weigh)


@_named("downpour")
def Downpour(push: int = 1, fetch: int = 1, lr: float = 0.01) -> Discipline:
    """Accumulated gradients every `push` steps, parameters every `fetch`, Adagrad at the store."""
    return Discipline(Accumulated(push, fetch), Count(1), apply=Rule("adagrad", lr=lr))


@_named("asup")
def ASUP(slack: int = 8, lr: float = 0.01, momentum: float = 0.9, rho: float = 0.9) -> Discipline:
    """Bounded staleness, 1/staleness rates, and momentum over RMS-scaled gradients."""
    rule = Rule("rms-momentum", lr=lr, momentum=momentum, rho=rho)
    return Discipline(Gradient(), Count(1), wait=slack, weigh=Inverse(), apply=rule)


@_named("hogwild")
def Hogwild() -> Discipline:
    """Every worker writes the shared parameters without a lock."""
    return Discipline(InPlace())


@_named("average")
def Average(period: int = 16, state: Literal["keep", "average", "reset"] = "average") -> Discipline:
    """Every `period` steps all workers take the mean of their parameters and updater state."""
    return Discipline(Change(period, state), All(), wait=0, apply=Rule("sgd"))


@_named("local")
def LocalSGD(h: int = 16, state: Literal["keep", "average", "reset"] = "keep") -> Discipline:
    """`h` local steps, then all workers take the mean of their parameters."""
    return Discipline(Change(h, state), All(), wait=0, apply=Rule("sgd"))


@_named("bmuf")
def BMUF(
    block: int = 16, momentum: float | None = None, lr: float = 1.0, nesterov: bool = False
) -> Discipline:
    """Averaging with momentum over blocks; `momentum=None` means 1 − 1/workers."""
    rule = Rule("block-momentum", lr=lr, momentum=momentum, nesterov=nesterov)
    return Discipline(Change(block, "reset"), All(), wait=0, apply=rule)


@_named("easgd")
def EASGD(period: int = 10, alpha: float | None = None) -> Discipline:
    """Workers and a centre pull at each other every `period` steps, each worker at its own time."""
    return Discipline(Elastic(period, alpha), Count(1), apply=Rule("sgd"))


@_named("diloco")
def DiLoCo(h: int = 100, lr: float = 0.7, momentum: float = 0.9) -> Discipline:
    """`h` local steps, then one Nesterov step of the store along the mean change."""
    rule = Rule("sgd", lr=lr, momentum=momentum, nesterov=momentum > 0)
    return Discipline(Change(h), All(), wait=0, apply=rule)


@_named("async-local")
def AsyncLocalSGD(
    h: int = 50, lr: float = 0.7, momentum: float = 0.9, delay: int | None = None
) -> Discipline:
    """Local steps in number by speed, applied as they come with Nesterov momentum every `delay`."""
    rule = Rule("delayed-nesterov", lr=lr, momentum=momentum, delay=delay)
    return Discipline(Change(h, by_speed=True), Count(1), apply=rule)


@_named("fedbuff")
def FedBuff(k: int = 10, every: int = 16, lr: float = 1.0) -> Discipline:
    """Changes are buffered until `k` are there; stale ones count (1 + staleness)^-½."""
    return Discipline(Change(every), Count(k), weigh=Polynomial(0.5), apply=Rule("sgd", lr=lr))


@_named("gossip")
def Gossip() -> Discipline:
    """Everyone has parameters of their own and takes the mean with one other before each step."""
    return Discipline(Gradient(), Pair())


# ---------------------------------------------------------------- strings to values


def parse(text: str) -> Discipline:
    """Read `ssp:3`, `bsp:backup=1`, `asp:weigh=inverse` or a `custom:` form."""
    name, _, rest = text.strip().partition(":")
    if name == "custom":
        return _parse_custom(rest, text)
    if name not in ROWS:
        raise ConfigError(
            f"unknown discipline {name!r}{nearest(name, ROWS)}; there are {', '.join(ROWS)}"
        )
    parameters = inspect.signature(ROWS[name]).parameters
    positional, named = split_arguments(rest, text)
    arguments = parse_call(
        text, name, parameters, positional, named, readers={"weigh": WEIGHS.read}
    )
    return ROWS[name](**arguments)


def _parse_custom(rest: str, text: str) -> Discipline:
    positional, named = split_arguments(rest, text)
    choices = {"send": SENDS, "gather": GATHERS, "weigh": WEIGHS, "apply": APPLIES}
    unknown = [key for key in named if key != "wait" and key not in choices]
    if positional or unknown:
        raise ConfigError(
            f"{text!r}: {(positional + unknown)[0]!r} is not a choice; "
            "write custom:send=...,gather=...,wait=...,weigh=...,apply=..."
        )
    parts: dict[str, Any] = {
        key: choices[key].read(word) for key, word in named.items() if key in choices
    }
    if named.get("wait", "inf") != "inf":
        parts["wait"] = read_value(named["wait"], int, f"{text!r}: wait")
    return Discipline(**parts)


def as_discipline(value: "Discipline | str") -> Discipline:
    """A discipline as it is, or read from its string form."""
    if isinstance(value, Discipline):
        return value
    if isinstance(value, str):
        return parse(value)
    raise ConfigError(
        f"a discipline is a value like ob.SSP(slack=3) or a string like 'ssp:3', not {value!r}"
    )
