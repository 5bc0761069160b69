"""The server process: beside the messages of workers, its log, tests and checkpoints."""

import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from offbeat.engine.intervals import Due, Intervals
from offbeat.engine.local import launcher_messages as orders
from offbeat.engine.local.backup_process import BackupWire
from offbeat.engine.local.cpu import CpuPolicy
from offbeat.engine.local.dispatch import Around, Dispatcher, Listen, local_receivers, nothing
from offbeat.engine.local.launcher_messages import (
    BackupFollows,
    CheckpointBegun,
    CheckpointSaved,
    Halt,
    LogLines,
    ReportOutbox,
    RunDone,
    WorkerConnected,
    WorkerFrozen,
    WorkerGone,
)
from offbeat.engine.local.shared_memory import Counts, SharedMemory
from offbeat.engine.local.watchdog import FILES, LOOKS, WORKING
from offbeat.engine.server import Server
from offbeat.engine.spawn import BACKUP, TESTER
from offbeat.folder.checkpoint import Others, nobody
from offbeat.log.records import Ended, Evaluated
from offbeat.model.table import under
from offbeat.protocol.server import ServerProtocol
from offbeat.store.recovery import CrashState, revive
from offbeat.store.store import Store
from offbeat.transport.link import ConnectedPort

TAIL = 8 << 20  # bytes of log since the last checkpoint, for a run without a folder
RELAY = 0.05  # seconds between two bundles of records for the launcher


class CheckpointTarget(Protocol):
    """Where checkpoints go: a run folder, or memory."""

    def save(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        others: Others = nobody,
    ) -> None:
        """Write one beside the others."""


class LogRelay:
    """Lines of the log on their way to the launcher, some at a time."""

    def __init__(self, outbox: ReportOutbox):
        self.outbox = outbox
        self.lines = bytearray()
        self.due = 0.0  # when the lines go out
        self.idle = False  # whether nothing was due when the server began to wait

    def add(self, lines: bytes) -> None:
        if self.idle and not self.lines:
            self.due = time.monotonic() + RELAY
        self.lines += lines

    @property
    def waiting(self) -> bool:
        return bool(self.lines or self.outbox.backlog)

    def send(self) -> None:
        if self.lines:
            self.outbox.put(LogLines(bytes(self.lines)))
            self.lines.clear()
        else:
            self.outbox.flush()
        self.due = time.monotonic() + RELAY


class Acceptor:
    """Who lets workers in: the launcher alone, which starts them."""

    refused = 0  # who came and was not let in

    def open(self, dispatcher: Dispatcher) -> None:
        """From now on whoever comes goes to this dispatcher."""

    def look(self) -> None:
        """Now and then, with the store locked."""

    def close(self) -> None:
        """Nobody else comes in."""


@dataclass(frozen=True)
class ServerParts:
    """What a server process is made of."""

    store: Store
    shared: SharedMemory
    protocol: ServerProtocol
    port: ConnectedPort
    target: CheckpointTarget
    intervals: Intervals
    relay: LogRelay
    others: Others = nobody  # who writes checkpoints beside this process
    new_log: Callable[[], Path] | None = None  # where to log on after a checkpoint
    spare: Callable[[], None] = nothing  # what can be done once all are answered
    cpu: CpuPolicy = CpuPolicy()  # noqa: RUF009
    listen: Listen = local_receivers
    acceptor: Acceptor = Acceptor()  # noqa: RUF009
    backup: BackupWire | None = None


class ServerProcess:
    """Runs a server until the end, and looks after everything that is not a worker's message."""

    def __init__(self, parts: ServerParts):
        self.store, self.shared, self.protocol = parts.store, parts.shared, parts.protocol
        self.target, self.intervals, self.relay = parts.target, parts.intervals, parts.relay
        self.others, self.new_log, self.backup = parts.others, parts.new_log, parts.backup
        self.newcomer: socket.socket | None = None  # the way to a backup that has just come
        self.outbox = parts.relay.outbox
        around = Around(self.store.log.flush, self._dealt_with, parts.spare)
        server = Server(parts.protocol, parts.port, time.monotonic)
        self.dispatcher = Dispatcher(server, parts.port, parts.cpu, around, parts.listen)
        self.acceptor = parts.acceptor
        self.training, self.halted = True, False
        self.tester: socket.socket | None = None
        self.testing: Evaluated | None = None  # under way
        self.due = Due(parts.store, parts.intervals)

    def time(self) -> float:
        """Since the run began."""
        return self.protocol.run_time.at(time.monotonic())

    def obey(self, wire: socket.socket) -> None:
        """Take orders from the launcher."""

        def order() -> None:
            found, handed = orders.receive_order(wire)
            if isinstance(found, WorkerConnected):
                assert handed is not None
                self._connect(found.number, handed)
            elif isinstance(found, WorkerGone):
                self.dispatcher.gone(found.number)
            elif isinstance(found, Halt):
                self.halted = True
            else:  # the launcher is gone, and with it the purpose
                raise SystemExit

        self.dispatcher.selector.register(wire, selectors.EVENT_READ, order)

    def _connect(self, number: int, wire: socket.socket) -> None:
        if number == BACKUP:
            self.newcomer = wire
            return
        if number != TESTER:
            self.dispatcher.connect(number, wire)
            return
        if self.tester is not None:
            self.dispatcher.selector.unregister(self.tester)
            self.tester.close()
        self.tester = wire
        self.dispatcher.selector.register(
            wire, selectors.EVENT_READ, partial(self._test_done, wire)
        )
        if self.testing is not None:  # its predecessor died over it
            self._ask_tester()

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        self.dispatcher.lock.acquire()  # held from now on, except while waiting
        self.acceptor.open(self.dispatcher)
        self.shared.server.about = WORKING
        while not self._trained():
            self._turn()
            self._tend()
        self.training = False
        self.halted |= self.protocol.ended and not self.store.finished
        if not self.halted:
            self._last_tests()
        if self.halted:
            self.save()
            if self.protocol.ended_by is not None:  # what goes on from the checkpoint has not ended
                ended = Ended(self.time(), self.protocol.ended_by, self.store.version)
                self.store.log.write(ended)
        self._export()
        self._count()
        self.dispatcher.dismiss(self.protocol.patience)
        self.acceptor.close()
        self._flush()
        parameters = self.store.parameters
        memory = parameters.nbytes_each()
        follows = self.backup is not None and self.backup.follows
        self.outbox.put(
            RunDone(
                not self.halted,
                self.store.version,
                self.store.leases.ledger.summary(),
                memory,
                parameters.digest(),
                self.protocol.goodbyes,
                self.acceptor.refused,
                sum(memory) if follows else 0,
            )
        )
        self.outbox.finish()

    def _trained(self) -> bool:
        over = self.store.finished or self._stopping
        return over and self.dispatcher.server.settle()

    @property
    def _stopping(self) -> bool:
        """Whether the launcher, or a script, wants the run to stop before its end."""
        return self.halted or self.protocol.ended

    def _dealt_with(self) -> bool:
        """After every message; returns whether the one who waits in `_turn` has to know of it."""
        counts = self.shared.counts
        counts[Counts.APPLIED] = self.store.applied
        if self.store.gives_up:
            counts[Counts.GIVEN_UP] = self.store.given_up
        if counts.item(Counts.STOPPING):
            self.halted = True
        if self.training:
            self._tend()
        if self.store.finished or self._stopping or self.protocol.over is not None:
            return True
        return self.relay.idle and bool(self.relay.lines or self.store.log.waiting)

    def _tend(self) -> None:
        """Test and save what is due, and show a new backup what there is."""
        if self.newcomer is not None and not self.store.keeps_waiting:
            self._show(self.newcomer)
            self.newcomer = None
        if (self._test_due() or self._save_due()) and self.dispatcher.server.settle():
            self._test_if_due()
            if self._save_due():
                self.dispatcher.answer()
                self.save()

    def _turn(self) -> None:
        """Let the workers be heard until there is something else to do."""
        relay = self.relay
        self.store.log.flush()  # what nobody was answered for waits until here
        now = time.monotonic()
        relay.idle = not relay.waiting and now >= relay.due
        self.shared.server.turn()
        often = self.protocol.patience / LOOKS  # the launcher looks for signs of life
        self.dispatcher.wait(often if relay.idle else min(often, max(0.0, relay.due - now)))
        for worker in self.protocol.take_silent():
            self.outbox.put(WorkerFrozen(worker))
        self.acceptor.look()
        if relay.waiting and time.monotonic() >= relay.due:
            self._flush()

    def _flush(self) -> None:
        self.store.log.flush()
        self.relay.send()

    # ------------------------------------------------------------ tests

    def _test_due(self) -> bool:
        return self.testing is None and self.tester is not None and self.due.test()

    def _test_if_due(self) -> None:
        if self._test_due():
            self.dispatcher.answer()
            self._test()

    def _test(self) -> None:
        """Copy what the store holds and have it tested while training goes on."""
        self._export()
        self.due.tested()
        self.testing = Evaluated(self.time(), self.store.version, self.store.applied, 0.0)
        self._ask_tester()

    def _ask_tester(self) -> None:
        assert self.tester is not None
        self.shared.tester.about = WORKING
        with suppress(OSError):  # its death shows when its wire is read, and another is asked
            self.tester.send(b"!")

    def _test_done(self, wire: socket.socket) -> None:
        if wire is not self.tester:
            return  # its successor was connected a moment ago
        try:
            packet = wire.recv(1 << 16)
        except ConnectionError:
            packet = b""
        if not packet:
            self.dispatcher.selector.unregister(wire)
            wire.close()
            self.tester = None  # the launcher sends another
            return
        assert self.testing is not None
        result = orders.tested(packet)
        self.testing.loss, self.testing.accuracy = result.loss, result.accuracy
        self.testing.metric, self.testing.metrics = result.metric, result.metrics
        self.store.log.write(self.testing)
        self.testing = None

    def _last_tests(self) -> None:
        """A run ends with a test, unless the last update has just been tested."""
        if self.intervals.test is None:
            return
        while (self.testing is not None or self.tester is None) and not self.halted:
            self._turn()
        if not self.halted and self.due.last_test():
            self._test()
        while self.testing is not None and not self.halted:
            self._turn()

    def _export(self) -> None:
        """Put parameters and averaged buffers where tests and the launcher find them."""
        places = {n: v for flat in self.shared.tested for n, v in flat.views.items()}
        self.store.parameters.export_to(places | self.shared.averages.views)

    # ------------------------------------------------------------ checkpoints

    def _save_due(self) -> bool:
        grown = self.new_log is not None and self.store.log.size > TAIL
        return grown or self.due.save()

    def save(self) -> None:
        """Write a checkpoint; parameters that are not finite are never saved over good ones."""
        store = self.store
        self.due.saved()
        if not store.parameters.finite():
            return
        meta = {
            "store": store.state(),
            "parameters": store.parameters.meta(),
            # One that is under way is made again by whoever goes on from here.
            "session": {"tested": self.due.tests - bool(self.testing), **store.log.mark()},
            "time": self.time(),
        }
        tensors = {f"store/{k}": t for k, t in store.parameters.state().items()}
        self.shared.server.about = FILES  # and waits for the launcher, which may be busy
        self._flush()
        self.outbox.put(CheckpointBegun(store.version))
        self.outbox.finish()  # the figures of a run must not be older than its checkpoint
        self.target.save(store.version, tensors, meta, self.others)
        self.shared.server.about = WORKING
        if self.new_log is not None:
            store.log.switch(self.new_log())
        self.outbox.put(CheckpointSaved())

    def _show(self, newcomer: socket.socket) -> None:
        """From here on nobody is answered before this backup has what the answer is about."""
        assert self.backup is not None
        self.store.log.flush()  # what the log says of its last version a new backup does not know
        parameters = self.store.parameters
        tensors = {f"store/{name}": t for name, t in parameters.state().items()}
        with self.shared.server.at(FILES):
            self.backup.begin(newcomer, self.store.version, tensors, parameters.meta(), self.others)
        self.outbox.put(BackupFollows())

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Take the store as it was at a checkpoint."""
        store = self.store
        store.parameters.load(under("store/", tensors), meta["parameters"])
        store.load_alone(meta["store"])
        self.due.restore(meta["session"]["tested"])
        self.protocol.run_time.start = meta["time"]

    def go_on(self, crash: CrashState | None) -> None:
        """Everybody has to join again; with `crash` nothing since the checkpoint is lost."""
        store = self.store
        if crash is None:
            store.vacate(self.time())
        else:
            run_time = self.protocol.run_time
            run_time.start = max([run_time.start, *(r.time for r in crash.records)])
            revive(store, crash, self.time())
            tests = [r for r in crash.records if isinstance(r, Evaluated)]
            if tests and self.intervals.test is not None:
                self.due.tested(tests[-1].samples)
        self._count()

    def _count(self) -> None:
        """Tell those who watch, and the scripts that go on after the end."""
        self.shared.counts[Counts.APPLIED] = self.store.applied
        self.shared.counts[Counts.GIVEN_UP] = self.store.given_up
        self.shared.counts[Counts.VERSION] = self.store.version
