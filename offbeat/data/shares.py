"""How many samples the leases of a worker have: as many for all, given for each, or by speed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import signature
from statistics import median
from typing import Any, ClassVar

from offbeat.config.checks import at_least, within
from offbeat.config.text import call_text, nearest, parse_call, split_arguments
from offbeat.discipline.discipline import Discipline
from offbeat.errors import ConfigError

LOOKS = 7  # times of a sample that are remembered of each worker; the median counts
PAYS = 0.05  # of a round's time, that other sizes have to save before they are taken
WORDS = ("equal", "speed")
_EXAMPLES = "write equal, speed, speed:most=2, or a number for each worker: 1,2,4"


# ---------------------------------------------------------------- while a run goes


class LeaseSizes:
    """How many samples the next lease of each worker has; here the same for all, always.

    `least` is the fewest that a lease may have, those at the end of an epoch too.
    """

    least = 1

    def __init__(self, batch: int):
        self.batch = batch

    def of(self, worker: int) -> int:
        return self.batch

    def measured(self, worker: int, samples: int, seconds: float) -> None:
        """`worker` has computed so many samples in so many seconds."""

    def forget(self, worker: int) -> None:
        """`worker` is gone; if it comes back, it may be another machine."""

    def revise(self) -> None:
        """An update has been made: sizes may change now, so that those of a round fit together."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; nothing where nothing is learnt."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        return


class FixedSizes(LeaseSizes):
    """One size for each worker, whoever else is there."""

    def __init__(self, batch: int, sizes: Sequence[int], least: int):
        super().__init__(batch)
        self.sizes, self.least = list(sizes), least

    def of(self, worker: int) -> int:
        return self.sizes[worker]


class SizesBySpeed(LeaseSizes):
    """Sizes with which all who are there need the same time; together `batch` for each of them."""

    def __init__(self, batch: int, unit: int, least: int, most: int):
        """Sizes are multiples of `unit`, from `least` to `most` samples."""
        super().__init__(batch)
        self.unit, self.least, self.most = unit, least, most
        self.sizes: dict[int, int] = {}
        self.seconds: dict[int, list[float]] = {}  # that each last took for a sample
        self.news = 0  # measurements since the sizes were looked at

    def of(self, worker: int) -> int:
        if worker not in self.sizes:  # it adds its own batch to the round that is under way
            self.sizes[worker], self.seconds[worker] = self.batch, []
        return self.sizes[worker]

    def measured(self, worker: int, samples: int, seconds: float) -> None:
        if worker in self.sizes and samples and seconds > 0:
            self.seconds[worker] = [*self.seconds[worker], seconds / samples][-LOOKS:]
            self.news += 1

    def forget(self, worker: int) -> None:
        if self.sizes.pop(worker, None) is not None:
            del self.seconds[worker]
            known = any(self.seconds.values())
            equal = dict.fromkeys(self.sizes, self.batch)
            self.sizes = self._divided(self._speeds()) if known else equal

    def revise(self) -> None:
        if self.news < len(self.sizes):
            return
        self.news = 0
        speeds = self._speeds()
        wanted = (1 - PAYS) * self._longest(self.sizes, speeds)
        # Without bounds and whole numbers a round would take this long; mostly that settles it.
        if self.batch * len(speeds) / sum(speeds.values()) > wanted:
            return
        found = self._divided(speeds)
        if self._longest(found, speeds) <= wanted:
            self.sizes = found

    def _speeds(self) -> dict[int, float]:
        """Samples a second of each; of one that has not been seen yet, the mean of the others."""
        known = {w: 1 / median(times) for w, times in self.seconds.items() if times}
        mean = sum(known.values()) / len(known)
        return {worker: known.get(worker, mean) for worker in self.sizes}

    def _divided(self, speeds: dict[int, float]) -> dict[int, int]:
        unit, total = self.unit, self.batch * len(speeds)
        sizes = apportion(
            total // unit, list(speeds.values()), self.least // unit, self.most // unit
        )
        return {worker: size * unit for worker, size in zip(speeds, sizes, strict=True)}

    @staticmethod
    def _longest(sizes: dict[int, int], speeds: dict[int, float]) -> float:
        return max(sizes[worker] / speed for worker, speed in speeds.items())

    def state(self) -> dict[str, Any]:
        return {
            "sizes": {str(worker): size for worker, size in self.sizes.items()},
            "seconds": {str(worker): times for worker, times in self.seconds.items()},
            "news": self.news,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.sizes = {int(worker): size for worker, size in state["sizes"].items()}
        self.seconds = {int(worker): list(times) for worker, times in state["seconds"].items()}
        self.news = state["news"]


def apportion(total: int, speeds: Sequence[float], low: int, high: int) -> list[int]:
    """Whole numbers that add up to `total`, of which the longest time is as short as can be.

    A time is a number over its speed. Each number lies between `low` and `high`, whose sums lie
    below and above `total`.
    """

    def within_time(time: float) -> list[int]:
        return [min(high, max(low, math.floor(time * speed))) for speed in speeds]

    short, long = 0.0, total / min(speeds)
    sizes = within_time(short)
    for _ in range(64):
        if sum(sizes) == total:
            break
        time = (short + long) / 2
        found = within_time(time)
        if sum(found) <= total:
            short, sizes = time, found
        else:
            long = time
    for _ in range(total - sum(sizes)):  # of some that could have one more, not all can
        room = [i for i, size in enumerate(sizes) if size < high]
        sizes[min(room, key=lambda i: (sizes[i] + 1) / speeds[i])] += 1
    return sizes


# ---------------------------------------------------------------- as a user says it


class Shares:
    """What decides the sizes of leases; their mean over the workers is `batch_size`."""

    uneven: ClassVar[bool] = True
    least: int

    @property
    def told(self) -> str:
        """What a run says of them: nothing where they are equal, as they usually are."""
        return str(self) if self.uneven else ""

    def sizes(self, batch: int, workers: int, unit: int = 1) -> LeaseSizes:
        """What a run asks; sizes are multiples of `unit` where an epoch's end allows it."""
        raise NotImplementedError

    def range(self, batch: int, workers: int, unit: int = 1) -> tuple[int, int]:
        """The fewest and the most samples that a lease can have, but for the end of an epoch.

        There it may have fewer if sizes are equal, and never if they are not.
        """
        raise NotImplementedError

    def check(self, discipline: Discipline, workers: int) -> None:
        """Refuse a discipline under which they make no sense, before a run begins."""
        send, why = discipline.send, ""
        if discipline.pairs or send.in_place or send.centre:
            why = (
                f"under {discipline} nobody takes a mean that is weighed by samples, so the model "
                "would depend on who is how fast, and nobody waits for a slower one: leave "
                "shares out"
            )
        elif send.by_speed:
            why = "it already has slower workers make fewer steps: leave shares out, or use local"
        if why:
            raise ConfigError(f"shares={self} with {discipline}: {why}")


def _fewest(shares: Shares, batch: int, unit: int) -> int:
    """The least size in whole units."""
    if shares.least > batch:
        raise ConfigError(
            f"shares={shares}: least={shares.least} is more than a batch of {batch}, which is "
            f"the mean: write least={batch} or less"
        )
    return -(-shares.least // unit) * unit


@dataclass(frozen=True)
class EqualShares(Shares):
    """The same for all: every lease is a batch."""

    uneven = False
    least = 1

    def sizes(self, batch: int, workers: int, unit: int = 1) -> LeaseSizes:
        return LeaseSizes(batch)

    def range(self, batch: int, workers: int, unit: int = 1) -> tuple[int, int]:
        return batch, batch

    def check(self, discipline: Discipline, workers: int) -> None:
        return

    def __str__(self) -> str:
        return "equal"


EQUAL = EqualShares()


@dataclass(frozen=True)
class GivenShares(Shares):
    """In proportion to `parts`, a number for each worker; they stay so whoever is lost."""

    parts: tuple[float, ...]
    least: int = 1  # samples of the smallest lease

    def __post_init__(self) -> None:
        if not isinstance(self.parts, list | tuple) or not self.parts:
            raise ConfigError(f"shares cannot be {self.parts!r}: {_EXAMPLES}")
        for part in self.parts:
            within("a share", part, 1e-6, 1e6)
        object.__setattr__(self, "parts", tuple(self.parts))
        at_least("least", self.least, 1)

    def sizes(self, batch: int, workers: int, unit: int = 1) -> FixedSizes:
        least, total = _fewest(self, batch, unit), batch * workers
        sizes = apportion(total // unit, self.parts, least // unit, total // unit)
        return FixedSizes(batch, [size * unit for size in sizes], least)

    def range(self, batch: int, workers: int, unit: int = 1) -> tuple[int, int]:
        made = self.sizes(batch, workers, unit)
        return made.least, max(*made.sizes, 2 * made.least - 1)

    def check(self, discipline: Discipline, workers: int) -> None:
        if len(self.parts) != workers:
            raise ConfigError(
                f"shares={self} are of {len(self.parts)} workers, and there are {workers}: give "
                "one for each, or write shares='speed'"
            )
        super().check(discipline, workers)

    def __str__(self) -> str:
        words = [f"{part:g}" if float(f"{part:g}") == part else repr(part) for part in self.parts]
        return ",".join(words) + (f",least={self.least}" if self.least > 1 else "")


@dataclass(frozen=True)
class SpeedShares(Shares):
    """By the speed that each worker has shown: all who are there need the same time for a step.

    No lease has more than `most` batches, whatever a worker can do, nor fewer than `least` samples.
    """

    most: float = 4.0
    least: int = 1

    def __post_init__(self) -> None:
        within("most", self.most, 1.0, 1e6)
        at_least("least", self.least, 1)

    def sizes(self, batch: int, workers: int, unit: int = 1) -> SizesBySpeed:
        most = int(min(self.most, workers) * batch) // unit * unit
        return SizesBySpeed(batch, unit, _fewest(self, batch, unit), most)

    def range(self, batch: int, workers: int, unit: int = 1) -> tuple[int, int]:
        made = self.sizes(batch, workers, unit)
        return made.least, max(made.most, 2 * made.least - 1)

    def __str__(self) -> str:
        settings = [
            f"{f.name}={call_text(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"speed:{','.join(settings)}" if settings else "speed"


def as_shares(value: Shares | str | Sequence[float] | None) -> Shares:
    """Shares from what a user writes: a value, text, or a number for each worker."""
    if value is None:
        return EQUAL
    if isinstance(value, Shares):
        return value
    return _read(value) if isinstance(value, str) else GivenShares(tuple(value))


def _read(text: str) -> Shares:
    word, _, rest = text.strip().partition(":")
    if word == "equal" and not rest:
        return EQUAL
    positional, named = split_arguments(rest if word == "speed" else text, text)
    if word == "speed":
        parameters = signature(SpeedShares).parameters
        return SpeedShares(**parse_call(text, "speed", parameters, positional, named))
    try:
        if not positional:
            raise ValueError
        parts = tuple(int(one) if one.isdigit() else float(one) for one in positional)
    except ValueError:
        raise ConfigError(f"shares cannot be {text!r}{nearest(word, WORDS)}: {_EXAMPLES}") from None
    beside = {"least": signature(GivenShares).parameters["least"]}
    return GivenShares(parts, **parse_call(text, "a list of shares", beside, [], named))
