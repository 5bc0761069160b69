"""What each worker did when, read off the log: it computed, exchanged, or waited for somebody."""

import math
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from offbeat.data.lease import Lease
from offbeat.log.log import Listener
from offbeat.log.records import (
    Admitted,
    Dropped,
    Entry,
    Joined,
    Left,
    Lost,
    Part,
    Pulled,
    Rested,
    Updated,
)

TINY = 1e-12  # seconds, and share of the time: what rounding leaves is no stretch of its own
CLOSE = 1e-9  # seconds within which a release and the beginning of a wait are the same moment


class Segment(msgspec.Struct, frozen=True):
    """What one worker did for a while: "compute", "exchange" or "wait"."""

    worker: int
    kind: str
    start: float
    end: float
    whom: int | None = None  # whose contribution, or loss, ended a wait


class _Pull(NamedTuple):
    time: float
    samples: int  # computed since the last push, or under way when steps overlap
    bytes: int
    whom: int | None  # the last other worker that moved the board
    since: float  # and when


class _Spent(NamedTuple):
    """Where the time of a block went, as its worker told."""

    compute: float = 0.0
    wait: float = 0.0
    communication: float = 0.0
    samples: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, part: Part) -> "_Spent":
        samples = _samples(part.leases)
        return cls(part.compute, part.wait, part.communication, samples, part.bytes)


class _Block:
    """A worker's time from one contribution, or from joining or resting, to the next."""

    __slots__ = ("end", "pulls", "pushed", "start")

    def __init__(self, start: float, pushed: bool):
        self.start, self.pushed = start, pushed
        self.end = start
        self.pulls: list[_Pull] = []


def _samples(leases: list[Lease]) -> int:
    return sum([stop - start for _, start, stop in leases])


class Window:
    """Segments from `start` on; when there are more than `most`, no later ones are taken in."""

    def __init__(self, start: float, most: int):
        self.start, self.most = start, most
        self.end = math.inf
        self.kept: list[Segment] = []

    def add(self, segments: list[Segment], now: float) -> None:
        # Slow workers tell late what they did, so some from before the end come after it.
        self.kept += [s for s in segments if s.end > self.start and s.start < self.end]
        if len(self.kept) > self.most and self.end == math.inf:
            self.end = now

    def cut(self, until: float) -> tuple[list[Segment], tuple[float, float]]:
        """At most `most` segments by worker and time, and the stretch of time that they cover."""
        clipped = [
            Segment(s.worker, s.kind, max(s.start, self.start), min(s.end, self.end, until), s.whom)
            for s in self.kept
        ]
        kept, end = sorted(clipped, key=lambda s: s.start), min(self.end, until)
        if len(kept) > self.most:
            first, end = kept[: self.most], kept[self.most].start
            if end == self.start:  # all begin at once: more workers than segments
                end = max(s.end for s in first)
            kept = [Segment(s.worker, s.kind, s.start, min(s.end, end), s.whom) for s in first]
        kept = [s for s in kept if s.end > s.start]
        return sorted(kept, key=lambda s: (s.worker, s.start)), (self.start, end)


class Timeline(Listener):
    """Follows a log and keeps the segments of the whole run, or of a stretch from its `middle`.

    Under virtual time a worker's figures account for every second that it was not paused. In
    real time the parts of an exchange are told with the next contribution, so that whatever was
    neither computing nor waiting counts as exchange. A log does not tell how an exchange divides
    into what comes before a step and what comes after it: bytes decide.
    """

    def __init__(self, workers: int, virtual: bool, most: int, middle: float = 0.0):
        self.virtual, self.now = virtual, 0.0
        self.blocks: list[_Block | None] = [None] * workers
        self.pending: dict[tuple[int, int, int], _Block] = {}  # arrived, figures not yet known
        self.head, self.middle = Window(0.0, most), Window(middle, most)
        nobody = (-1, -math.inf)
        self.last, self.other = nobody, nobody  # who moved the board, and who else before it
        self.handlers = {
            Joined: self._joined,
            Pulled: self._pulled,
            Admitted: self._admitted,
            Updated: self._updated,
            Dropped: self._dropped,
            Rested: self._rested,
            Lost: self._lost,
            Left: self._lost,
        }

    def see(self, record: Entry) -> None:
        handler = self.handlers.get(type(record))
        if handler is not None:
            self.now = max(self.now, record.time)
            handler(record)  # type: ignore[operator]

    def cut(self, until: float) -> tuple[list[Segment], tuple[float, float]]:
        """The segments and the stretch of time that they cover."""
        for worker, block in enumerate(self.blocks):
            if block is not None:
                self._keep(block.start, self.now, self._unfinished(worker, block))
        self.blocks = [None] * len(self.blocks)
        if self.head.end < math.inf and self.middle.kept:
            return self.middle.cut(until)
        return self.head.cut(until)

    # ------------------------------------------------------------ records

    def _joined(self, record: Joined) -> None:
        self.blocks[record.worker] = _Block(self.now, pushed=False)

    def _pulled(self, record: Pulled) -> None:
        worker = record.worker
        block = self.blocks[worker]
        if block is None:
            block = self.blocks[worker] = _Block(self.now, pushed=False)
        whom, since = self.other if self.last[0] == worker else self.last
        told = _samples(record.leases) if record.leases else 0
        pull = _Pull(self.now, told, record.bytes, None if whom < 0 else whom, since)
        block.pulls.append(pull)

    def _admitted(self, record: Admitted) -> None:
        key = (record.worker, record.incarnation, record.sequence)
        self.pending[key] = self._close(record.worker, pushed=True)
        self._moved(record.worker)

    def _updated(self, record: Updated) -> None:
        for part in record.parts:
            self._arrived(part)

    def _dropped(self, record: Dropped) -> None:
        self._arrived(record.part)

    def _arrived(self, part: Part) -> None:
        block = self.pending.pop((part.worker, part.incarnation, part.sequence), None)
        if block is None:  # nobody had to wait for others: it arrives now
            block = self._close(part.worker, pushed=True)
            self._moved(part.worker)
        if self._wanted(block.start, block.end):
            self._keep(block.start, block.end, self._laid(part.worker, block, _Spent.of(part)))

    def _rested(self, record: Rested) -> None:
        block = self._close(record.worker, pushed=False)
        # One of several that were released at once may find nothing to do: it released nobody.
        if self.now > self.last[1]:
            self._moved(record.worker)
        spent = _Spent(wait=record.wait, communication=record.communication)
        self._keep(block.start, block.end, self._laid(record.worker, block, spent))

    def _lost(self, record: Lost | Left) -> None:
        block = self._close(record.worker, pushed=False)
        self.blocks[record.worker] = None
        self._moved(record.worker)
        self._keep(block.start, block.end, self._unfinished(record.worker, block))

    def _close(self, worker: int, pushed: bool) -> _Block:
        """The worker's block ends here, and another begins."""
        block = self.blocks[worker] or _Block(self.now, pushed=False)
        block.end = self.now
        self.blocks[worker] = _Block(self.now, pushed)
        return block

    def _moved(self, worker: int) -> None:
        """The board moves, so that whoever pulls next may have waited for `worker`."""
        if self.last[0] != worker:
            self.other = self.last
        self.last = (worker, self.now)

    def _wanted(self, start: float, end: float) -> bool:
        return any(start < w.end and end > w.start for w in (self.head, self.middle))

    def _keep(self, start: float, end: float, segments: list[Segment]) -> None:
        for window in (self.head, self.middle):
            if start < window.end and end > window.start:
                window.add(segments, self.now)

    # ------------------------------------------------------------ from figures to segments

    def _laid(self, worker: int, block: _Block, spent: _Spent) -> list[Segment]:
        """A block divided at its pulls; in each stretch exchange, compute, exchange, wait."""
        laid = _Laid(worker, block.start, block.end)
        rows = _computing(block, spent)
        slack = sum(b - a - c for (a, b, c, _), _ in zip(rows, block.pulls, strict=False))
        waited = min(1.0, max(0.0, spent.wait) / slack) if slack > 0 else 0.0
        waits = [(b - a - c) * waited for (a, b, c, _), _ in zip(rows, block.pulls, strict=False)]
        idle = sum(b - a - c for a, b, c, _ in rows) - sum(waits)
        told = 1.0  # the share of the rest that was exchange; a pause was not
        if (self.virtual or not block.pushed) and idle > 0:
            told = min(1.0, max(0.0, spent.communication) / idle)
        pulled: _Pull | None = None
        for (a, b, compute, spilt), pull, wait in zip_longest(rows, block.pulls, waits):
            wait = wait or 0.0
            exchange = (b - a - compute - wait) * told
            before = 0.0  # of the exchange, what comes before the step
            if pulled is not None and not spilt:
                before = exchange if pull else exchange * _share(pulled.bytes, spent.bytes)
            elif pulled is None and block.pushed and compute <= TINY:
                before = exchange
            laid.put("exchange", a, a + before)
            laid.put("compute", a + before, a + before + compute)
            laid.put("exchange", b - wait - (exchange - before), b - wait)
            if pull is not None:
                self._put_wait(laid, pull, b - wait, b)
            pulled = pull
        return laid.segments

    def _put_wait(self, laid: "_Laid", pull: _Pull, start: float, end: float) -> None:
        whom = pull.whom if pull.since >= start - CLOSE else None
        # A real store takes a moment even for those who need not wait for anybody.
        served = whom is None and not self.virtual
        laid.put("exchange" if served else "wait", start, end, whom)

    def _unfinished(self, worker: int, block: _Block) -> list[Segment]:
        """What is known of a block without its figures: who released its first pull."""
        laid = _Laid(worker, block.start, self.now)
        if not block.pushed or not block.pulls or block.pulls[0].samples:
            return []
        pull = block.pulls[0]
        held = pull.whom is not None and pull.since > block.start
        freed = pull.time if self.virtual else min(pull.time, pull.since) if held else block.start
        laid.put("wait", block.start, freed, pull.whom if held else None)
        laid.put("exchange", freed, pull.time)
        return laid.segments


class _Laid:
    """Segments of one worker in order; what is too short to be one is left out."""

    def __init__(self, worker: int, start: float, end: float):
        self.worker, self.start, self.end = worker, start, end
        self.tiny = TINY * max(1.0, end)
        self.segments: list[Segment] = []

    def put(self, kind: str, start: float, end: float, whom: int | None = None) -> None:
        start, end = max(start, self.start), min(end, self.end)  # rounding may step over
        if end - start <= self.tiny:
            return
        if self.segments:
            last = self.segments[-1]
            start = max(start, last.end)
            if last.kind == kind and start - last.end <= self.tiny and last.whom == whom:
                self.segments.pop()
                start = last.start
        if end > start:
            self.segments.append(Segment(self.worker, kind, start, end, whom))


def _computing(block: _Block, spent: _Spent) -> list[tuple[float, float, float, bool]]:
    """The stretches of a block with the seconds of computing in each.

    A pull tells which samples were computed before it; what does not fit there was computed while
    the exchange went on, and spills over.
    """
    rows: list[tuple[float, float, float]] = []
    spilt: list[bool] = []
    compute = left = max(0.0, spent.compute)
    start, carry = block.start, 0.0
    tiny = TINY * max(1.0, block.end)
    for pull in (*block.pulls, None):
        share = left
        end = block.end
        if pull is not None:
            end = pull.time
            share = min(left, compute * pull.samples / spent.samples) if spent.samples else 0.0
            left -= share
        spilt.append(carry > tiny)
        fits = min(carry + share, end - start)
        carry += share - fits
        rows.append((start, end, fits))
        start = end
    for index in range(len(rows) - 1, -1, -1):  # steps differ: an earlier one took longer
        start, end, fits = rows[index]
        more = min(carry, end - start - fits)
        carry -= more
        rows[index] = (start, end, fits + more)
    return [(*row, late) for row, late in zip(rows, spilt, strict=True)]


def _share(received: int, sent: int) -> float:
    return received / (received + sent) if received + sent > 0 else 0.5
