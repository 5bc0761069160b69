"""Means over several updates: loss, staleness, speed, and each worker's share of waiting."""

from collections.abc import Sequence

import msgspec

from offbeat.log.records import Updated
from offbeat.report.summary import WorkerFigures


class Means(msgspec.Struct, frozen=True):
    """What a meter read over a stretch of a run."""

    updates: int
    loss: float | None  # None where nobody told one
    staleness: float
    samples_per_second: float
    waiting: float
    waiting_by_worker: tuple[float | None, ...]


class UpdateMeter:
    """Adds updates up until it is read; nothing in between is left out."""

    def __init__(self, figures: Sequence[WorkerFigures]):
        """`figures` are the workers' own, which somebody else keeps adding to."""
        self.figures = figures
        self.since = 0.0  # run time of the last reading
        self.clear()

    def clear(self) -> None:
        self.updates = self.parts = self.stale = self.samples = 0
        self.told = self.loss = 0.0
        self.before = [(w.wait, w.compute + w.communication) for w in self.figures]

    def add(self, record: Updated) -> int:
        """Count an update in; returns the samples that it applied."""
        applied = 0
        for part in record.parts:
            self.parts += 1
            self.stale += part.staleness
            if part.skipped:
                continue
            applied += part.samples
            if part.loss is not None:
                self.told += part.samples
                self.loss += part.loss * part.samples
        self.updates += 1
        self.samples += applied
        return applied

    def read(self, now: float) -> Means:
        """The means since the last reading, which end here."""
        waits = busy = 0.0
        shares: list[float | None] = []
        for mine, (wait, rest) in zip(self.figures, self.before, strict=True):
            waited = mine.wait - wait
            spent = waited + mine.compute + mine.communication - rest
            shares.append(waited / spent if spent > 0 else None)
            waits += waited
            busy += spent
        took = now - self.since
        means = Means(
            updates=self.updates,
            loss=self.loss / self.told if self.told else None,
            staleness=self.stale / self.parts if self.parts else 0.0,
            samples_per_second=self.samples / took if took > 0 else 0.0,
            waiting=waits / busy if busy > 0 else 0.0,
            waiting_by_worker=tuple(shares),
        )
        self.since = now
        self.clear()
        return means
