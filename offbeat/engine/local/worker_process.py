"""A worker's process: its client, its reader, and a loop for every time that it joins."""

import resource
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.config.job import WorkerMemory
from offbeat.config.units import AS_FAST_AS_CAN_BE, LeastTime
from offbeat.data.prefetch import Prefetcher
from offbeat.discipline.discipline import Discipline
from offbeat.engine.local.pipeline_group import PipelineLoop
from offbeat.model.device import CPU, Device
from offbeat.protocol.cycle import Cycle
from offbeat.store.slot import Slot
from offbeat.transport.link import GivenUp, RunOver
from offbeat.worker.client import StoreClient
from offbeat.worker.loop import Loop
from offbeat.worker.worker import StreamWorker, Worker

Make = Callable[..., Worker]  # of a store, a number, an incarnation and a place


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker goes about its work; `least` is what a step takes at the least."""

    discipline: Discipline
    seed: int
    least: LeastTime = AS_FAST_AS_CAN_BE
    overlap: bool = False
    meets: bool = False  # whether workers add up among themselves
    device: Device = CPU  # where it computes

    @property
    def centre(self) -> bool:
        """Whether its parameters are not what it pulls."""
        return self.discipline.send.centre


class WorkerProcess:
    """Where one worker lives; `make` builds the worker of an incarnation."""

    def __init__(
        self,
        client: StoreClient,
        slot: Slot,
        settings: WorkerSettings,
        make: Callable[[int, WorkerMemory], Worker],
        reader: Prefetcher | None = None,
        leave: Callable[[], dict[str, float]] = dict,
    ):
        """`leave` ends the other processes of the replica, and tells what they came to."""
        self.client, self.settings, self.make = client, settings, make
        self.reader, self.leave = reader, leave
        # Where workers meet, others read what lies in the slot: it must be a version.
        mine = None if settings.centre or settings.meets else slot.incoming[0]
        found = slot.statistics.views  # the server leaves the mean there when this worker joins
        self.place = WorkerMemory(
            mine, slot.outgoing or None, reader, alone=True, buffers=found, device=settings.device
        )
        settings.device.enter()
        self.depth = len(slot.outgoing)
        self.loop: Loop | None = None

    def enter(self) -> Loop:
        """Join, for the first time or again."""
        incarnation = self.client.join()
        if self.reader is not None:
            self.reader.forget()
        if self.loop is not None:
            self.loop.worker.retire()
        settings = self.settings
        worker = self.make(incarnation, self.place)
        worker.ahead = settings.overlap
        cycle = Cycle.of(settings.discipline, ahead=settings.overlap)
        if isinstance(worker, StreamWorker):
            self.loop = PipelineLoop(self.client, worker, cycle, settings.seed, self.depth)
        else:
            self.loop = Loop(self.client, worker, cycle, settings.seed, settings.least)
        return self.loop

    def run(self) -> None:
        """Train until the run is over."""
        try:
            while True:
                try:
                    self.enter().run()
                except GivenUp:
                    continue  # given up while it was silent, it goes on as a new incarnation
        except RunOver:
            self.bye()

    def bye(self) -> None:
        """Tell what this worker held, and how well its stages overlapped."""
        figures = {"peak": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)}
        if self.loop is not None:
            figures["nbytes"] = float(self.loop.worker.nbytes)
            if self.loop.flying:
                figures["exchange_hidden"] = self.loop.hidden / self.loop.flying
            if self.loop.steps:
                figures["output_queue"] = self.loop.unsent / self.loop.steps
        if self.reader is not None:
            figures |= self.reader.figures()
            self.reader.close()
        self.client.bye(figures | self.leave())
