"""A server at work over shared memory: what comes through its port, and a clock the test sets."""

import pytest
import torch

from offbeat.config.run_config import Local
from offbeat.config.setup import make_job
from offbeat.engine.local.plan import memory_plan
from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.engine.server import Server
from offbeat.log.log import Log
from offbeat.log.records import Joined, Lost, Part
from offbeat.protocol.messages import AskLeases, Go, Goodbye, Join, Pull, Push, Stop, Welcome
from offbeat.protocol.server import ServerProtocol, ServerSettings
from offbeat.store.board import Row, State
from offbeat.transport.memory_link import MemoryPort
from tests.contract.common import Records, asked, optimizer_for, problem
from tests.transport.common import WireEnd, wire_pair

PATIENCE = 10.0


class Served:
    """A server over wires whose other ends the test holds, and everything it has logged."""

    def __init__(self, discipline, workers):
        what = problem()
        wanted = asked(*what, discipline, optimizer_for(discipline), workers, 4, 1)
        job = make_job(wanted)
        self.shared = SharedMemory(memory_plan(job, Local()))
        self.records = Records()
        log = Log()
        log.listeners.append(self.records)
        self.store = job.make_store(log, self.shared.parameters, self.shared.cells)
        assert self.store.parameters is not None
        self.store.parameters.begin(what.model)
        self.port = MemoryPort(self.shared.slots, self.store.parameters)
        self.protocol = ServerProtocol(self.store, workers, ServerSettings(PATIENCE))
        self.now = 100.0
        self.server = Server(self.protocol, self.port, lambda: self.now)
        self.wires, self.ends = [], {}
        self.sequence = [-1] * workers

    def connect(self, worker):
        mine, theirs = wire_pair()
        self.wires += [mine, theirs]
        self.ends[worker] = WireEnd(mine, of_server=False)
        self.port.connect(worker, theirs)
        self.server.connect(worker)

    def say(self, worker, message):
        self.ends[worker].say(message)
        self.hear()

    def hear(self):
        """What a dispatcher does, in one thread: hear everyone who has spoken, then look."""
        for worker, wire in list(self.port.wires.items()):
            while self.port.wires.get(worker) is wire and self.port.spoken(worker):
                self.server.hear(worker)
        self.server.look()

    def answer(self, worker):
        """What the worker is told; None if its wire has ended."""
        self.port.send(self.port.take())
        return self.ends[worker].heard()

    def quiet(self, worker):
        self.port.send(self.port.take())
        return self.ends[worker].quiet

    def enter(self, worker):
        self.say(worker, Join())
        found = self.answer(worker)
        assert isinstance(found, Welcome)
        return found.incarnation

    def begin(self):
        for worker in range(len(self.sequence)):
            self.connect(worker)
            self.enter(worker)
        for worker in self.ends:
            self.say(worker, Pull([]))
        found = {worker: self.answer(worker) for worker in self.ends}
        assert all(isinstance(go, Go) for go in found.values())
        return found

    def pushed(self, worker, go, pull=True):
        self.sequence[worker] += 1
        samples = sum(lease.samples for lease in go.leases)
        part = Part(worker, 1, self.sequence[worker], go.version, go.leases, samples)
        return Push(part, pull, place=0)

    def push(self, worker, go):
        self.say(worker, self.pushed(worker, go))

    def state(self, worker):
        return int(self.store.cells[Row.STATE, worker])

    def close(self):
        for wire in self.wires:
            wire.close()
        self.shared.arena.close()


@pytest.fixture
def served():
    made = []

    def make(*args):
        made.append(Served(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_is_applied_is_what_lies_in_the_slot(served):
    s = served("asp", 1)
    go = s.begin()[0]
    before = [t.clone() for flat in s.store.parameters.flats for t in flat.views.values()]
    for flat in s.shared.slots[0].outgoing[0]:
        for view in flat.views.values():
            view.fill_(1.0)
    s.push(0, go)
    after = [t for flat in s.store.parameters.flats for t in flat.views.values()]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old - 0.05)
    assert s.store.applied == 4


def test_several_are_told_of_what_one_has_said(served):
    s = served("bsp", 2)
    go = s.begin()
    s.push(0, go[0])
    assert s.quiet(0)
    s.now += 3.0
    s.push(1, go[1])
    first, second = s.answer(0), s.answer(1)
    assert (first.version, second.version) == (1, 1)
    assert first.waited == pytest.approx(3.0)
    assert second.waited == pytest.approx(0.0)


def test_what_the_store_itself_takes_is_not_waiting(served):
    s = served("asp", 1)
    go = s.begin()[0]

    class Slow:
        """Stands for an update that takes its time."""

        def before(self):
            s.now += 5.0

        def write(self, version):
            pass

    s.store.witness = Slow()
    s.push(0, go)
    assert s.answer(0).waited == pytest.approx(0.0)


@pytest.mark.parametrize("pull", [True, False])
def test_what_the_store_itself_takes_is_not_the_workers_silence(served, pull):
    s = served("asp", 1)
    go = s.begin()[0]

    class Slow:
        """Stands for an update that takes its time."""

        def before(self):
            s.now += 2 * PATIENCE

        def write(self, version):
            pass

    s.store.witness = Slow()
    s.say(0, s.pushed(0, go, pull))
    s.now += 0.9 * PATIENCE
    s.server.look()
    assert s.state(0) == State.ACTIVE
    s.now += 0.1 * PATIENCE
    s.server.look()
    assert s.state(0) == State.LOST


def test_what_was_sent_in_time_counts_although_it_is_read_late(served):
    """Somebody stopped the server, not the worker."""
    s = served("asp", 1)
    go = s.begin()[0]
    s.ends[0].say(s.pushed(0, go))
    assert s.server.seconds_left() == PATIENCE
    s.now += 5 * PATIENCE
    assert s.server.seconds_left() is None  # nobody needs to look again for its sake
    s.server.look()
    assert s.state(0) == State.ACTIVE
    s.hear()
    assert s.state(0) == State.ACTIVE
    assert s.store.version == 1


def test_the_time_that_is_left_is_never_negative(served):
    s = served("asp", 1)
    s.begin()
    s.now += 2 * PATIENCE
    assert s.server.seconds_left() == 0.0
    s.server.look()
    assert s.state(0) == State.LOST


def test_a_dead_worker_is_lost_at_once_and_its_wire_is_let_go(served):
    s = served("bsp", 2)
    go = s.begin()
    s.push(0, go[0])
    s.ends[1].wire.close()
    s.hear()
    assert s.state(1) == State.LOST
    assert s.port.wires.keys() == {0}
    assert s.answer(0).version == 1


def test_a_new_wire_takes_the_place_of_the_old(served):
    """The new process may be there before the end of the old one has been read."""
    s = served("bsp", 2)
    go = s.begin()
    s.push(0, go[0])
    s.connect(1)
    assert s.enter(1) == 2
    assert [(r.worker, r.incarnation) for r in s.records.of(Lost)] == [(1, 1)]
    assert [r.incarnation for r in s.records.of(Joined) if r.worker == 1] == [1, 2]


def test_what_a_dead_worker_had_contributed_is_not_what_its_successor_writes(served):
    s = served("bsp", 2)
    go = s.begin()
    slot = s.shared.slots[0].outgoing[0]
    for flat in slot:
        for view in flat.views.values():
            view.fill_(1.0)
    s.push(0, go[0])
    s.ends[0].wire.close()
    s.hear()
    for flat in slot:
        for view in flat.views.values():
            view.fill_(100.0)
    (kept,) = s.store.gathered
    assert all(bool((v == 1.0).all()) for flat in kept.payload for v in flat.views.values())


def test_last_words_are_heard_and_the_dead_are_not_waited_for(served):
    s = served("asp", 3)
    s.begin()
    s.ends[0].say(Goodbye({"peak": 7.0}))
    s.ends[1].wire.close()
    s.ends[2].say(AskLeases())  # it asks for more before it hears that it is over
    s.ends[2].say(Goodbye({"peak": 9.0}))
    s.server.dismiss()
    s.port.send(s.port.take())
    s.hear()
    assert s.protocol.goodbyes == {0: {"peak": 7.0}, 2: {"peak": 9.0}}
    assert s.port.wires == {}
    assert s.answer(0) == Stop(False)
    assert s.answer(2) == Stop(False)
    assert s.answer(2) is None


def test_one_that_is_started_while_the_server_stops_is_sent_away(served):
    s = served("asp", 2)
    s.begin()
    s.ends[1].wire.close()
    s.server.dismiss()
    s.hear()
    s.connect(1)
    assert s.answer(1) == Stop(False)
    s.say(1, Goodbye({"peak": 1.0}))
    assert s.protocol.goodbyes == {1: {"peak": 1.0}}


def test_nobody_waits_for_one_whose_process_is_said_to_have_ended(served):
    """Whoever says so may be wrong: one that lives finds its way closed, and joins again."""
    s = served("bsp", 2)
    found = s.begin()
    s.push(0, found[0])
    assert s.quiet(0)
    s.server.gone(1)
    assert isinstance(s.answer(0), Go)
    assert [record.worker for record in s.records.of(Lost)] == [1]
    assert s.port.way(1) is None
    s.connect(1)
    assert s.enter(1) == 2
