"""The five choices that make a discipline, each a family of small frozen values.

What others need to know of a choice is a property of it, so that nobody outside this package asks
which one it is. Each family begins with these properties and what most of its values say.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.config.checks import at_least, one_of, within, yes_or_no
from offbeat.config.text import Choice
from offbeat.errors import ConfigError

# ---------------------------------------------------------------- send: what goes out, how often


class Send:
    """What a worker sends, and how often."""

    kind: ClassVar[str]  # its word
    each_gradient: ClassVar[bool] = False  # a gradient goes out after every step
    steps_locally: ClassVar[bool] = False  # the user's optimiser works at the worker
    summable: ClassVar[bool] = False  # workers may as well add it up among themselves
    centre: ClassVar[bool] = False  # a pull comes right before a push and leaves parameters alone
    in_place: ClassVar[bool] = False  # workers write the shared parameters themselves

    @property
    def local_steps(self) -> int:
        """Steps between two pushes."""
        return 1

    @property
    def fetch(self) -> int:
        """Steps between two pulls; 0 pulls after every push."""
        return 0

    @property
    def by_speed(self) -> bool:
        """Whether a slower worker makes fewer local steps."""
        return False

    @property
    def averages_state(self) -> bool:
        """Whether the state of the workers' optimisers is averaged too."""
        return False

    @property
    def descends(self) -> str:
        """What the store's rule is given: what it keeps of one means nothing for another."""
        return "gradients"

    @property
    def lasting(self) -> "Send":
        """What of it stays throughout a course: how many steps come next is told with each pull."""
        return self

    def for_workers(self, workers: int) -> "Send":
        """The same with every number filled in that depends on `workers`."""
        return self


@dataclass(frozen=True)
class Gradient(Send):
    """The gradient of every step."""

    kind = "gradient"
    each_gradient = True
    summable = True


@dataclass(frozen=True)
class Accumulated(Send):
    """The sum of `push` gradients; fresh parameters come every `fetch` steps (Downpour)."""

    kind = "accumulated"
    push: int = 1
    fetch: int = 1

    def __post_init__(self) -> None:
        at_least("push", self.push, 1)
        at_least("fetch", self.fetch, 1)

    @property
    def local_steps(self) -> int:
        return self.push

    @property
    def descends(self) -> str:
        return f"sums of {self.push} gradients" if self.push > 1 else super().descends


@dataclass(frozen=True)
class Change(Send):
    """The change after `every` local steps with the worker's own optimiser.

    `state` says what becomes of that optimiser's state at a sync: kept, averaged over the workers,
    or reset. With `by_speed` a slower worker makes proportionally fewer local steps.
    """

    kind = "change"
    steps_locally = True
    summable = True
    every: int = 16
    state: Literal["keep", "average", "reset"] = "keep"
    by_speed: bool = False

    def __post_init__(self) -> None:
        at_least("every", self.every, 1)
        one_of("state", self.state, ("keep", "average", "reset"))
        yes_or_no("by_speed", self.by_speed)

    @property
    def local_steps(self) -> int:
        return self.every

    @property
    def lasting(self) -> Send:
        return dataclasses.replace(self, every=1, by_speed=False)

    @property
    def averages_state(self) -> bool:
        return self.state == "average"

    @property
    def descends(self) -> str:
        return "changes of local steps"


@dataclass(frozen=True)
class Elastic(Send):
    """`alpha` times the distance to the centre every `every` steps; None means 0.9 / workers."""

    kind = "elastic"
    steps_locally = True
    centre = True
    every: int = 10
    alpha: float | None = None

    def __post_init__(self) -> None:
        at_least("every", self.every, 1)
        if self.alpha is not None:
            within("alpha", self.alpha, 0.0, 1.0)

    @property
    def local_steps(self) -> int:
        return self.every

    @property
    def lasting(self) -> Send:
        return dataclasses.replace(self, every=1)

    @property
    def descends(self) -> str:
        return "distances to the centre"

    def for_workers(self, workers: int) -> Send:
        return self if self.alpha is not None else dataclasses.replace(self, alpha=0.9 / workers)


@dataclass(frozen=True)
class InPlace(Send):
    """The step itself, written straight into shared parameters without a lock (Hogwild)."""

    kind = "in-place"
    steps_locally = True
    in_place = True

    @property
    def descends(self) -> str:
        return "nothing, as workers write in place"


# ---------------------------------------------------------------- gather: how many make one update


class Gather:
    """How many contributions make one update."""

    kind: ClassVar[str]  # its word
    barrier: ClassVar[bool] = False  # nobody goes on before the update that it contributed to
    pairs: ClassVar[bool] = False  # workers have parameters of their own and meet in pairs

    @property
    def k(self) -> int:
        """Contributions in an update; 0 is one of every live worker."""
        return 1

    @property
    def backup(self) -> int:
        """Contributions of a round that are not waited for, and dropped."""
        return 0

    @property
    def limit(self) -> int | None:
        """The largest staleness that is still applied; what is staler is dropped. None is any."""
        return None

    @property
    def redo(self) -> bool:
        """Whether samples of what is dropped go out again, so that each is applied once."""
        return False

    def together(self, workers: int) -> int:
        """Contributions in an update if nobody is lost."""
        return self.k or workers - self.backup


@dataclass(frozen=True)
class All(Gather):
    """One contribution of every live worker, less `backup`; those that come late are dropped.

    With `redo` their samples go out again.
    """

    kind = "all"
    barrier = True
    k = 0
    backup: int = 0
    redo: bool = False

    def __post_init__(self) -> None:
        at_least("backup", self.backup, 0)
        yes_or_no("redo", self.redo)
        if self.redo and not self.backup:
            raise ConfigError("redo is for what is dropped, and nothing is: give backup as well")

    @property
    def limit(self) -> int | None:
        return 0 if self.backup else None


@dataclass(frozen=True)
class Count(Gather):
    """Any `k` contributions, whoever sends them; what is staler than `limit` is dropped.

    With `redo` the samples of what is dropped go out again.
    """

    kind = "count"
    k: int = 1
    limit: int | None = None
    redo: bool = False

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)
        if self.limit is not None:
            at_least("limit", self.limit, 0)
        yes_or_no("redo", self.redo)
        if self.redo and self.limit is None:
            raise ConfigError("redo is for what is dropped, and nothing is: give limit as well")


@dataclass(frozen=True)
class Pair(Gather):
    """No store: everyone has parameters of their own, and takes the mean with one other (gossip).

    A contribution is a step of its worker's own rule, right after that mean has been taken.
    """

    kind = "pair"
    pairs = True


# ---------------------------------------------------------------- weigh: what staleness costs


class Weigh:
    """What staleness costs: a factor on the whole contribution, or something for each element."""

    kind: ClassVar[str]  # its word
    constant: ClassVar[bool] = False  # staleness costs nothing
    elementwise: ClassVar[bool] = False  # needs the parameters that a gradient was computed on

    def factor(self, staleness: int) -> float:
        """What a contribution of this staleness counts."""
        return 1.0


@dataclass(frozen=True)
class Constant(Weigh):
    """Every contribution counts in full."""

    kind = "constant"
    constant = True


@dataclass(frozen=True)
class Inverse(Weigh):
    """1/staleness, and 1 for a fresh contribution."""

    kind = "inverse"

    def factor(self, staleness: int) -> float:
        return 1.0 / staleness if staleness > 0 else 1.0


@dataclass(frozen=True)
class Polynomial(Weigh):
    """(1 + staleness) to the power of minus `a`."""

    kind = "poly"
    a: float = 0.5

    def __post_init__(self) -> None:
        within("a", self.a, 0.0, math.inf)

    def factor(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.a)


@dataclass(frozen=True)
class DelayCompensation(Weigh):
    """g + strength · g² · (weights now − weights the worker read), as in DC-ASGD."""

    kind = "dc"
    elementwise = True
    strength: float = 0.04

    def __post_init__(self) -> None:
        within("strength", self.strength, 0.0, math.inf)


@dataclass(frozen=True)
class AdaptiveDelayCompensation(Weigh):
    """Delay compensation whose strength is divided by the root of a running mean of g²."""

    kind = "dc-adaptive"
    elementwise = True
    strength: float = 2.0
    decay: float = 0.95

    def __post_init__(self) -> None:
        within("strength", self.strength, 0.0, math.inf)
        within("decay", self.decay, 0.0, 1.0)


@dataclass(frozen=True)
class GapAware(Weigh):
    """Each element divided by 1 + |weights now − weights read| / (an average step size)."""

    kind = "gap"
    elementwise = True
    decay: float = 0.99

    def __post_init__(self) -> None:
        within("decay", self.decay, 0.0, 1.0)


# ---------------------------------------------------------------- apply: the rule at the store


class Apply:
    """The rule at the store."""

    kind: ClassVar[str]  # its word

    @property
    def rule(self) -> "Rule | None":
        """What the discipline brings along; None is the optimiser the user gave."""
        return None

    def for_workers(self, workers: int) -> "Apply":
        """The same with every number filled in that depends on `workers`."""
        return self


@dataclass(frozen=True)
class Yours(Apply):
    """The optimiser the user gave."""

    kind = "yours"


@dataclass(frozen=True)
class Rule(Apply):
    """A rule the discipline brings along; None among its settings is filled in by `for_workers`."""

    kind = "rule"
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

    @property
    def rule(self) -> "Rule":
        return self

    def for_workers(self, workers: int) -> Apply:
        momentum = 1 - 1 / workers if self.momentum is None else self.momentum
        delay = workers if self.delay is None else self.delay
        return dataclasses.replace(self, momentum=momentum, delay=delay)


RULES = ("sgd", "adagrad", "rms-momentum", "block-momentum", "delayed-nesterov")

# ---------------------------------------------------------------- string forms of the parts


def _family(what: str, *kinds: type[Send] | type[Gather] | type[Weigh] | type[Apply]) -> Choice:
    return Choice(what, {kind.kind: kind for kind in kinds})


SENDS = _family("send", Gradient, Accumulated, Change, Elastic, InPlace)
GATHERS = _family("gather", All, Count, Pair)
WEIGHS = _family(
    "weigh", Constant, Inverse, Polynomial, DelayCompensation, AdaptiveDelayCompensation, GapAware
)
APPLIES = _family("apply", Yours, Rule)
