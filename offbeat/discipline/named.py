"""The known systems as named rows of the five choices, and strings that name any discipline."""

# The named rows read as values (`SSP(slack=3)`), so they are spelled like classes.
# ruff: noqa: N802

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

from offbeat.config.checks import at_least
from offbeat.config.text import call_text, nearest, parse_call, read_value, split_arguments
from offbeat.discipline.discipline import Discipline
from offbeat.discipline.parts import (
    APPLIES,
    GATHERS,
    SENDS,
    WEIGHS,
    Accumulated,
    All,
    Change,
    Constant,
    Count,
    Elastic,
    Gradient,
    InPlace,
    Inverse,
    Pair,
    Polynomial,
    Rule,
    Weigh,
)
from offbeat.errors import ConfigError

_Row = Callable[..., Discipline]
ROWS: dict[str, _Row] = {}
# Whole-number settings by name, so that an error speaks of the setting the user wrote.
_LEAST = {"slack": 0, "backup": 0} | dict.fromkeys(
    ("s", "r", "h", "k", "period", "block", "push", "fetch", "every"), 1
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
            return dataclasses.replace(made, spelled=(spelling, made.choices))

        make.__name__, make.__qualname__, make.__doc__ = row.__name__, row.__name__, row.__doc__
        make.__signature__ = signature  # type: ignore[attr-defined]
        ROWS[name] = make
        return make

    return wrap


def _argument_text(key: str, value: Any, *, bare: bool) -> str:
    text = WEIGHS.text(value) if key == "weigh" else call_text(value)
    return text if bare else f"{key}={text}"


# ---------------------------------------------------------------- the rows


@_named("bsp")
def BSP(*, backup: int = 0, redo: bool = False) -> Discipline:
    """Lock-step: all gradients of a round make one update; the last `backup` are dropped."""
    return Discipline(Gradient(), All(backup, redo), wait=0)


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


@_named("ringmaster")
def Ringmaster(r: int, weigh: Weigh = Constant(), redo: bool = False) -> Discipline:  # noqa: B008
    """Free-running, but a gradient is dropped if `r` updates or more were made since its pull."""
    return Discipline(Gradient(), Count(1, limit=r - 1, redo=redo), weigh=weigh)


@_named("rennala")
def Rennala(s: int, redo: bool = False) -> Discipline:
    """`s` gradients of the current version make an update; those of older ones are dropped."""
    return Discipline(Gradient(), Count(s, limit=0, redo=redo))


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


def as_discipline(value: Discipline | str) -> Discipline:
    """A discipline as it is, or read from its string form."""
    if isinstance(value, Discipline):
        return value
    if isinstance(value, str):
        return parse(value)
    raise ConfigError(
        f"a discipline is a value like ob.SSP(slack=3) or a string like 'ssp:3', not {value!r}"
    )
