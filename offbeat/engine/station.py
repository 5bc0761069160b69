"""A worker's process: its link, its reader, and a loop for every time that it joins."""

import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.choices import Elastic
from offbeat.discipline import Discipline
from offbeat.engine.flow import FlowLoop
from offbeat.job import Place
from offbeat.link.base import Over, Refused
from offbeat.link.meeting import MeetingLink
from offbeat.link.memory import Slot
from offbeat.link.shared import SharedLink
from offbeat.loop import Loop
from offbeat.prefetch import Prefetcher
from offbeat.worker import Cycle, StreamWorker, Worker

Make = Callable[..., Worker]  # of a store, a number, an incarnation and a place


@dataclass(frozen=True)
class Habits:
    """How a worker goes about its work; `least` seconds is what a step takes at the least.

    `attention` is for how many seconds it keeps its core awake while it waits for an answer.
    """

    discipline: Discipline
    seed: int
    least: float = 0.0
    overlap: bool = False
    attention: float = 0.0


class Station:
    """Where one worker sits; `make` builds the worker of an incarnation."""

    def __init__(
        self,
        wire: socket.socket,
        slot: Slot,
        habits: Habits,
        make: Callable[[int, Place], Worker],
        reader: Prefetcher | None = None,
        leave: Callable[[], dict[str, float]] = dict,
        meeting: MeetingLink | None = None,
    ):
        """`leave` ends the other processes of the replica, and tells what they came to; `meeting`
        is the link of a worker that meets the others without a store.
        """
        self.habits, self.make, self.reader, self.leave = habits, make, reader, leave
        own = isinstance(habits.discipline.send, Elastic)  # its parameters are not what it pulls
        self.link = meeting or SharedLink(wire, slot, centre=own)
        self.link.attention = habits.attention
        # Where workers meet, others read what lies in the slot: it must be a version.
        mine = None if own or meeting is not None else slot.incoming[0]
        found = slot.statistics.views  # the server leaves the mean there when this worker joins
        self.place = Place(mine, slot.outgoing or None, reader, alone=True, buffers=found)
        if reader is not None:
            self.link.announce = reader.announce
        self.loop: Loop | None = None

    def enter(self) -> Loop:
        """Join, for the first time or again."""
        incarnation = self.link.join()
        if self.reader is not None:
            self.reader.forget()
        if self.loop is not None:
            self.loop.worker.retire()
        worker = self.make(incarnation, self.place)
        worker.ahead = self.habits.overlap
        cycle, seed = Cycle.of(self.habits.discipline), self.habits.seed
        cycle.ahead = self.habits.overlap
        if isinstance(worker, StreamWorker):
            self.loop = FlowLoop(self.link, worker, cycle, seed)
        else:
            self.loop = Loop(self.link, worker, cycle, seed, self.habits.least)
        return self.loop

    def run(self) -> None:
        """Train until the run is over."""
        try:
            while True:
                try:
                    self.enter().run()
                except Refused:
                    continue  # given up while it was silent, it goes on as a new incarnation
        except Over:
            self.bye()

    def bye(self) -> None:
        """Tell what this worker held, and how well its stages overlapped."""
        figures = {"peak": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}
        if self.loop is not None:
            figures["nbytes"] = float(self.loop.worker.nbytes)
            if self.loop.flying:
                figures["exchange_hidden"] = self.loop.hidden / self.loop.flying
        if self.reader is not None:
            figures |= self.reader.figures()
        self.link.bye(figures | self.leave())
