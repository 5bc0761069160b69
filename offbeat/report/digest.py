"""A run in the few numbers that its page shows, read from its folder alone, however long its log."""

from pathlib import Path

import msgspec

from offbeat.report.summary import Step, Summary, Test

CURVE = 400  # points at most of a curve; more cannot be told apart on a page
SEGMENTS = 2000  # stretches at most of a timeline, of all workers together


class Segment(msgspec.Struct, frozen=True):
    """What one worker did for a while: "compute", "exchange" or "wait"."""

    worker: int
    kind: str
    start: float
    end: float
    whom: int | None = None  # whose contribution, or loss, ended a wait


class Event(msgspec.Struct, frozen=True):
    """Something rare: a worker "joined", was "lost", or had a contribution "refused"."""

    time: float
    kind: str
    worker: int


class Speed(msgspec.Struct, frozen=True):
    """Samples per second in the stretch of time that ends at `time`."""

    time: float
    samples_per_second: float


class Digest(msgspec.Struct):
    """A run, finished or not."""

    name: str  # of its folder
    summary: Summary  # counted again from the log; memory and hash as the run told them
    finished: bool
    batch_size: int
    virtual: bool  # its seconds are simulated
    ideal: float | None  # samples/s if everybody computed all the time, at the speeds seen
    tests: list[Test] = []
    losses: list[Step] = []
    speeds: list[Speed] = []
    segments: list[Segment] = []
    window: tuple[float, float] = (0.0, 0.0)  # the stretch of time that `segments` covers
    events: list[Event] = []

    def time_to(self, accuracy: float) -> float | None:
        """Seconds until a test first reached `accuracy`, or None."""
        return next(
            (t.time for t in self.tests if t.accuracy is not None and t.accuracy >= accuracy), None
        )


def digest(folder: str | Path) -> Digest:
    """The digest of the run in `folder`, also while it goes on."""
    raise NotImplementedError
