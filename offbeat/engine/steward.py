"""What happens around the server's packets: the log goes out, tests are made, checkpoints saved."""

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

from offbeat.engine import orders
from offbeat.engine.floor import Floor
from offbeat.engine.orders import TESTER, Done, Frozen, Halt, Lines, Mark, Outbox, Saved, Wire
from offbeat.engine.server import Server, Watch
from offbeat.engine.watchdog import LOOKS
from offbeat.link.memory import Counts, Shared
from offbeat.link.signs import FILES, WORKING
from offbeat.log import Ended, Entry, Evaluated
from offbeat.store.checkpoint import Others, nobody
from offbeat.store.core import Store
from offbeat.store.fold import fold
from offbeat.store.table import under

TAIL = 8 << 20  # bytes of log since the last checkpoint, for a run without a folder
RELAY = 0.05  # seconds between two bundles of records for the launcher


class Shelf(Protocol):
    """Where checkpoints go: a run folder, or memory."""

    def save(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        others: Others = nobody,
    ) -> None:
        """Write one beside the others."""


@dataclass(frozen=True)
class Rhythm:
    """How often to test and to save: samples between tests, versions between checkpoints."""

    test: int | None = None  # None never tests
    save: int | None = None  # None saves after each epoch


@dataclass(frozen=True)
class Lived:
    """What a server that was killed had done since its last checkpoint, and all it had learnt."""

    version: int
    records: list[Entry]
    length: int  # of its log
    tensors: dict[str, Tensor]


class Steward:
    """Runs a server until the end, and looks after everything that is not a packet."""

    def __init__(self, server: Server, shelf: Shelf, rhythm: Rhythm, outbox: Outbox):
        self.server, self.shelf, self.rhythm, self.outbox = server, shelf, rhythm, outbox
        self.floor = Floor(server)
        self.floor.heard = self._heard
        self.store: Store = server.store
        self.shared: Shared = server.shared
        self.clock: Watch = server.clock
        self.lines = bytearray()
        self.due = 0.0  # when the lines go out
        self.idle = False  # whether nothing is due at any time
        self.training, self.halted = True, False
        self.new_log: Callable[[], Path] | None = None  # where to log on after a checkpoint
        self.others: Others = nobody  # who writes checkpoints beside this process
        self.tester: socket.socket | None = None
        self.testing: Evaluated | None = None  # under way
        self.tested = 0  # tests done or under way
        self.saved_version, self.saved_epoch = self.store.version, self.store.epoch
        self.store.log.relay, self.store.log.gathers = self._relay, True
        server.silent = lambda number: outbox.put(Frozen(number))

    def obey(self, wire: socket.socket) -> None:
        """Take orders from the launcher."""

        def order() -> None:
            found, handed = orders.receive_order(wire)
            if isinstance(found, Wire):
                assert handed is not None
                self._connect(found.number, handed)
            elif isinstance(found, Halt):
                self.halted = True
            else:  # the launcher is gone, and with it the purpose
                raise SystemExit

        self.floor.selector.register(wire, selectors.EVENT_READ, order)

    def _connect(self, number: int, wire: socket.socket) -> None:
        if number != TESTER:
            self.floor.connect(number, wire)
            return
        if self.tester is not None:
            self.floor.selector.unregister(self.tester)
            self.tester.close()
        self.tester = wire
        self.floor.selector.register(wire, selectors.EVENT_READ, partial(self._test_done, wire))
        if self.testing is not None:  # its predecessor died over it
            self._ask_tester()

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        self.floor.take()
        self.shared.server.about = WORKING
        while not self.store.finished and not (self._stopping and self.server.quiet):
            self._turn()
            self._tend()
        self.training = False
        self.halted |= self.server.ended and not self.store.finished
        if not self.halted:
            self._last_tests()
        if self.halted:
            self.save()
            if self.server.ended_by is not None:  # what goes on from that checkpoint has not ended
                ended = Ended(self.clock(), self.server.ended_by, self.store.version)
                self.store.log.write(ended)
        self._export()
        self._count()
        self.floor.dismiss(time.monotonic() + self.server.patience)
        self._flush()
        parameters = self.store.parameters
        assert parameters is not None
        self.outbox.put(
            Done(
                not self.halted,
                self.store.version,
                self.store.leases.ledger.summary(),
                parameters.nbytes_each(),
                parameters.digest(),
                self.server.words,
            )
        )
        self.outbox.finish()

    @property
    def _stopping(self) -> bool:
        """Whether the launcher, or a script, wants the run to stop before its end."""
        return self.halted or self.server.ended

    def _heard(self) -> bool:
        """After every packet; returns whether the one who waits in `_turn` has to know of it."""
        if self.shared.counts.item(Counts.STOPPING):
            self.halted = True
        if self.training:
            self._tend()
        if self.store.finished or self._stopping or self.server.over is not None:
            return True
        return self.idle and bool(self.lines or self.store.log.waiting)

    def _tend(self) -> None:
        """Test and save what is due."""
        if self.server.quiet:
            if self.rhythm.test is not None:
                self._test_if_due(self.rhythm.test)
            if self._save_due():
                self.floor.answer()
                self.save()

    def _turn(self) -> None:
        """Let the workers be heard until there is something else to do."""
        self.store.log.flush()  # what nobody was answered for waits until here
        now = time.monotonic()
        self.idle = not self.lines and not self.outbox.backlog and now >= self.due
        self.shared.server.turn()
        often = self.server.patience / LOOKS  # the launcher looks for signs of life
        self.floor.wait(often if self.idle else min(often, max(0.0, self.due - now)))
        if (self.lines or self.outbox.backlog) and time.monotonic() >= self.due:
            self._flush()

    # ------------------------------------------------------------ records

    def _relay(self, lines: bytes) -> None:
        if self.idle and not self.lines:
            self.due = time.monotonic() + RELAY
        self.lines += lines

    def _flush(self) -> None:
        self.store.log.flush()
        if self.lines:
            self.outbox.put(Lines(bytes(self.lines)))
            self.lines.clear()
        else:
            self.outbox.flush()
        self.due = time.monotonic() + RELAY

    # ------------------------------------------------------------ tests

    def _test_if_due(self, every: int) -> None:
        if self.testing is not None or self.tester is None:
            return
        if self.store.applied >= (self.tested + 1) * every:
            self.floor.answer()
            self._test(every)

    def _test(self, every: int) -> None:
        """Copy what the store holds and have it tested while training goes on."""
        assert self.tester is not None
        self._export()
        self.tested = self.store.applied // every
        self.testing = Evaluated(self.clock(), self.store.version, self.store.applied, 0.0)
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
            packet = wire.recv(1024)
        except ConnectionError:
            packet = b""
        if not packet:
            self.floor.selector.unregister(wire)
            wire.close()
            self.tester = None  # the launcher sends another
            return
        assert self.testing is not None
        result = orders.tested(packet)
        self.testing.loss, self.testing.accuracy = result.loss, result.accuracy
        self.testing.metric = result.metric
        self.store.log.write(self.testing)
        self.testing = None

    def _last_tests(self) -> None:
        """A run ends with a test, unless the last update has just been tested."""
        every = self.rhythm.test
        if every is None:
            return
        while (self.testing is not None or self.tester is None) and not self.halted:
            self._turn()
        if self.halted:
            return
        if self.store.applied > self.tested * every or self.store.applied % every:
            self._test(every)
        while self.testing is not None and not self.halted:
            self._turn()

    def _export(self) -> None:
        """Put parameters and averaged buffers where tests and the launcher find them."""
        assert self.store.parameters is not None
        places = {n: v for flat in self.shared.tested for n, v in flat.views.items()}
        self.store.parameters.export_to(places | self.shared.averages.views)

    # ------------------------------------------------------------ checkpoints

    def _save_due(self) -> bool:
        if self.new_log is not None:  # all is in memory anyway, and only the log grows
            return self.store.log.size > TAIL
        if self.rhythm.save is None:
            return self.store.epoch > self.saved_epoch
        return self.store.version >= self.saved_version + self.rhythm.save

    def save(self) -> None:
        """Write a checkpoint; parameters that are not finite are never saved over good ones."""
        store = self.store
        self.saved_version, self.saved_epoch = store.version, store.epoch
        assert store.parameters is not None
        if not store.parameters.finite():
            return
        meta = {
            "store": store.state(),
            "parameters": store.parameters.meta(),
            # One that is under way is made again by whoever goes on from here.
            "session": {"tested": self.tested - bool(self.testing), **store.log.mark()},
            "time": self.clock(),
        }
        tensors = {f"store/{k}": t for k, t in store.parameters.state().items()}
        self._flush()
        self.outbox.put(Mark(store.version))
        self.outbox.finish()  # the figures of a run must not be older than its checkpoint
        self.shared.server.about = FILES
        self.shelf.save(store.version, tensors, meta, self.others)
        self.shared.server.about = WORKING
        if self.new_log is not None:
            store.log.switch(self.new_log())
        self.outbox.put(Saved())

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Take the store as it was at a checkpoint."""
        store = self.store
        assert store.parameters is not None
        store.parameters.load(under("store/", tensors), meta["parameters"])
        store.load_alone(meta["store"])
        self.tested = meta["session"]["tested"]
        self.saved_version, self.saved_epoch = store.version, store.epoch
        self.clock.start = meta["time"]

    def go_on(self, lived: Lived | None) -> None:
        """Everybody has to join again; with `lived` nothing since the checkpoint is lost."""
        store, every = self.store, self.rhythm.test
        if lived is None:
            store.vacate(self.clock())
        else:
            assert store.parameters is not None
            store.parameters.load(lived.tensors, store.parameters.meta())
            self.clock.start = max([self.clock.start, *(r.time for r in lived.records)])
            fold(store, lived.records, self.clock())
            tests = [r for r in lived.records if isinstance(r, Evaluated)]
            if tests and every is not None:
                self.tested = tests[-1].samples // every
        self._count()

    def _count(self) -> None:
        """Tell those who watch, and the scripts that go on after the end."""
        self.shared.counts[Counts.APPLIED] = self.store.applied
        self.shared.counts[Counts.GIVEN_UP] = self.store.given_up
        self.shared.counts[Counts.VERSION] = self.store.version
