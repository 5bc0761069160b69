"""Runs side by side: which discipline on how many devices, how often, and what each came to."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from offbeat.errors import ConfigError
from offbeat.report.digest import CURVE, RunDigest
from offbeat.report.score import ACCURACY, LOSS, Judged, Score, scored_by
from offbeat.report.summary import History, Summary
from offbeat.report.words import counted

T = TypeVar("T")
COMPARABLE = 0.8  # of the best score; a run below that has failed and sets no target


class Cell(msgspec.Struct):
    """One run of a comparison: its digest, or why it failed; neither while it has not been run."""

    discipline: str
    devices: int
    repeat: int = 0
    digest: RunDigest | None = None
    failed: str = ""


@dataclass(frozen=True)
class Spread:
    """A figure over repeats: its mean, and the least and the greatest seen."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def over(cls, values: Sequence[float]) -> "Spread | None":
        """None where there is nothing to average."""
        if not values:
            return None
        return cls(sum(values) / len(values), min(values), max(values), len(values))

    def apart(self, other: "Spread") -> bool:
        """True when no repeat of one lies within the other's spread."""
        return self.high < other.low or other.high < self.low


@dataclass(frozen=True)
class CellGroup:
    """The repeats of one discipline on one number of devices."""

    discipline: str
    devices: int
    digests: tuple[RunDigest, ...]

    def span(self, figure: Callable[[RunDigest], float | None]) -> Spread | None:
        """A figure over the repeats; None unless each of them has it."""
        values = [value for d in self.digests if (value := figure(d)) is not None]
        return Spread.over(values) if len(values) == len(self.digests) else None

    def time_to(self, aim: "Aim | None") -> Spread | None:
        """Seconds to the target; None unless every repeat reached and kept it."""
        return None if aim is None else self.span(aim.time)

    def reached(self, aim: "Aim") -> int:
        """How many repeats reached and kept the target."""
        return sum(aim.time(d) is not None for d in self.digests)

    def final(self, score: Score | None) -> Spread | None:
        """The score of the last test."""
        return None if score is None else self.span(lambda d: final(d, score))

    def staleness(self) -> dict[int, int]:
        """How many contributions were how stale, over all repeats."""
        total: Counter[int] = Counter()
        for d in self.digests:
            total.update(d.summary.staleness_counts)
        return dict(sorted(total.items()))

    @property
    def finished(self) -> bool:
        return all(d.finished for d in self.digests)

    @property
    def name(self) -> str:
        return f"{self.discipline} on {counted(self.devices, 'device')}"


@dataclass(frozen=True)
class Aim:
    """The score whose time is compared, and how good it is to be."""

    score: Score
    target: float

    def time(self, digest: RunDigest) -> float | None:
        """Seconds until the run had reached and kept it."""
        return digest.time_to(self.target, self.score.kind)

    def __str__(self) -> str:
        return self.score.goal(self.target)

    @property
    def bare(self) -> str:
        return self.score.bare(self.target)


@dataclass(frozen=True)
class Grid:
    """The cells of a comparison, or the runs that a report puts side by side."""

    title: str
    cells: Sequence[Cell]
    target: float | None = None  # of the score; None takes one that suits all
    settings: dict[str, str] = field(default_factory=dict)  # shown with the results, as they are

    def digests(self) -> list[RunDigest]:
        """Of every run that has come to something."""
        return [cell.digest for cell in self.cells if cell.digest is not None]

    def groups(self) -> list[CellGroup]:
        """Repeats together, in the order in which disciplines and devices first appear."""
        found: dict[tuple[str, int], list[RunDigest]] = {}
        for cell in self.cells:
            if cell.digest is not None:
                found.setdefault((cell.discipline, cell.devices), []).append(cell.digest)
        order = self.disciplines()
        keys = sorted(found, key=lambda key: (order.index(key[0]), key[1]))
        return [CellGroup(name, devices, tuple(found[name, devices])) for name, devices in keys]

    def disciplines(self) -> list[str]:
        """Every label once, in the order of the cells; failed ones too, so colours stay put."""
        return list(dict.fromkeys(cell.discipline for cell in self.cells))

    def devices(self) -> list[int]:
        """Every number of devices that some run has come to something with."""
        return sorted({group.devices for group in self.groups()})

    def on_most(self) -> list[CellGroup]:
        """The groups that are compared in detail: those on the most devices that two share."""
        groups = self.groups()
        shared = [n for n, count in Counter(g.devices for g in groups).items() if count > 1]
        return [g for g in groups if g.devices == max(shared)] if shared else groups

    def score(self) -> Score | None:
        """What the runs are judged by: the user's metric where all have the same, else accuracy
        where there are classes, else the loss on the test set; None where nobody was tested."""
        tested = [d for d in self.digests() if d.tests]
        named = {d.metric for d in tested}
        if len(named) == 1 and (metric := named.pop()) is not None:
            return scored_by(metric)
        for score in (ACCURACY, LOSS):
            if any(score.of(test) is not None for d in tested for test in d.tests):
                return score
        return None

    def aim(self) -> Aim | None:
        """The score whose time is compared and its target, as given or else one that suits all.

        That is the best that the weakest run reached and kept, in round figures. Runs that came
        nowhere near the others, and runs that still go on, do not lower it.
        """
        score = self.score()
        if score is None:
            return None
        if self.target is not None:
            return Aim(score, self.target)
        digests = self.digests()
        over = [d for d in digests if d.finished] or digests
        best = [b for d in over if (b := d.best(score.kind)) is not None]
        return Aim(score, score.suiting(best, COMPARABLE)) if best else None

    def aimed(self, target: str | float | None) -> "Grid":
        """The same with a target, as `90%` or `0.35`; refuses one that the runs cannot be held to.

        None leaves it as it is.
        """
        if target is None:
            return self
        score = self.score()
        if score is None:
            raise ConfigError(
                "no run here was tested, so there is no time to a target: leave the target out"
            )
        return replace(self, target=score.read(target))


# ---------------------------------------------------------------- figures of one run


def best_accuracy(digest: RunDigest) -> float | None:
    return max((t.accuracy for t in digest.tests if t.accuracy is not None), default=None)


def final(digest: RunDigest, score: Score) -> float | None:
    """The score of the last test."""
    found: float | None = getattr(digest.summary, score.kind)
    return found


def speed(digest: RunDigest) -> float | None:
    return digest.summary.samples_per_second


def efficiency(digest: RunDigest) -> float | None:
    """The share of the speed that there would be if everybody computed all the time."""
    return digest.summary.samples_per_second / digest.ideal if digest.ideal else None


def communication(digest: RunDigest) -> float | None:
    """Seconds that a worker spent on exchange, on average."""
    each = digest.summary.per_worker
    return sum(w.communication for w in each) / len(each) if each else None


def memory(digest: RunDigest) -> float | None:
    """Bytes of the largest worker: its whole process where that is known."""
    held = digest.summary.memory
    return held.get("worker_peak") or held.get("worker") or None


def staleness(digest: RunDigest) -> float | None:
    return digest.summary.staleness_mean


def bytes_sent(digest: RunDigest) -> float | None:
    return digest.summary.bytes_sent


def waiting(digest: RunDigest) -> float | None:
    return digest.summary.wait_share


# ---------------------------------------------------------------- words


def thinned(points: Sequence[T], most: int) -> list[T]:
    """At most so many of the points, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(n * (len(points) - 1) / (most - 1))] for n in range(most)]


def marks(digests: Iterable[RunDigest]) -> list[str]:
    """What is not real about some of these runs, for every figure that shows them."""
    runs = list(digests)
    emulated, virtual = sum(bool(d.summary.emulated) for d in runs), sum(d.virtual for d in runs)
    return [
        words if count == len(runs) else f"some runs: {words}"
        for words, count in (("emulated speeds", emulated), ("simulated, virtual time", virtual))
        if count
    ]


def side_by_side(
    runs: Sequence[RunDigest], target: float | None = None, title: str | None = None
) -> Grid:
    """A grid of runs that nobody planned as one.

    Runs of one discipline on as many devices are repeats if they were made alike; otherwise each
    goes by the name of its folder.
    """
    made: dict[tuple[str, int], set[tuple[object, ...]]] = {}
    for d in runs:
        made.setdefault((d.summary.discipline, d.summary.workers), set()).add(_made(d))
    cells: list[Cell] = []
    seen: Counter[tuple[str, int]] = Counter()
    named: dict[str, tuple[object, ...]] = {}
    for d in runs:
        label = d.summary.discipline
        if len(made[label, d.summary.workers]) > 1:
            label = plain = f"{label} ({d.name})"
            # Folders of one name in different places may hold runs made differently.
            while named.setdefault(label, _made(d)) != _made(d):
                label = f"{plain} #{len(named)}"
        key = (label, d.summary.workers)
        cells.append(Cell(label, d.summary.workers, seen[key], d))
        seen[key] += 1
    if title is None:
        title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs side by side"
    return Grid(title, cells, target, _settings(runs))


def remembered(history: History, summary: Summary, name: str = "in memory") -> RunDigest:
    """The digest of a run that kept no folder, from what it gave back: there is no timeline."""
    # The same in words as a digest of a log: everybody computes all the time at the speed seen.
    paces = [w.samples / w.compute for w in summary.per_worker if w.compute > 0]
    tests, steps = history.tests, history.steps
    assert history.climbs is not None
    higher = history.climbs.metric.higher
    metric = Judged(summary.metric_name, higher) if summary.metric_name else None
    return RunDigest(
        name=name,
        summary=summary,
        finished=True,
        batch_size=0,
        virtual=summary.engine == "sim",
        ideal=sum(paces) if len(paces) == summary.workers else None,
        tests=thinned(tests, CURVE),
        losses=thinned(steps, CURVE),
        metric=metric,
        climbs=history.climbs,
    )


def _made(digest: RunDigest) -> tuple[object, ...]:
    summary = digest.summary
    return digest.batch_size, tuple(summary.emulated), summary.engine, summary.shares


def _settings(runs: Sequence[RunDigest]) -> dict[str, str]:
    """What the runs were made with; several values where they differ."""
    values: dict[str, list[str]] = {
        "engine": [d.summary.engine for d in runs],
        "devices": [str(d.summary.workers) for d in runs],
        "batch size": [f"{d.batch_size:,}" for d in runs if d.batch_size],
        "shares": [d.summary.shares for d in runs if d.summary.shares],
        "epochs": [str(len(d.summary.ledger)) for d in runs if d.summary.ledger],
    }
    return {key: ", ".join(dict.fromkeys(found)) for key, found in values.items() if found}
