"""What a page shows of a run: its parts, curves that stay short, and a histogram."""

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

POINTS = 240  # of a curve; beyond that its points are merged two by two
BARS = 16  # of that histogram

Point = tuple[float, float]


class WorkerRow(msgspec.Struct):
    """One worker as it is shown; `about` goes on where `state` ends."""

    number: int
    state: str
    about: str
    clock: int
    staleness: int
    contributions: int
    link: str = ""  # how its link does, in figures, if it has one


class RareEvent(msgspec.Struct):
    """Something rare, told in words."""

    number: int
    time: float
    kind: str
    text: str


class LivePicture(msgspec.Struct):
    """All that a page shows."""

    title: str
    virtual: bool
    over: str  # "finished" or "stopped" once the run is over
    time: float
    done: float  # share of the samples
    samples: int
    version: int
    epochs: int
    rate: float
    loss: float | None
    test_loss: float | None
    accuracy: float | None
    staleness: float  # mean
    staleness_recent: float
    bars: list[tuple[int, int, int]]  # of the recent contributions: from, to, how many
    counts: dict[str, int]
    curves: dict[str, list[Point]]
    workers: int
    states: dict[str, int]  # how many workers are in each
    rows: list[WorkerRow]
    linked: bool  # whether workers are on other hosts
    events: list[RareEvent]


class Curve:
    """A bounded series: when it is full, neighbours are merged and each point stands for more."""

    def __init__(self, limit: int = POINTS):
        self.limit, self.step = limit, 1
        self.points: list[Point] = []
        self.sum, self.count = 0.0, 0

    def add(self, time: float, value: float) -> None:
        self.sum += value
        self.count += 1
        if self.count < self.step:
            return
        self.points.append((short(time), short(self.sum / self.count)))
        self.sum, self.count = 0.0, 0
        if len(self.points) >= self.limit:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(late, short((a + b) / 2)) for (_, a), (late, b) in pairs]
            self.step *= 2

    def cut(self, time: float) -> None:
        """Forget what came after `time`."""
        self.points = [point for point in self.points if point[0] <= time]


def short(value: float) -> float:
    """Six digits: more cannot be seen."""
    return float(f"{value:.6g}")


def bars(values: Collection[int]) -> list[tuple[int, int, int]]:
    """A histogram of at most BARS equal bars, from 0 on."""
    if not values:
        return []
    width = -(-(max(values) + 1) // BARS)
    found = Counter(value // width for value in values)
    last = max(found)
    return [(bar * width, (bar + 1) * width - 1, found[bar]) for bar in range(last + 1)]


def listed(numbers: Sequence[int]) -> str:
    """`worker 0`, `workers 0 and 2`, `workers 0, 1, 2 and 5 more`."""
    if len(numbers) == 1:
        return f"worker {numbers[0]}"
    if len(numbers) > 4:
        shown = ", ".join(map(str, numbers[:3]))
        return f"workers {shown} and {len(numbers) - 3:,} more"
    *most, last = map(str, numbers)
    return f"workers {', '.join(most)} and {last}"


def flow(round_trip_us: int, up: int, down: int) -> str:
    """How a link does: its round trip, and bytes a second each way, as far as that is known."""
    told = [f"{round_trip_us / 1000:.2g} ms"] if round_trip_us else []
    told += [f"{arrow} {amount(rate)}/s" for arrow, rate in (("↑", up), ("↓", down)) if rate]
    return ", ".join(told)


def amount(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def seconds(value: float) -> str:
    return f"{value:.3g} s"
