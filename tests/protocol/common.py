"""A server's protocol over a real store: messages and the time go in, answers come out."""

from collections import deque
from collections.abc import Sequence

from offbeat.config.setup import make_job
from offbeat.data.lease import Lease
from offbeat.log.log import Log
from offbeat.log.records import Part
from offbeat.model.table import Flat
from offbeat.protocol.messages import Go, Join, Message, Pull, Push, Welcome
from offbeat.protocol.server import ServerProtocol, ServerSettings
from offbeat.store.board import Row
from offbeat.worker.contribution import Contribution
from tests.contract.common import Records, asked, optimizer_for, problem

PATIENCE = 10.0


class ProtocolDriver:
    """Delivers what workers say, and keeps what each is told; time passes when the test says so."""

    def __init__(
        self, discipline: str, workers: int, samples: int = 24, ahead: int = 0, why: str = ""
    ):
        what = problem(samples=samples)
        wanted = asked(*what, discipline, optimizer_for(discipline), workers, 4, 1)
        self.records = Records()
        log = Log()
        log.listeners.append(self.records)
        self.store = make_job(wanted).make_store(log)
        assert self.store.parameters is not None
        # Of each worker one, as where memory is shared: it is written again and again.
        self.buffers = [
            [Flat(flat.table) for flat in self.store.parameters.flats] for _ in range(workers)
        ]
        for flat in (flat for buffer in self.buffers for flat in buffer):
            for view in flat.views.values():
                view.zero_()
        settings = ServerSettings(PATIENCE, ahead)
        self.protocol = ServerProtocol(self.store, workers, settings, lambda worker: why)
        self.now = 100.0
        self.told: list[deque[Message]] = [deque() for _ in range(workers)]
        self.unheard: set[int] = set()  # who has said something that has not been dealt with
        self.sequence = [-1] * workers

    # ------------------------------------------------------------ what happens

    def connect(self, worker: int) -> None:
        self.told[worker].clear()
        self.protocol.disconnect(worker)
        self.protocol.connect(worker, self.now)
        self._go_on()

    def say(self, worker: int, message: Message, contribution: Contribution | None = None) -> None:
        self.protocol.receive(worker, message, contribution, self.now)
        self._go_on()
        self.look()

    def die(self, worker: int) -> None:
        self.protocol.gone(worker, self.now)
        self._go_on()

    def look(self) -> None:
        self.protocol.look(self.now, self.unheard.__contains__)
        self._go_on()

    def dismiss(self) -> None:
        self.protocol.dismiss()
        self._go_on()

    def _go_on(self) -> None:
        while self.protocol.proceed(self.now):
            pass
        for worker, message, _ in self.protocol.take():
            self.told[worker].append(message)

    # ------------------------------------------------------------ what workers say

    def enter(self, worker: int) -> int:
        self.say(worker, Join())
        found = self.answer(worker)
        assert isinstance(found, Welcome)
        self.sequence[worker] = -1
        return found.incarnation

    def begin(self) -> dict[int, Go]:
        """Everybody joins and pulls; returns what they were told."""
        workers = range(len(self.sequence))
        for worker in workers:
            self.connect(worker)
            self.enter(worker)
        for worker in workers:
            self.say(worker, Pull([]))
        return {worker: self.go(worker) for worker in workers}

    def push(
        self,
        worker: int,
        version: int,
        leases: Sequence[Lease],
        pull: bool = True,
        incarnation: int = 1,
        ahead: Sequence[Lease] = (),
    ) -> None:
        self.sequence[worker] += 1
        self.repeat(worker, version, leases, pull, incarnation, ahead)

    def repeat(
        self,
        worker: int,
        version: int,
        leases: Sequence[Lease],
        pull: bool = True,
        incarnation: int = 1,
        ahead: Sequence[Lease] = (),
    ) -> None:
        """Push what was pushed last once more."""
        samples = sum(lease.samples for lease in leases)
        sequence = self.sequence[worker]
        part = Part(worker, incarnation, sequence, version, list(leases), samples)
        contribution = Contribution(part, self.buffers[worker])
        self.say(worker, Push(part, pull, list(ahead)), contribution)

    def fill(self, worker: int, value: float) -> None:
        """Write a worker's buffers."""
        for flat in self.buffers[worker]:
            for view in flat.views.values():
                view.fill_(value)

    # ------------------------------------------------------------ what they are told

    def answer(self, worker: int) -> Message:
        return self.told[worker].popleft()

    def go(self, worker: int) -> Go:
        found = self.answer(worker)
        assert isinstance(found, Go), found
        return found

    def quiet(self, worker: int) -> bool:
        return not self.told[worker]

    def state(self, worker: int) -> int:
        return int(self.store.cells[Row.STATE, worker])
