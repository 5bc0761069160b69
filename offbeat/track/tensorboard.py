"""Curves for TensorBoard: loss, accuracy, speed, staleness, and each worker's waiting."""

from pathlib import Path

from offbeat.track.callback import Begin, End, Update
from offbeat.track.eventfile import EventFile
from offbeat.track.tracker import Tracker


class TensorBoard(Tracker):
    """Writes event files into `folder`; steps are samples, so that disciplines compare.

    Nothing needs to be installed to write them. `every` updates make one point, or as many as
    come within `interval` seconds.
    """

    def __init__(self, folder: str | Path, every: int | None = None):
        self.folder, self.every = Path(folder), every
        self.file: EventFile | None = None
        self.last = 0

    def open(self, begin: Begin) -> None:
        self.file, self.last = EventFile(self.folder), 0

    def on_update(self, update: Update) -> None:
        first = self.last == 0 and update.version > update.updates
        if (first or update.version <= self.last) and self.file is not None:
            wall = (self.began or 0.0) + update.time
            self.guarded(self.file.restart, wall, update.samples)
        self.last = update.version
        super().on_update(update)

    def put(self, values: dict[str, float], when: float, samples: int) -> None:
        assert self.file is not None
        self.file.add(values, when, samples)

    def close(self, end: End) -> None:
        assert self.file is not None
        self.file.close()
