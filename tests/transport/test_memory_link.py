"""The worker's end of a wire: what it sends, where tensors lie, and how it hears ends."""

import pytest
import torch

from offbeat.codec import parse
from offbeat.model.table import Flat
from offbeat.protocol.messages import AskLeases, Leased, Push, Stop, Wake
from offbeat.transport.link import StoreGone
from offbeat.transport.memory_link import MemoryLink, Waiting
from tests.transport.common import A, B, WireEnd, contribution, go, shared_memory, wire_pair


class Linked:
    """A link, and the server's end of its wire."""

    def __init__(self, places: int = 1, waiting: Waiting | None = None, beside: bool = False):
        self.shared = shared_memory(places=places)
        self.slot = self.shared.slots[0]
        self.wire, theirs = wire_pair()
        self.server = WireEnd(self.wire, of_server=True)
        local = Flat(self.slot.updater.table) if beside else None
        self.link = MemoryLink(theirs, self.slot, waiting, local)

    def push(self, sent, pull=True):
        self.link.prepare(Push(sent.part, pull, [], sorted(sent.absent)), sent)
        self.link.push()

    def close(self) -> None:
        self.wire.close()
        self.link.wire.close()
        self.shared.arena.close()


@pytest.fixture
def linked():
    made = []

    def make(*args, **more):
        made.append(Linked(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_messages_go_and_come_in_order(linked):
    found = linked()
    found.link.send(AskLeases())
    assert found.server.heard() == AskLeases()
    found.server.say(Leased([A]), Wake())
    assert [found.link.receive(), found.link.receive()] == [Leased([A]), Wake()]


def test_when_the_last_message_came_is_known(linked, monkeypatch):
    found = linked()
    monkeypatch.setattr("offbeat.transport.memory_link.time.perf_counter", lambda: 7.0)
    found.server.say(Wake())
    found.link.receive()
    assert found.link.came == 7.0


def test_what_was_pulled_lies_in_the_slot(linked):
    found = linked()
    snapshot = found.link.snapshot(go(A, B))
    assert (snapshot.version, snapshot.steps, snapshot.epoch) == (3, 2, 1)
    assert snapshot.parameters is found.slot.incoming[0]
    assert snapshot.updater == {}


def test_the_answer_says_in_which_place_the_parameters_lie(linked):
    found = linked(places=2)
    snapshot = found.link.snapshot(go(place=1, updater=True))
    assert snapshot.parameters is found.slot.incoming[1]
    assert snapshot.updater.keys() == {"momentum"}


def test_local_state_that_nobody_has_does_not_come_along(linked):
    assert linked().link.snapshot(go(updater=True, lacking=[0])).updater == {}


def test_a_push_is_a_signal_and_its_tensors_stay_where_they_are(linked):
    found = linked()
    before = found.slot.outgoing[0][0].views["w"].data_ptr()
    sent = contribution(found.slot)
    found.link.prepare(Push(sent.part, True), sent)
    assert found.server.quiet
    found.link.push()
    heard = found.server.heard()
    assert isinstance(heard, Push)
    assert (heard.pull, heard.place, heard.ahead, heard.part.leases) == (True, 0, [], [A])
    assert found.server.quiet
    assert found.slot.outgoing[0][0].views["w"].data_ptr() == before


def test_with_two_places_a_push_says_which(linked):
    found = linked(places=2)
    found.push(contribution(found.slot, place=1))
    assert found.server.heard().place == 1


def test_a_push_without_a_payload_has_no_place(linked):
    found = linked()
    sent = contribution(found.slot)
    sent.payload = None
    found.push(sent)
    assert found.server.heard().place == -1


def test_what_goes_along_lies_in_the_slot(linked):
    found = linked()
    sent = contribution(
        found.slot,
        absent=frozenset({"w"}),
        statistics={"mean": torch.ones(2)},
        updater={"momentum": torch.full((4,), 2.0)},
    )
    found.push(sent)
    heard = found.server.heard()
    assert (heard.absent, heard.lacking) == (["w"], [])
    assert found.slot.statistics.views["mean"].tolist() == [1.0, 1.0]
    assert found.slot.updater.views["momentum"].tolist() == [2.0] * 4


def test_local_state_that_a_worker_lacks_is_told_and_adds_nothing(linked):
    found = linked()
    found.slot.updater.views["momentum"].fill_(9.0)
    found.push(contribution(found.slot))
    assert found.server.heard().lacking == [0]
    assert found.slot.updater.views["momentum"].tolist() == [0.0] * 4


def test_local_state_may_go_beside_a_slot_that_others_read(linked):
    found = linked(beside=True)
    found.slot.updater.views["momentum"].fill_(9.0)
    found.push(contribution(found.slot, updater={"momentum": torch.ones(4)}))
    assert found.slot.updater.views["momentum"].tolist() == [9.0] * 4
    assert found.link.local.views["momentum"].tolist() == [1.0] * 4


def test_the_store_sees_what_packing_left(linked):
    found = linked()
    codec = parse("topk:0.3")
    values = torch.tensor([1.0, -9.0, 2.0, 8.0])
    packed = codec.encode(values, torch.Generator().manual_seed(0))
    found.slot.outgoing[0][0].views["w"].copy_(values)
    found.push(contribution(found.slot, packed={"w": packed}))
    assert torch.equal(found.slot.outgoing[0][0].views["w"], codec.decode(packed))
    assert not torch.equal(found.slot.outgoing[0][0].views["w"], values)


def test_before_a_step_and_only_then_the_worker_looks_where_it_runs(linked):
    class Noted(Waiting):
        steps = 0

        def step_begins(self) -> None:
            self.steps += 1

    waiting = Noted()
    found = linked(waiting=waiting)
    found.server.say(Wake(), go(A), Leased([]))
    seen = []
    for _ in range(3):
        found.link.receive()
        seen.append(waiting.steps)
    assert seen == [0, 1, 1]


def test_a_link_whose_other_end_is_gone_says_so(linked):
    found = linked()
    found.wire.close()
    with pytest.raises(StoreGone):
        found.link.receive()
    with pytest.raises(StoreGone):
        found.link.send(AskLeases())
    with pytest.raises(StoreGone):
        found.push(contribution(found.slot))


def test_what_was_said_before_the_end_is_still_there(linked):
    found = linked()
    found.server.say(Leased([A]), Stop(True))
    found.wire.close()
    with pytest.raises(StoreGone):
        found.link.send(AskLeases())
    assert [found.link.receive(), found.link.receive()] == [Leased([A]), Stop(True)]
    with pytest.raises(StoreGone):
        found.link.receive()
