"""What runs are judged by: a score with its direction, and the levels a run reached and kept."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from offbeat.errors import ConfigError

KEPT = 3  # tests whose mean must be at the target, the one that reached it among them
MARKS = 1024  # rising levels that are remembered of a run; more are thinned
NOTHING = -sys.float_info.max  # below every level; infinity cannot be written as JSON
_ROUNDING = 1e-12  # of a mean, relative
_LONGEST = 40  # letters of a metric's name, which may come from a file

Kind = Literal["metric", "accuracy", "loss"]


class Tested(Protocol):
    """What a test found, as far as it can be scored."""

    @property
    def time(self) -> float: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def accuracy(self) -> float | None: ...
    @property
    def metric(self) -> float | None: ...


class Judged(msgspec.Struct, frozen=True):
    """A user's metric as a run folder tells of it."""

    name: str
    higher: bool = True  # is better


class Score(msgspec.Struct, frozen=True):
    """One of the figures of a test: its name, whether higher is better, and how it is written."""

    kind: Kind
    name: str
    higher: bool = True

    def of(self, test: Tested) -> float | None:
        found: float | None = getattr(test, self.kind)
        return found

    def write(self, value: float | None) -> str:
        if value is None:
            return "-"
        return f"{100 * value:.1f} %" if self.kind == "accuracy" else f"{value:.4g}"

    def bare(self, target: float) -> str:
        """A target without its name: 90 %, 0.35."""
        return f"{100 * target:g} %" if self.kind == "accuracy" else f"{target:g}"

    def goal(self, target: float) -> str:
        """A target in words: 90 % accuracy, a test loss of 0.35."""
        return self.told(self.bare(target))

    def told(self, value: str) -> str:
        """A value with its name: 93.1 % accuracy, a test loss of 0.31, f1 0.8."""
        if self.kind == "accuracy":
            return f"{value} accuracy"
        return f"a test loss of {value}" if self.kind == "loss" else f"{self.name} {value}"

    @property
    def words(self) -> str:
        """Its name within a sentence."""
        return "test loss" if self.kind == "loss" else self.name

    @property
    def best(self) -> str:
        return "highest" if self.higher else "lowest"

    def better(self, one: float, other: float) -> bool:
        return one > other if self.higher else one < other

    def read(self, target: str | float) -> float:
        """A target as it is written, `90%`, `0.9` or `0.35`; refuses what no run can mean."""
        value, percent = read_target(target)
        if self.kind == "accuracy" and not 0 < value <= 1:
            raise ConfigError(
                f"the target is an accuracy here: write 90% or 0.9 for 90 %, not {target}"
            )
        if self.kind == "loss" and percent:
            raise ConfigError(
                f"the target is a loss on the test set here, so {target} means nothing: "
                "write a number such as 0.35"
            )
        return value

    def suiting(self, levels: Sequence[float], comparable: float) -> float:
        """A target that every run near the best has reached, in round figures."""
        best = max(levels) if self.higher else min(levels)
        near = [level for level in levels if best <= 0 or self._near(level, best, comparable)]
        weakest = min(near) if self.higher else max(near)
        if self.kind == "accuracy":
            # Below a tenth a whole per cent is too coarse.
            steps = 100 if weakest >= 0.1 else 10_000
            return math.floor(weakest * steps + 1e-9) / steps
        if weakest == 0:
            return 0.0
        digits = 1 - math.floor(math.log10(abs(weakest)))
        scale = 10.0**digits
        rounded = (
            math.floor(weakest * scale + 1e-9) if self.higher else math.ceil(weakest * scale - 1e-9)
        )
        return rounded / scale

    def _near(self, level: float, best: float, comparable: float) -> bool:
        return level >= comparable * best if self.higher else level * comparable <= best


ACCURACY = Score("accuracy", "accuracy")
LOSS = Score("loss", "loss", higher=False)


def scored_by(metric: Judged) -> Score:
    return Score("metric", metric.name[:_LONGEST], metric.higher)


def read_target(text: str | float) -> tuple[float, bool]:
    """A target as it is written, `90%`, `0.9` or `0.35`, and whether it was a percentage."""
    word = str(text).strip()
    percent = word.endswith("%")
    try:
        value = float(word.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"the target must be a number such as 90%, 0.9 or 0.35, not {text!r}")
    return (value / 100 if percent else value), percent


# ---------------------------------------------------------------- reached and kept


class Climb(msgspec.Struct):
    """The levels that a run has reached and kept, each with the time at which it did.

    A test keeps a level if it is there itself and the mean of it and the next two tests is, too.
    The last two tests of a run have fewer behind them, and are held to those that there are.
    """

    higher: bool = True
    marks: list[tuple[float, float]] = []  # times and rising levels; those to be low are negated
    waiting: list[tuple[float, float]] = []  # tests whose successors are not there yet

    def see(self, time: float, value: float | None) -> None:
        """The next test; None, where there was no number, is at no level at all."""
        good = NOTHING
        if value is not None and math.isfinite(value):
            good = value if self.higher else -value
        self.waiting.append((time, good))
        if len(self.waiting) == KEPT:
            self._mark(self.waiting[0][0], _level([v for _, v in self.waiting]))
            self.waiting.pop(0)

    def _mark(self, time: float, level: float) -> None:
        if level > (self.marks[-1][1] if self.marks else NOTHING):
            self.marks.append((time, level))
            if len(self.marks) > MARKS:
                self._thin()

    def _thin(self) -> None:
        """Half as many marks: those that the level rose a little more between, and the last."""
        *rising, last = self.marks
        least = (last[1] - rising[0][1]) / (MARKS // 2)
        kept = rising[:1]
        for mark in rising:
            if mark[1] >= kept[-1][1] + least:
                kept.append(mark)
        self.marks = [*kept, last]

    def _all(self) -> Iterator[tuple[float, float]]:
        yield from self.marks
        for index, (time, _) in enumerate(self.waiting):
            yield time, _level([value for _, value in self.waiting[index:]])

    def time_to(self, target: float) -> float | None:
        """Seconds until `target` was reached and kept, or None."""
        wanted = target if self.higher else -target
        return next((time for time, level in self._all() if level >= wanted), None)

    def best(self) -> float | None:
        """The best level that was kept."""
        level = max((level for _, level in self._all()), default=NOTHING)
        if level == NOTHING:
            return None
        return level if self.higher else -level

    def copy(self) -> "Climb":
        return Climb(self.higher, list(self.marks), list(self.waiting))


def _level(values: Sequence[float]) -> float:
    first, mean = values[0], sum(value / len(values) for value in values)
    if NOTHING in values:
        return NOTHING
    return mean if mean < first - _ROUNDING * abs(first) else first


class Climbs(msgspec.Struct):
    """One climb for each score that a test may have."""

    metric: Climb
    accuracy: Climb
    loss: Climb

    @classmethod
    def of(cls, tests: Iterable[Tested] = (), metric: Judged | None = None) -> "Climbs":
        higher = True if metric is None else metric.higher
        made = cls(Climb(higher, [], []), Climb(True, [], []), Climb(False, [], []))
        for test in tests:
            made.see(test)
        return made

    def see(self, test: Tested) -> None:
        self.metric.see(test.time, test.metric)
        self.accuracy.see(test.time, test.accuracy)
        self.loss.see(test.time, test.loss)

    def by(self, kind: Kind) -> Climb:
        found: Climb = getattr(self, kind)
        return found

    def copy(self) -> "Climbs":
        return Climbs(self.metric.copy(), self.accuracy.copy(), self.loss.copy())
