"""A table of a run in a file that anything can read: one row for each test and some updates."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from offbeat.report.summary import Test
from offbeat.track.callback import Begin, End, Epoch, Event, Update
from offbeat.track.tracker import Tracker

COLUMNS = (
    *("kind", "time", "version", "samples", "loss", "accuracy"),
    *("staleness", "samples_per_second", "waiting", "text"),
)


class CSV(Tracker):
    """Writes rows of `kind` update, test, epoch and event to `path`.

    A new run begins the file anew; one that is gone on with adds to it. `every` updates make one
    row, or as many as come within `interval` seconds.
    """

    def __init__(self, path: str | Path, every: int | None = None):
        self.path, self.every = Path(path), every
        self.file: IO[str] | None = None
        self.held: list[Mapping[str, Any]] = []  # until an update says whether the run is new
        self.settled = False

    def open(self, begin: Begin) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Lines are flushed one by one: a fork finds no half row in the buffer, nor does a kill.
        self.file = open(self.path, "a", newline="", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.held, self.settled = [], False

    def on_update(self, update: Update) -> None:
        self._samples = update.samples
        if not self.settled:
            self.guarded(self._settle, update.version > update.updates)
        names = ("time", "version", "samples", "loss", "staleness", "samples_per_second", "waiting")
        self._row("update", **{name: getattr(update, name) for name in names})

    def on_test(self, test: Test) -> None:
        names = ("time", "version", "samples", "loss", "accuracy")
        self._row("test", **{name: getattr(test, name) for name in names})

    def on_epoch(self, epoch: Epoch) -> None:
        names = ("time", "version", "samples", "loss", "staleness", "samples_per_second", "waiting")
        self._row("epoch", **{name: getattr(epoch, name) for name in names})

    def on_event(self, event: Event) -> None:
        self._row("event", time=event.time, samples=self._samples, text=event.text)

    def close(self, end: End) -> None:
        assert self.file is not None
        if not self.settled:
            self._settle(goes_on=True)  # nothing was trained: what is there stays
        self.file.close()

    def _settle(self, goes_on: bool) -> None:
        assert self.file is not None
        self.settled = True
        if not goes_on:
            self.file.truncate(0)
        if not goes_on or self.file.tell() == 0:
            csv.writer(self.file).writerow(COLUMNS)
        for row in self.held:
            self._write(row)
        self.held = []

    def _row(self, kind: str, **values: Any) -> None:
        row = {"kind": kind, **values}
        if self.settled:
            self.guarded(self._write, row)
        else:
            self.held.append(row)

    def _write(self, row: Mapping[str, Any]) -> None:
        assert self.file is not None
        # Full precision: a reader of a table wants the log's own numbers.
        csv.DictWriter(self.file, COLUMNS).writerow(row)
