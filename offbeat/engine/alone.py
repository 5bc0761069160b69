"""One worker in the user's own process: what `python train.py` does."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from offbeat.choices import InPlace
from offbeat.job import Place
from offbeat.kept import Kept
from offbeat.lease import Lease
from offbeat.link.base import Over
from offbeat.link.direct import DirectLink
from offbeat.log import Ended
from offbeat.loop import Loop
from offbeat.report.summary import Tally
from offbeat.run import Run
from offbeat.script import LoopSeat, Wanted, script_worker, show_version
from offbeat.session import Session
from offbeat.signals import heard, stopped_by
from offbeat.store.table import under
from offbeat.worker import Cycle


class AloneSeat(LoopSeat):
    """The only worker, with the store beside it."""

    def __init__(self, wanted: Wanted):
        settings = wanted.settings
        self.wanted, self.job = wanted, wanted.job()
        threads = torch.get_num_threads()
        config = wanted.described(self.job) | {
            "engine": "alone",
            "threads": threads,
            "origin": {"loop": Path(sys.argv[0]).name},
        }
        self.kept = Kept.open(settings.out, settings.resume, config, self.job)
        self.store = self.job.make_store(self.kept.log())
        self.tally = Tally(1)
        self.session = Session(
            self.job,
            self.store,
            self.kept.folder,
            None,
            self.job.samples,
            settings.checkpoint_every,
        )
        self.start, self.resting = perf_counter(), True  # whether nothing is half done
        self.stopping: int | None = None  # a signal that came when something was
        self.store.log.listeners += [self.tally, *settings.listeners]
        if self.kept.saved is not None:
            with self.kept.restoring():
                self._go_on(*self.kept.saved)
        for listener in settings.listeners:
            listener.describe(config, self.tally.samples)
        self.result: Run | None = None
        self.away = False  # its loop was left before the end
        self.open = ExitStack()
        self.open.enter_context(
            self.store.log.followed(self.store, self.job.samples * self.job.epochs)
        )
        super().__init__(0, self._enter, self._finish)
        self.open.enter_context(heard(self._ask))

    def _ask(self, number: int) -> None:
        """Ctrl-C or SIGTERM: stop here, or as soon as nothing is half done."""
        if self.resting:
            raise stopped_by(number)
        self.stopping = number

    def _rest(self) -> None:
        self.resting = True
        if self.stopping is not None:
            raise stopped_by(self.stopping)

    def now(self) -> float:
        return perf_counter() - self.start

    def _go_on(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take the store as it was; what the worker was about to send is computed again."""
        self.start -= meta["now"]
        self.store.load_alone(meta["store"])
        assert self.store.parameters is not None
        self.store.parameters.load(under("store/", tensors), meta["parameters"])
        self.session.restore(meta)
        self.kept.recount(self.tally)
        self.store.vacate(self.now())

    def _enter(self) -> Loop:
        parameters = self.store.parameters
        assert parameters is not None
        link = DirectLink(self.store, self.now)
        shared = isinstance(self.store.discipline.send, InPlace)  # the worker itself writes it
        place = Place(parameters.flats if shared else None, model=self.wanted.model)
        worker = script_worker(self.job, self.store, 0, link.join(), place)
        return Loop(link, worker, Cycle.of(self.store.discipline), self.job.seed)

    def next(self) -> Lease | None:
        self.resting = False
        lease = super().next()
        self._rest()
        return lease

    def done(self, lease: Lease, loss: float | None, last: bool) -> Lease | None:
        self.resting = False
        following = super().done(lease, loss, last)
        self.resting = False  # a checkpoint is not written by halves
        if self.result is None:
            self.session.between(self.now(), self._snapshot)
        self._rest()
        return following

    def stop(self) -> None:
        self.resting = False
        if self.kept.folder is not None:
            self.session.save(self._snapshot)
        self.store.log.write(Ended(self.now(), 0, self.store.version))
        self.worker.base = self._finish(Over())
        self._rest()

    def leave(self) -> None:
        show_version(self.worker)
        self.away = True

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        assert self.store.parameters is not None
        tensors = {f"store/{k}": t for k, t in self.store.parameters.state().items()}
        meta = {
            "now": self.now(),
            "store": self.store.state(),
            "parameters": self.store.parameters.meta(),
        }
        return tensors, meta

    def _finish(self, over: Over) -> int:
        assert self.store.parameters is not None
        self.store.parameters.export(self.wanted.model)
        self.result = self.kept.finish(
            self.job, self.store, self.tally, "alone", self.worker.nbytes
        )
        return self.store.version

    def left(self, error: BaseException | None) -> None:
        """Save what a run that was stopped has come to, and close its log."""
        over = self.away and error is None  # the only worker has left of its own accord
        with self.kept, self.open:
            if over:
                self.store.leave(0, self.now())
            if self.kept.folder is not None and self.result is None and self.resting:
                self.session.save(self._snapshot)
            if over:
                self.worker.base = self._finish(Over())
