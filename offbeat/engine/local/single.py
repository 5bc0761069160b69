"""One worker in the user's own process: what `python train.py` does."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import perf_counter
from typing import Any

from torch import Tensor

from offbeat.config.job import WorkerMemory
from offbeat.config.run_config import RunConfig
from offbeat.data.lease import Lease
from offbeat.engine.bring_up import bring_up
from offbeat.engine.local.reader_process import leases_ahead, prefetcher
from offbeat.engine.result import Run
from offbeat.engine.script import LoopParticipant, script_job, script_worker, show_version
from offbeat.engine.server import Server
from offbeat.engine.signals import heard, stopped_by
from offbeat.errors import RunError
from offbeat.log.records import Ended
from offbeat.model.table import under
from offbeat.protocol.cycle import Cycle
from offbeat.protocol.messages import Rest
from offbeat.protocol.server import ServerProtocol, ServerSettings
from offbeat.store.store import Store
from offbeat.transport.direct import DirectLink, DirectPort
from offbeat.transport.link import RunOver
from offbeat.worker.client import StoreClient, ignore
from offbeat.worker.loop import Loop
from offbeat.worker.worker import ScriptStep


class SingleServer(Server):
    """The server of one worker, which is over when that has nothing more to do."""

    def __init__(
        self, store: Store, port: DirectPort, clock: Callable[[], float], ahead: int | None
    ):
        settings = ServerSettings(math.inf, ahead, together=False, forgives=True, digits=None)
        super().__init__(ServerProtocol(store, 1, settings), port, clock)
        self.store, self.said = store, port.said[0]

    def hear(self, worker: int) -> None:
        rests = isinstance(self.said[0].message, Rest)
        if not (rests and self.store.finished):
            # Contributions that waited for others go in when nobody is left to add to them.
            super().hear(worker)
        if not rests:
            return
        if not self.store.finished:
            raise RunError(f"samples are missing at version {self.store.version}, and none is left")
        self.dismiss()


class SingleParticipant(LoopParticipant):
    """The only worker, with the store beside it."""

    def __init__(self, config: RunConfig):
        self.config, self.job = config, script_job(config)
        self.start, self.resting = perf_counter(), True  # whether nothing is half done
        self.stopping: int | None = None  # a signal that came when something was
        self.result: Run | None = None
        self.away = False  # its loop was left before the end
        with ExitStack() as stack:
            self.run = stack.enter_context(bring_up(config, self.job))
            self.session = stack.enter_context(self.run.session())
            self.store, self.folder = self.session.store, self.run.kept.folder
            if self.run.kept.saved is not None:
                with self.run.kept.restoring():
                    self._go_on(*self.run.kept.saved)
            self.reader = prefetcher(self.job, None)
            if self.reader is not None:
                stack.callback(self.reader.close)
            super().__init__(0, self._enter, self._finish)
            stack.enter_context(heard(self._ask))
            stack.enter_context(self.job.content.devices.of(0).entered())
            self.open = stack.pop_all()

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
        self.store.parameters.load(under("store/", tensors), meta["parameters"])
        self.session.restore(meta)
        self.store.vacate(self.now())

    def _enter(self) -> Loop:
        port = DirectPort(1)
        ahead = leases_ahead(self.job, None) or None
        server = SingleServer(self.store, port, self.now, ahead)
        server.connect(0)
        send = self.store.discipline.send
        announce = ignore
        if self.reader is not None:
            self.reader.forget()
            announce = self.reader.announce
        link = DirectLink(port, 0, server.hear)
        client = StoreClient(link, send.centre, announce=announce)
        shared = self.store.parameters.flats if send.in_place else None  # the worker writes it
        device = self.job.content.devices.of(0)
        place = WorkerMemory(shared, None, self.reader, self.config.model, device=device)
        worker = script_worker(self.job, self.store, 0, client.join(), place)
        return Loop(client, worker, Cycle.of(self.store.discipline), self.job.seed)

    def next(self) -> Lease | None:
        self.resting = False
        lease = super().next()
        self._rest()
        return lease

    def done(self, lease: Lease, step: ScriptStep, last: bool) -> Lease | None:
        self.resting = False
        following = super().done(lease, step, last)
        self.resting = False  # a checkpoint is not written by halves
        if self.result is None:
            self.session.between(self.now(), self._snapshot)
        self._rest()
        return following

    def stop(self) -> None:
        self.resting = False
        if self.folder is not None:
            self.session.save(self._snapshot)
        self.store.log.write(Ended(self.now(), 0, self.store.version))
        self.worker.base = self._finish(RunOver())
        self._rest()

    def leave(self) -> None:
        show_version(self.worker)
        self.away = True

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"store/{k}": t for k, t in self.store.parameters.state().items()}
        meta = {
            "now": self.now(),
            "store": self.store.state(),
            "parameters": self.store.parameters.meta(),
        }
        return tensors, meta

    def _finish(self, over: RunOver) -> int:
        self.store.parameters.export(self.config.model)
        self.result = self.run.finish(self.store, "alone", self.worker.nbytes)
        return self.store.version

    def left(self, error: BaseException | None) -> None:
        """Save what a run that was stopped has come to, and close its log."""
        over = self.away and error is None  # the only worker has left of its own accord
        with self.open:
            if over:
                self.store.leave(0, self.now())
            if self.folder is not None and self.result is None and self.resting:
                self.session.save(self._snapshot)
            if over:
                self.worker.base = self._finish(RunOver())
