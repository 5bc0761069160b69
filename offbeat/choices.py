"""The five choices that make a discipline, each a family of small frozen values."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from offbeat.errors import ConfigError
from offbeat.spelling import Choice, nearest

# ---------------------------------------------------------------- checks


def at_least(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def within(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{name} must lie between {low:g} and {high:g}, not {value!r}")


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        hint = nearest(value, known) if isinstance(value, str) else ""
        raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}{hint}")


def yes_or_no(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")


# ---------------------------------------------------------------- send: what goes out, how often


@dataclass(frozen=True)
class Gradient:
    """The gradient of every step."""


@dataclass(frozen=True)
class Accumulated:
    """The sum of `push` gradients; fresh parameters come every `fetch` steps (Downpour)."""

    push: int = 1
    fetch: int = 1

    def __post_init__(self) -> None:
        at_least("push", self.push, 1)
        at_least("fetch", self.fetch, 1)


@dataclass(frozen=True)
class Change:
    """The change after `every` local steps with the worker's own optimiser.

    `state` says what becomes of that optimiser's state at a sync: kept, averaged over the workers,
    or reset. With `by_speed` a slower worker makes proportionally fewer local steps.
    """

    every: int = 16
    state: Literal["keep", "average", "reset"] = "keep"
    by_speed: bool = False

    def __post_init__(self) -> None:
        at_least("every", self.every, 1)
        one_of("state", self.state, ("keep", "average", "reset"))
        yes_or_no("by_speed", self.by_speed)


@dataclass(frozen=True)
class Elastic:
    """`alpha` times the distance to the centre every `every` steps; None means 0.9 / workers."""

    every: int = 10
    alpha: float | None = None

    def __post_init__(self) -> None:
        at_least("every", self.every, 1)
        if self.alpha is not None:
            within("alpha", self.alpha, 0.0, 1.0)


@dataclass(frozen=True)
class InPlace:
    """The step itself, written straight into shared parameters without a lock (Hogwild)."""


Send = Gradient | Accumulated | Change | Elastic | InPlace
HOGWILD = (
    "hogwild writes shared memory in place, which can be neither simulated nor replayed: "
    "use engine='local', or asp, the nearest discipline that keeps a log"
)

# ---------------------------------------------------------------- gather: how many make one update


@dataclass(frozen=True)
class All:
    """One contribution of every live worker, less `backup`; those that come late are dropped."""

    backup: int = 0

    def __post_init__(self) -> None:
        at_least("backup", self.backup, 0)


@dataclass(frozen=True)
class Count:
    """Any `k` contributions, whoever sends them."""

    k: int = 1

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)


@dataclass(frozen=True)
class Pair:
    """No store: everyone has parameters of their own, and takes the mean with one other (gossip).

    A contribution is a step of its worker's own rule, right after that mean has been taken.
    """

    k: ClassVar[int] = 1  # contributions in an update


Gather = All | Count | Pair

# ---------------------------------------------------------------- weigh: what staleness costs


@dataclass(frozen=True)
class Constant:
    """Every contribution counts in full."""

    def factor(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Inverse:
    """1/staleness, and 1 for a fresh contribution."""

    def factor(self, staleness: int) -> float:
        return 1.0 / staleness if staleness > 0 else 1.0


@dataclass(frozen=True)
class Polynomial:
    """(1 + staleness) to the power of minus `a`."""

    a: float = 0.5

    def __post_init__(self) -> None:
        within("a", self.a, 0.0, math.inf)

    def factor(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.a)


@dataclass(frozen=True)
class DelayCompensation:
    """g + strength · g² · (weights now − weights the worker read), as in DC-ASGD."""

    strength: float = 0.04

    def __post_init__(self) -> None:
        within("strength", self.strength, 0.0, math.inf)

    def factor(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class AdaptiveDelayCompensation:
    """Delay compensation whose strength is divided by the root of a running mean of g²."""

    strength: float = 2.0
    decay: float = 0.95

    def __post_init__(self) -> None:
        within("strength", self.strength, 0.0, math.inf)
        within("decay", self.decay, 0.0, 1.0)

    def factor(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class GapAware:
    """Each element divided by 1 + |weights now − weights read| / (an average step size)."""

    decay: float = 0.99

    def __post_init__(self) -> None:
        within("decay", self.decay, 0.0, 1.0)

    def factor(self, staleness: int) -> float:
        return 1.0


Weigh = Constant | Inverse | Polynomial | DelayCompensation | AdaptiveDelayCompensation | GapAware

# ---------------------------------------------------------------- apply: the rule at the store


@dataclass(frozen=True)
class Yours:
    """The optimiser the user gave."""


@dataclass(frozen=True)
class Rule:
    """A rule the discipline brings along; None among its settings is filled in by `for_workers`."""

    name: Literal["sgd", "adagrad", "rms-momentum", "block-momentum", "delayed-nesterov"]
    lr: float = 1.0
    momentum: float | None = 0.0
    nesterov: bool = False
    rho: float = 0.9
    delay: int | None = 1

    def __post_init__(self) -> None:
        one_of("rule", self.name, RULES)
        within("lr", self.lr, 0.0, math.inf)
        within("rho", self.rho, 0.0, 1.0)
        yes_or_no("nesterov", self.nesterov)
        if self.momentum is not None:
            within("momentum", self.momentum, 0.0, 1.0)
        if self.delay is not None:
            at_least("delay", self.delay, 1)


RULES = ("sgd", "adagrad", "rms-momentum", "block-momentum", "delayed-nesterov")
Apply = Yours | Rule

# ---------------------------------------------------------------- string forms of the parts

SENDS = Choice(
    "send",
    {"gradient": Gradient, "accumulated": Accumulated, "change": Change, "elastic": Elastic,
     "in-place": InPlace},
)  # fmt: skip
GATHERS = Choice("gather", {"all": All, "count": Count, "pair": Pair})
WEIGHS = Choice(
    "weigh",
    {"constant": Constant, "inverse": Inverse, "poly": Polynomial, "dc": DelayCompensation,
     "dc-adaptive": AdaptiveDelayCompensation, "gap": GapAware},
)  # fmt: skip
APPLIES = Choice("apply", {"yours": Yours, "rule": Rule})
