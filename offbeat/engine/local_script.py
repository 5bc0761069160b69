"""A script on several processes: it runs once up to its loop, and is forked there."""

import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from offbeat.engine.crew import Crew
from offbeat.engine.local import InWorker, run_local
from offbeat.engine.local_plan import Local, check
from offbeat.engine.process import Inside
from offbeat.engine.station import Station
from offbeat.engine.steward import Rhythm
from offbeat.errors import ConfigError
from offbeat.job import Job, Place
from offbeat.kept import Kept
from offbeat.link.base import Gone, Over, Stopped
from offbeat.link.memory import Counts
from offbeat.log import Listener
from offbeat.report.summary import Tally
from offbeat.run import Run
from offbeat.script import LoopSeat, Wanted, script_worker, show_version
from offbeat.signals import stopped_by
from offbeat.store.core import Store
from offbeat.worker import NumberWorker


class ProcessSeat(LoopSeat):
    """A worker in a process of its own."""

    def __init__(self, number: int, station: Station, crew: Crew):
        self.station, self.crew = station, crew
        self.finished = False  # the loop is over, and the script goes on
        self.away = False  # it was left before the end
        super().__init__(number, station.enter, self._finish)

    def _finish(self, over: Over) -> int:
        """The model gets the final parameters, in memory that no other worker sees."""
        if isinstance(over, Gone):
            self._abandoned()
        self.station.bye()
        if isinstance(over, Stopped):
            raise stopped_by(int(self.crew.shared.counts[Counts.STOPPING]))
        replica = self.worker.sender.replica
        replica.move_out()
        self.crew.tested_into(replica.model)
        self.finished = True
        return int(self.crew.shared.counts[Counts.VERSION])

    def stop(self) -> None:
        try:
            self.station.link.end()
        except Over as over:
            self.worker.base = self.finish(over)

    def leave(self) -> None:
        split = self.crew.split and self.loop.sequence > 0
        slot = self.crew.shared.slots[self.rank]
        show_version(self.worker, slot.statistics.views if split else None)
        self.worker.sender.replica.move_out()
        self.station.link.leave()
        self.away = True

    def left(self, error: BaseException | None) -> None:
        """Not before: a break may have been an error, after which this worker comes back."""
        if self.away and error is None:
            self.finished = True
            self.station.bye()

    def _abandoned(self) -> NoReturn:
        """The server was killed: the launcher starts everybody anew, this process included."""
        threading.Event().wait()
        raise AssertionError


class ForkedSeat(ProcessSeat):
    """One that the launcher forked out of the script."""

    def __init__(self, number: int, station: Station, crew: Crew, inside: Inside):
        self.inside = inside
        super().__init__(number, station, crew)

    def ended(self, error: BaseException | None) -> NoReturn:
        """The script has come to its end here, and with it this process."""
        if isinstance(error, SystemExit):
            self.inside.leave(error.code if isinstance(error.code, int) else int(bool(error.code)))
        if error is None or isinstance(error, KeyboardInterrupt):
            self.inside.leave(0)
        self.inside.tell(error, late=self.finished)
        self.inside.leave(1)


def prepared(wanted: Wanted, local: Local) -> tuple[Job, Kept]:
    """The checked job of a script, and its folder."""
    job, settings = wanted.job(), wanted.settings
    check(job, local)
    config = wanted.described(job) | local.described(job)
    config["origin"] = {"loop": Path(sys.argv[0]).name}
    return job, Kept.open(settings.out, settings.resume, config, job)


def make_script_worker(
    wanted: Wanted, job: Job, store: Store, number: int, incarnation: int, place: Place
) -> NumberWorker:
    """A worker over the model that the script holds."""
    own = Place(place.parameters, place.out, place.reader, wanted.model, buffers=place.buffers)
    return script_worker(job, store, number, incarnation, own)


def options(wanted: Wanted) -> dict[str, Any]:
    """What the script's settings say of the local engine."""
    patience, via = wanted.settings.patience, {"via": wanted.settings.via}
    return via if patience is None else via | {"patience": patience}


def start(
    wanted: Wanted, emulate: tuple[float, ...] | None, listeners: Sequence[Listener]
) -> ForkedSeat | Run:
    """Become the launcher: a seat in each worker, and the run in the launcher at the end."""
    # OpenMP's helpers are not forked: a main thread that has used them must not use them again.
    threads = None if torch.get_num_threads() == 1 else 1
    local = Local(emulate=emulate, threads=threads, **options(wanted))
    job, kept = prepared(wanted, local)
    tally = Tally(job.workers)
    listeners = (*listeners, *wanted.settings.listeners)
    try:
        with kept:
            kept.recount(tally)
            for listener in listeners:
                listener.describe(wanted.described(job) | local.described(job), tally.samples)
            every = wanted.settings.checkpoint_every
            crew = Crew(job, local, kept.folder, None, Rhythm(None, every))
            crew.patience = None  # what comes after the loop takes as long as it takes
            return run_local(crew, kept, tally, listeners, branches=True)
    except InWorker as here:
        torch.set_num_threads(crew.threads(here.number))
        make = partial(make_script_worker, wanted, job)
        station = crew.station(here.number, here.wire, make, wanted.model)
        try:
            return ForkedSeat(here.number, station, crew, here.inside)
        except Over:  # one that took the place of another when there was nothing left to do
            here.inside.leave(0)


def refuse_several_machines(workers: int, here: int) -> None:
    if workers != here:
        raise ConfigError(
            f"{workers} processes on several machines, {here} of them here: this engine works on "
            "one machine; start all of them here with --nproc-per-node"
        )
