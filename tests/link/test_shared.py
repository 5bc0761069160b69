"""The worker's end of a wire: what it sends, what it makes of answers, and how it hears ends."""

import socket

import pytest
import torch

from offbeat.codec import parse
from offbeat.contribution import Contribution
from offbeat.lease import Lease
from offbeat.link.base import Over, Refused, Stopped
from offbeat.link.memory import Plan, Shared
from offbeat.link.messages import (
    Again,
    Ask,
    Bye,
    Go,
    Join,
    Leased,
    Packets,
    Pull,
    Push,
    Rest,
    Stop,
    Took,
    Wake,
    Welcome,
    encode,
    to_store,
)
from offbeat.link.shared import SharedLink
from offbeat.log import Part
from offbeat.store.table import Entry, Table

A, B, C = Lease(0, 0, 4), Lease(0, 4, 8), Lease(0, 8, 12)


class Wire:
    """The server's end, in the hands of the test, and a link at the other."""

    def __init__(self, places: int = 1, centre: bool = False):
        parameters = Table.of([Entry("w", (4,), torch.float32, "trained")])
        statistics = Table.of([Entry("mean", (2,), torch.float32, "averaged")])
        updater = Table.of([Entry("momentum", (4,), torch.float32, "averaged")])
        self.shared = Shared(Plan([parameters], statistics, updater, 1, places, places))
        self.slot = self.shared.slots[0]
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.settimeout(20)
        self.link = SharedLink(theirs, self.slot, centre)

    def will_say(self, *messages) -> None:
        for message in messages:
            self.end.send(encode(message))

    def heard(self):
        return to_store(self.end.recv(Packets.LARGEST))

    def close(self) -> None:
        self.end.close()
        self.link.wire.close()
        self.shared.arena.close()


@pytest.fixture
def wired():
    made = []

    def make(*args, **more):
        made.append(Wire(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def go(*leases, place=0, version=3, updater=False):
    return Go(version, 2, 1, list(leases), 0.5, place, updater)


def contribution(slot, place=0, **more):
    return Contribution(Part(0, 1, 0, 3, [A], 4), slot.outgoing[place], **more)


def push(w, sent, then_pull):
    w.link.put(sent, then_pull)
    w.link.push()


def test_joining_skips_what_was_meant_for_an_earlier_incarnation(wired):
    w = wired()
    w.will_say(go(A), Took([B]), Again(), Wake(), Welcome(4))
    assert w.link.join() == 4
    assert w.heard() == Join()
    w.will_say(Leased([C]))
    assert w.link.lease() == C  # A and B are others' by now


def test_a_pull_brings_parameters_and_leases(wired):
    w = wired()
    for view in w.slot.incoming[0][0].views.values():
        view.fill_(7.0)
    w.will_say(go(A, B))
    snapshot = w.link.pull([C])
    assert w.heard() == Pull([C], True)
    assert (snapshot.version, snapshot.steps, snapshot.epoch) == (3, 2, 1)
    assert snapshot.parameters is w.slot.incoming[0]
    assert snapshot.updater == {}
    assert w.link.waited == 0.5
    assert [w.link.lease(), w.link.lease()] == [A, B]


def test_the_answer_says_in_which_place_the_parameters_lie(wired):
    w = wired(places=2)
    w.will_say(go(place=1, updater=True))
    snapshot = w.link.pull([])
    assert snapshot.parameters is w.slot.incoming[1]
    assert snapshot.updater.keys() == {"momentum"}


def test_a_link_to_a_centre_does_not_wait_for_others(wired):
    w = wired(centre=True)
    w.will_say(go())
    w.link.pull([])
    assert w.heard() == Pull([], False)


def test_leases_are_asked_for_when_there_are_none(wired):
    w = wired()
    w.will_say(Leased([A]))
    assert w.link.lease() == A
    assert w.heard() == Ask()
    w.will_say(Leased([]))
    assert w.link.lease() is None


def test_every_lease_is_announced_when_it_comes(wired):
    w = wired()
    told = []
    w.link.announce = told.append
    w.will_say(go(A, B))
    w.link.pull([])
    assert told == [A, B]


def test_a_push_is_a_signal_and_its_answer_serves_for_the_pull(wired):
    w = wired()
    before = w.slot.outgoing[0][0].views["w"].data_ptr()
    push(w, contribution(w.slot), then_pull=True)
    heard = w.heard()
    assert isinstance(heard, Push)
    assert (heard.pull, heard.place, heard.ahead, heard.part.leases) == (True, 0, [], [A])
    w.will_say(go(B))
    w.link.pull([])  # without another word
    w.end.setblocking(False)
    with pytest.raises(BlockingIOError):
        w.end.recv(Packets.LARGEST)
    assert w.slot.outgoing[0][0].views["w"].data_ptr() == before


def test_a_push_without_a_pull_waits_until_the_slot_is_free(wired):
    w = wired()
    w.will_say(Took([B]))
    push(w, contribution(w.slot), then_pull=False)
    assert w.link.lease() == B


def test_with_two_places_a_push_says_which_and_what_is_computed_meanwhile(wired):
    w = wired(places=2)
    w.will_say(go(B))
    w.link.pull([])
    w.heard()
    push(w, contribution(w.slot, place=1), then_pull=True)
    heard = w.heard()
    assert (heard.place, heard.ahead) == (1, [B])


def test_what_goes_along_lies_in_the_slot(wired):
    w = wired()
    sent = contribution(
        w.slot,
        absent=frozenset({"w"}),
        statistics={"mean": torch.ones(2)},
        updater={"momentum": torch.full((4,), 2.0)},
    )
    push(w, sent, then_pull=True)
    assert w.heard().absent == ["w"]
    assert w.slot.statistics.views["mean"].tolist() == [1.0, 1.0]
    assert w.slot.updater.views["momentum"].tolist() == [2.0] * 4


def test_the_store_sees_what_packing_left(wired):
    w = wired()
    codec = parse("topk:0.3")
    values = torch.tensor([1.0, -9.0, 2.0, 8.0])
    packed = codec.encode(values, torch.Generator().manual_seed(0))
    w.slot.outgoing[0][0].views["w"].copy_(values)
    push(w, contribution(w.slot, packed={"w": packed}), then_pull=True)
    assert torch.equal(w.slot.outgoing[0][0].views["w"], codec.decode(packed))
    assert not torch.equal(w.slot.outgoing[0][0].views["w"], values)


def test_resting_ends_when_leases_have_come_back(wired):
    w = wired()
    w.will_say(Wake())
    w.link.rest(1.0, 2.0)
    assert w.heard() == Rest(1.0, 2.0)


CALLS = {
    "pull": lambda w: w.link.pull([]),
    "lease": lambda w: w.link.lease(),
    "push": lambda w: push(w, contribution(w.slot), then_pull=False),
    "rest": lambda w: w.link.rest(0.0, 0.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_one_that_was_given_up_hears_of_it_whatever_it_asks(wired, call):
    w = wired()
    w.will_say(Again())
    with pytest.raises(Refused):
        CALLS[call](w)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["stop", "close"])
def test_the_end_is_heard_whatever_it_asks(wired, call, how):
    w = wired()
    if how == "stop":
        w.will_say(Stop(True))
    else:
        w.end.close()
    with pytest.raises(Over):
        CALLS[call](w)


@pytest.mark.parametrize("finished", [True, False])
def test_one_that_slept_through_the_end_hears_how_it_was(wired, finished):
    """It speaks to nobody, but what was said to it last is still there to be read."""
    w = wired()
    w.will_say(Leased([A]))
    w.will_say(Stop(finished))
    w.end.close()
    with pytest.raises(Over) as end:
        w.link.pull([])
    assert type(end.value) is (Over if finished else Stopped)


def test_last_words_need_nobody_to_hear_them(wired):
    w = wired()
    w.link.bye({"peak": 1.0})
    assert w.heard() == Bye({"peak": 1.0})
    w.end.close()
    w.link.bye({"peak": 1.0})
