"""The server's end of all wires: what lies in the slots, who has spoken, and what goes out when."""

import pytest
import torch

from offbeat.config.run_config import Local
from offbeat.config.setup import make_job
from offbeat.engine.local.plan import memory_plan
from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.log.log import Log
from offbeat.log.records import Part
from offbeat.protocol.messages import AskLeases, Go, Leased, Push, Rest, Stop, Wake, Welcome
from offbeat.transport.memory_link import MemoryPort
from tests.contract.common import asked, optimizer_for, problem
from tests.transport.common import A, WireEnd, go, wire_pair


def normed():
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


class Ported:
    """A port over the slots of a job, and the workers' ends of its wires."""

    def __init__(self, discipline="asp", workers=2, make=normed, local=None):
        what = problem(make)
        wanted = asked(*what, discipline, optimizer_for(discipline), workers, 4, 1)
        job = make_job(wanted)
        self.shared = SharedMemory(memory_plan(job, local or Local()))
        self.store = job.make_store(Log(), self.shared.parameters, self.shared.cells)
        self.parameters = self.store.parameters
        assert self.parameters is not None
        self.parameters.begin(what.model)
        self.port = MemoryPort(self.shared.slots, self.parameters)
        self.copies, give = [], self.parameters.give

        def noted(worker, slot, place):
            self.copies.append((worker, place))
            give(worker, slot, place)

        self.parameters.give = noted
        self.wires, self.ends = [], {}
        for worker in range(workers):
            self.connect(worker)

    def connect(self, worker):
        mine, theirs = wire_pair()
        self.wires += [mine, theirs]
        self.ends[worker] = WireEnd(mine, of_server=False)
        self.port.connect(worker, theirs)

    def put(self, worker, message):
        self.port.put(worker, message, None)

    def send(self):
        self.port.send(self.port.take())

    def close(self):
        for wire in self.wires:
            wire.close()
        self.shared.arena.close()


@pytest.fixture
def ported():
    made = []

    def make(*args, **more):
        made.append(Ported(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def part(skipped=False):
    return Part(0, 1, 0, 0, [A], 4, skipped=skipped)


# ---------------------------------------------------------------- what comes


def test_messages_come_in_order_and_each_from_its_worker(ported):
    p = ported()
    p.ends[0].say(AskLeases(), Rest(1.0, 2.0))
    p.ends[1].say(Rest(3.0, 4.0))
    assert p.port.receive(1) == (Rest(3.0, 4.0), None)
    assert [p.port.receive(0).message for _ in range(2)] == [AskLeases(), Rest(1.0, 2.0)]


def test_nothing_is_waited_for(ported):
    with pytest.raises(BlockingIOError):
        ported().port.receive(0)


def test_a_worker_that_is_gone_is_noticed_after_what_it_said_last(ported):
    p = ported()
    p.ends[0].say(AskLeases())
    p.ends[0].wire.close()
    assert p.port.receive(0).message == AskLeases()
    assert p.port.receive(0) is None


def test_who_has_spoken_is_known_without_taking_it(ported):
    p = ported()
    assert not p.port.spoken(0)
    p.ends[0].say(AskLeases())
    assert p.port.spoken(0)
    assert p.port.spoken(0)
    assert not p.port.spoken(1)
    p.port.receive(0)
    assert not p.port.spoken(0)


def test_so_is_an_end_but_not_that_of_one_who_was_let_go(ported):
    p = ported()
    p.ends[0].wire.close()
    assert p.port.spoken(0)
    p.port.disconnect(0)
    assert not p.port.spoken(0)


def test_a_contribution_is_what_lies_in_the_slot(ported):
    p = ported()
    slot = p.shared.slots[0]
    p.ends[0].say(Push(part(), True, absent=["0.bias"], place=0))
    push, found = p.port.receive(0)
    assert push.part == found.part == part()
    assert found.payload is slot.outgoing[0]
    assert (found.absent, found.place) == (frozenset({"0.bias"}), 0)


def test_statistics_are_the_stores_own_the_worker_goes_on_writing_its_slot(ported):
    p = ported()
    views = p.shared.slots[0].statistics.views
    for view in views.values():
        view.fill_(3)
    p.ends[0].say(Push(part(), True, place=0))
    found = p.port.receive(0).contribution
    for view in views.values():
        view.fill_(4)
    assert found.statistics.keys() == views.keys()
    assert all(bool((tensor == 3).all()) for tensor in found.statistics.values())


def test_one_that_skipped_its_step_has_no_statistics(ported):
    p = ported()
    p.ends[0].say(Push(part(skipped=True), True, place=0))
    assert p.port.receive(0).contribution.statistics == {}


def test_nothing_goes_out_where_there_is_no_place(ported):
    p = ported()
    p.ends[0].say(Push(part(), True))
    assert p.port.receive(0).contribution.payload is None


def test_local_state_comes_along_but_for_what_the_worker_lacks(ported):
    p = ported("average:2")
    names = list(p.shared.slots[0].updater.views)
    assert len(names) > 1
    p.ends[0].say(Push(part(), True, place=0, lacking=[1]))
    found = p.port.receive(0).contribution.updater
    assert list(found) == [name for i, name in enumerate(names) if i != 1]


# ---------------------------------------------------------------- what goes


def test_what_is_put_leaves_when_it_is_sent_and_in_that_order(ported):
    p = ported()
    p.put(0, Leased([A]))
    p.put(0, Wake())
    p.put(1, Stop(True))
    assert p.ends[0].quiet
    due = p.port.take()
    assert set(due) == {0, 1}
    assert p.port.take() == []
    p.port.send(due)
    assert [p.ends[0].heard(), p.ends[0].heard()] == [Leased([A]), Wake()]
    assert p.ends[1].heard() == Stop(True)


def test_a_turn_comes_with_the_stores_parameters_of_the_moment_it_was_put(ported):
    p = ported()
    mine = p.shared.slots[0].incoming[0]
    before = [view.clone() for flat in p.parameters.flats for view in flat.views.values()]
    p.put(0, go(A))
    with torch.no_grad():
        for flat in p.parameters.flats:
            for view in flat.views.values():
                view.add_(1.0)
    p.send()
    heard = p.ends[0].heard()
    assert (heard.version, heard.place, heard.updater) == (3, 0, False)
    after = [view for flat in mine for view in flat.views.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_with_two_places_the_worker_goes_on_computing_in_the_other(ported):
    p = ported(local=Local(overlap=True))
    for _ in range(3):
        p.put(0, go())
    p.put(1, go())
    p.send()
    assert [p.ends[0].heard().place for _ in range(3)] == [0, 1, 0]
    assert p.ends[1].heard().place == 0
    assert p.copies == [(0, 0), (0, 1), (0, 0), (1, 0)]


def test_one_that_has_the_parameters_already_gets_none(ported):
    p = ported()
    p.put(0, go(fresh=False))
    p.send()
    assert isinstance(p.ends[0].heard(), Go)
    assert p.copies == []


def test_averaged_local_state_is_told_of_and_what_of_it_nobody_has(ported):
    p = ported("average:2")
    names = list(p.shared.slots[0].updater.views)
    value = torch.full_like(p.shared.slots[0].updater.views[names[0]], 5.0)
    p.parameters.updater_state = {names[0]: value}
    p.put(0, go())
    p.send()
    heard = p.ends[0].heard()
    assert heard.updater
    assert heard.lacking == list(range(1, len(names)))
    assert torch.equal(p.shared.slots[0].updater.views[names[0]], value)


def test_one_that_joins_finds_the_mean_of_averaged_buffers_in_its_slot(ported):
    p = ported()
    p.parameters.averages.take(1, 4, {n: torch.full_like(v, 6) for n, v in means(p).items()})
    p.put(0, Welcome(1))
    views = p.shared.slots[0].statistics.views
    assert views.keys() == means(p).keys()
    assert all(bool((view == 6).all()) for view in views.values())


def means(p):
    return p.parameters.averages.mean()


# ---------------------------------------------------------------- wires


def test_a_new_wire_takes_the_place_of_the_old(ported):
    p = ported()
    old = p.ends[0]
    p.connect(0)
    assert old.heard() is None
    p.ends[0].say(AskLeases())
    assert p.port.receive(0).message == AskLeases()
    p.put(0, Wake())
    p.send()
    assert p.ends[0].heard() == Wake()


def test_what_was_put_for_an_old_wire_does_not_reach_the_new(ported):
    p = ported()
    p.put(0, Wake())
    p.connect(0)
    p.put(0, Leased([]))
    p.send()
    assert p.ends[0].heard() == Leased([])


def test_one_who_was_let_go_hears_its_end_and_is_told_nothing_more(ported):
    p = ported()
    p.put(0, Stop(True))
    p.send()
    p.port.disconnect(0)
    p.put(0, Wake())
    assert p.port.take() == []
    assert p.ends[0].heard() == Stop(True)
    assert p.ends[0].heard() is None


def test_the_dead_hold_up_nobody(ported):
    p = ported()
    p.ends[0].wire.close()
    p.put(0, Wake())
    p.put(1, Wake())
    p.send()
    assert p.ends[1].heard() == Wake()
