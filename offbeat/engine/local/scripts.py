"""A script on several processes: it runs once up to its loop, and is forked there."""

import threading
from functools import partial
from typing import NoReturn

import torch

from offbeat.config.job import Job, WorkerMemory
from offbeat.config.run_config import RunConfig
from offbeat.engine.bring_up import bring_up
from offbeat.engine.local.launcher import InWorker, Launcher, run_local
from offbeat.engine.local.process import Inside
from offbeat.engine.local.roles import Roles
from offbeat.engine.local.shared_memory import Counts
from offbeat.engine.local.worker_process import WorkerProcess
from offbeat.engine.result import Run
from offbeat.engine.script import LoopParticipant, script_job, script_worker, show_version
from offbeat.engine.signals import stopped_by
from offbeat.errors import RunError
from offbeat.store.store import Store
from offbeat.transport.link import RunOver, RunStopped, StoreGone
from offbeat.worker.worker import NumberWorker


class ProcessParticipant(LoopParticipant):
    """A worker in a process of its own."""

    def __init__(self, number: int, worker_process: WorkerProcess, roles: Roles):
        self.worker_process, self.roles = worker_process, roles
        self.finished = False  # the loop is over, and the script goes on
        self.away = False  # it was left before the end
        super().__init__(number, worker_process.enter, self._finish)

    def _finish(self, over: RunOver) -> int:
        """The model gets the final parameters, in memory that no other worker sees."""
        if isinstance(over, StoreGone):
            self._abandoned()
        self.worker_process.bye()
        if isinstance(over, RunStopped):
            raise stopped_by(int(self.roles.shared.counts[Counts.STOPPING]))
        replica = self.worker.sender.replica
        replica.move_out()
        self.roles.tested_into(replica.model)
        self.finished = True
        return int(self.roles.shared.counts[Counts.VERSION])

    def stop(self) -> None:
        try:
            self.worker_process.client.end()
        except RunOver as over:
            self.worker.base = self.finish(over)

    def leave(self) -> None:
        split = self.roles.split and self.loop.sequence > 0
        slot = self.roles.shared.slots[self.rank]
        show_version(self.worker, slot.statistics.views if split else None)
        self.worker.sender.replica.move_out()
        self.worker_process.client.leave()
        self.away = True

    def left(self, error: BaseException | None) -> None:
        """Not before: a break may have been an error, after which this worker comes back."""
        if self.away and error is None:
            self.finished = True
            self.worker_process.bye()

    def _abandoned(self) -> NoReturn:
        """The server was killed: the launcher starts everybody anew, this process included."""
        threading.Event().wait()
        raise AssertionError


class ForkedParticipant(ProcessParticipant):
    """One that the launcher forked out of the script."""

    def __init__(self, number: int, worker_process: WorkerProcess, roles: Roles, inside: Inside):
        self.inside = inside
        super().__init__(number, worker_process, roles)

    def ended(self, error: BaseException | None) -> NoReturn:
        """The script has come to its end here, and with it this process."""
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(bool(error.code))
            if status and self.finished:
                what = f"exit status {status}" if status == error.code else str(error.code)
                told = f"the script of worker {self.rank} ended with {what}"
                self.inside.tell(RunError(told), late=True)
            self.inside.leave(status)
        if error is None or isinstance(error, KeyboardInterrupt):
            self.inside.leave(0)
        self.inside.tell(error, late=self.finished)
        self.inside.leave(1)


def make_script_worker(
    config: RunConfig,
    job: Job,
    store: Store,
    number: int,
    incarnation: int,
    place: WorkerMemory,
) -> NumberWorker:
    """A worker over the model that the script holds."""
    own = WorkerMemory(
        place.parameters,
        place.out,
        place.reader,
        config.model,
        buffers=place.buffers,
        device=place.device,
    )
    return script_worker(job, store, number, incarnation, own)


def start(config: RunConfig) -> ForkedParticipant | Run:
    """Become the launcher: a participant in each worker, and the run in the launcher at the end."""
    job = script_job(config)
    try:
        with bring_up(config, job) as run:
            roles = run.roles()
            return run_local(
                roles, run.kept, run.tally, config.listeners, partial(Launcher, branches=True)
            )
    except InWorker as here:
        torch.set_num_threads(roles.threads(here.number))
        make = partial(make_script_worker, config, job)
        worker_process = roles.worker_process(here.number, here.wire, make, config.model)
        try:
            return ForkedParticipant(here.number, worker_process, roles, here.inside)
        except RunOver:  # one that took the place of another when there was nothing left to do
            here.inside.leave(0)
