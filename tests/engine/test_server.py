"""The server packet by packet, with wires whose other ends the test holds and a clock it sets."""

import socket
from types import SimpleNamespace

import pytest
import torch

from offbeat.board import Row, State
from offbeat.engine import server as server_module
from offbeat.engine.crew import Crew
from offbeat.engine.local_plan import Local
from offbeat.engine.server import FROZEN, IN_VAIN, Server, Watch
from offbeat.engine.steward import Rhythm
from offbeat.errors import RunError
from offbeat.lease import Lease
from offbeat.link.messages import (
    Again,
    Ask,
    Bye,
    Go,
    Join,
    Leased,
    Message,
    Packets,
    Pull,
    Push,
    Rest,
    Stop,
    Took,
    Wake,
    Welcome,
    encode,
    to_worker,
)
from offbeat.log import Joined, Lost, Part, Refused, Updated
from offbeat.setup import Essentials, make_job
from tests.contract.common import Records, optimizer_for, problem

PATIENCE = 10.0


class Bench:
    """A server, both ends of its wires, and everything it has logged."""

    def __init__(self, discipline: str, workers: int, samples: int = 24, ahead: int = 0):
        what = problem(samples=samples)
        wanted = Essentials(*what, discipline, optimizer_for(discipline), workers, 4, 1)
        self.crew = Crew(make_job(wanted, {}), Local(), None, None, Rhythm())
        self.store = self.crew.store
        self.records = Records()
        self.store.log.listeners.append(self.records)
        self.server = Server(self.store, self.crew.shared, PATIENCE, ahead, Watch())
        self.silent: list[int] = []
        self.heard_at: list[socket.socket] = []  # the server's ends, which nobody else closes
        self.server.silent = self.silent.append
        self.ends: dict[int, socket.socket] = {}
        self.sequence = [-1] * workers
        assert self.store.parameters is not None
        self.store.parameters.begin(what.model)

    def connect(self, number: int) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.settimeout(20)
        if number in self.ends:
            self.ends[number].close()
        self.ends[number] = mine
        self.heard_at.append(theirs)
        self.server.connect(number, theirs)

    def say(self, number: int, message: Message) -> None:
        self.ends[number].send(encode(message))
        self.hear()

    def hear(self) -> None:
        """What a floor does, in one thread: hear everyone who has spoken, then look at the time."""
        for number, wire in list(self.server.wires.items()):
            while self.server.wires.get(number) is wire and self.server.spoken(number):
                self.server.hear(number)
        self.look()

    def look(self) -> None:
        self.server.give_up_the_silent(server_module.time.monotonic())

    def answer(self, number: int) -> Message | None:
        """What the worker is told; None if its wire has ended."""
        self.send()
        packet = self.ends[number].recv(Packets.LARGEST)
        return to_worker(packet) if packet else None

    def send(self) -> None:
        """What a floor does when it leaves."""
        self.server.answers.send(self.server.unsaid())

    def quiet(self, number: int) -> bool:
        self.send()
        self.ends[number].setblocking(False)
        try:
            self.ends[number].recv(Packets.LARGEST, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self.ends[number].settimeout(20)
        return False

    def enter(self, number: int) -> int:
        self.say(number, Join())
        found = self.answer(number)
        assert isinstance(found, Welcome)
        self.sequence[number] = -1
        return found.incarnation

    def begin(self) -> dict[int, Go]:
        """Everybody joins and pulls; returns what they were told."""
        for number in range(len(self.sequence)):
            self.connect(number)
            self.enter(number)
        for number in self.ends:
            self.say(number, Pull([]))
        found = {number: self.answer(number) for number in self.ends}
        assert all(isinstance(go, Go) for go in found.values())
        return found

    def push(self, number: int, go: Go, pull: bool = True, incarnation: int = 1) -> None:
        self.sequence[number] += 1
        samples = sum(lease.samples for lease in go.leases)
        part = Part(number, incarnation, self.sequence[number], go.version, go.leases, samples)
        self.say(number, Push(part, [], pull))

    def state(self, number: int) -> int:
        return int(self.store.cells[Row.STATE, number])

    def close(self) -> None:
        for end in (*self.ends.values(), *self.heard_at):
            end.close()
        self.crew.close()


@pytest.fixture
def now(monkeypatch):
    """The time, which passes only when the test says so."""
    time = SimpleNamespace(at=100.0)
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: time.at))
    return time


@pytest.fixture
def bench(now):
    made = []

    def make(*args, **more):
        made.append(Bench(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---------------------------------------------------------------- the path of a gradient


def test_nobody_begins_before_everybody_is_there(bench):
    b = bench("asp", 2)
    b.connect(0)
    b.connect(1)
    b.enter(0)
    b.say(0, Pull([]))
    assert b.quiet(0)
    b.enter(1)
    go = b.answer(0)
    assert (go.version, go.steps, go.leases) == (0, 1, [Lease(0, 0, 4)])
    assert b.quiet(1)


def test_one_that_died_before_it_joined_is_not_waited_for(bench):
    b = bench("asp", 2)
    b.connect(0)
    b.connect(1)
    b.enter(0)
    b.say(0, Pull([]))
    b.ends[1].close()
    b.hear()
    assert isinstance(b.answer(0), Go)


def test_a_worker_that_is_replaced_before_the_first_step_gets_one_turn(bench):
    b = bench("asp", 2)
    b.connect(0)
    b.connect(1)
    b.enter(0)
    b.say(0, Pull([]))  # its turn comes when worker 1 is there, but it dies before
    b.connect(0)
    assert b.enter(0) == 2
    b.say(0, Pull([]))
    b.enter(1)
    assert isinstance(b.answer(0), Go)
    assert b.quiet(0)
    assert len([r for r in b.records.all if type(r).__name__ == "Pulled"]) == 1


def test_lock_step_holds_a_worker_until_all_have_contributed(bench, now):
    b = bench("bsp", 2)
    go = b.begin()
    b.push(0, go[0])
    assert b.quiet(0)
    now.at += 3.0
    b.push(1, go[1])
    first = b.answer(0)
    assert first.version == 1
    assert first.waited == pytest.approx(3.0)
    assert b.answer(1).waited == pytest.approx(0.0)


def test_what_the_store_itself_takes_is_not_waiting(bench, now):
    b = bench("asp", 1)
    go = b.begin()[0]

    def takes_long():
        now.at += 5.0

    b.store.on_update = takes_long
    b.push(0, go)
    assert b.answer(0).waited == pytest.approx(0.0)


def test_a_push_alone_is_answered_at_once(bench):
    b = bench("downpour:2,3", 1)
    b.begin()
    b.say(0, Ask())
    b.push(0, Go(0, 2, 0, [Lease(0, 0, 4), Lease(0, 4, 8)], 0.0, 0, False), pull=False)
    b.answer(0)
    assert isinstance(b.answer(0), Took)


def test_leases_ahead_come_with_the_answer(bench):
    b = bench("asp", 1, ahead=2)
    go = b.begin()[0]
    assert len(go.leases) == 3
    b.push(0, Go(0, 1, 0, go.leases[:1], 0.0, 0, False))
    assert b.answer(0).leases == [Lease(0, 12, 16)]


def test_what_is_applied_is_what_lies_in_the_slot(bench):
    b = bench("asp", 1)
    go = b.begin()[0]
    before = [t.clone() for flat in b.store.parameters.flats for t in flat.views.values()]
    for flat in b.crew.shared.slots[0].outgoing[0]:
        for view in flat.views.values():
            view.fill_(1.0)
    b.push(0, go)
    after = [t for flat in b.store.parameters.flats for t in flat.views.values()]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old - 0.05)
    assert b.crew.shared.applied == 4


# ---------------------------------------------------------------- the silent and the dead


def test_a_silent_worker_is_given_up_after_patience_and_not_before(bench, now):
    b = bench("bsp", 2)
    go = b.begin()
    b.push(0, go[0])
    now.at += PATIENCE - 0.1
    b.hear()
    assert b.state(1) == State.ACTIVE
    now.at += 0.2
    b.hear()
    assert b.state(1) == State.LOST
    lost = next(b.records.of(Lost))
    assert (lost.worker, lost.leases) == (1, go[1].leases)
    assert b.answer(0).leases == go[1].leases  # before anything new


def test_a_held_worker_may_be_silent_for_ever(bench, now):
    b = bench("bsp", 2)
    go = b.begin()
    b.push(0, go[0])
    for _ in range(3):  # worker 1 gives signs of life, worker 0 has nothing to say
        now.at += 0.9 * PATIENCE
        b.say(1, Ask())
        assert isinstance(b.answer(1), Leased)
    assert b.state(0) == State.ACTIVE


def test_what_was_sent_in_time_counts_although_it_is_read_late(bench, now):
    """Somebody stopped the server, not the worker."""
    b = bench("asp", 1)
    go = b.begin()[0]
    b.sequence[0] += 1
    part = Part(0, 1, 0, 0, go.leases, 4)
    b.ends[0].send(encode(Push(part, [], True)))
    assert b.server.patience_left(now.at) == PATIENCE
    now.at += 5 * PATIENCE
    assert b.server.patience_left(now.at) is None  # nobody needs to look again for its sake
    b.look()
    assert b.state(0) == State.ACTIVE
    b.hear()
    assert b.state(0) == State.ACTIVE
    assert b.store.version == 1


def test_one_that_wakes_is_refused_and_joins_again(bench, now):
    b = bench("asp", 2)
    go = b.begin()
    now.at += PATIENCE
    b.push(0, go[0])
    b.answer(0)
    b.hear()
    assert b.state(1) == State.LOST
    b.push(1, go[1])
    assert isinstance(b.answer(1), Again)
    refused = next(b.records.of(Refused))
    assert (refused.worker, refused.incarnation, refused.sequence) == (1, 1, 0)
    assert b.enter(1) == 2
    b.say(1, Pull([]))
    assert isinstance(b.answer(1), Go)
    applied = [part for r in b.records.of(Updated) for part in r.parts]
    assert [part.worker for part in applied] == [0]


@pytest.mark.parametrize("message", [Pull([]), Ask(), Rest(0.0, 0.0)], ids=lambda m: str(m)[:4])
def test_whatever_one_that_wakes_says_it_is_told_to_join_again(bench, now, message):
    b = bench("asp", 1)
    b.begin()
    now.at += PATIENCE
    b.hear()
    b.say(0, message)
    assert isinstance(b.answer(0), Again)


def test_a_frozen_worker_is_reported_once_and_only_if_it_stays_silent(bench, now):
    b = bench("asp", 2)
    b.begin()
    now.at += PATIENCE
    b.hear()
    assert b.silent == []
    b.say(0, Ask())  # it woke
    now.at += FROZEN * PATIENCE
    b.hear()
    b.hear()
    assert b.silent == [1]


def test_one_given_up_before_every_contribution_ends_the_run(bench, now):
    b = bench("asp", 1)
    b.begin()
    for _ in range(IN_VAIN - 1):
        now.at += PATIENCE
        b.hear()
        b.say(0, Ask())
        b.answer(0)
        b.enter(0)
    now.at += PATIENCE
    with pytest.raises(RunError, match=r"worker 0 was silent for longer than patience \(10 s\)"):
        b.hear()


def test_a_contribution_between_makes_good_for_silence(bench, now):
    b = bench("asp", 1, samples=240)
    go = b.begin()[0]
    for incarnation in range(1, 3 * IN_VAIN):
        b.push(0, go, incarnation=incarnation)
        b.answer(0)
        now.at += PATIENCE
        b.hear()
        assert b.state(0) == State.LOST
        b.say(0, Ask())
        b.answer(0)
        b.enter(0)
        b.say(0, Pull([]))
        go = b.answer(0)


def test_a_dead_worker_is_lost_at_once(bench):
    b = bench("bsp", 2)
    go = b.begin()
    b.push(0, go[0])
    b.ends[1].close()
    b.hear()
    assert b.state(1) == State.LOST
    assert b.answer(0).version == 1


@pytest.mark.parametrize("discipline", ["bsp", "soft:3"])
def test_what_a_dead_worker_had_contributed_is_kept(bench, discipline):
    """Its successor writes into the same slot while the round is still open."""
    b = bench(discipline, 3)
    go = b.begin()
    slot = b.crew.shared.slots[0].outgoing[0]
    for flat in slot:
        for view in flat.views.values():
            view.fill_(1.0)
    b.push(0, go[0])
    b.ends[0].close()
    b.hear()
    b.connect(0)
    b.enter(0)
    for number in range(3):
        for flat in b.crew.shared.slots[number].outgoing[0]:
            for view in flat.views.values():
                view.fill_(100.0 if number == 0 else 0.0)
    (kept,) = b.store.gathered
    assert all(bool((v == 1.0).all()) for flat in kept.payload for v in flat.views.values())
    assert kept.part.incarnation == 1


def test_a_new_wire_takes_the_place_of_the_old(bench):
    """The new process may be there before the end of the old one has been read."""
    b = bench("bsp", 2)
    go = b.begin()
    b.push(0, go[0])
    b.connect(1)
    assert b.enter(1) == 2
    assert [(r.worker, r.incarnation) for r in b.records.of(Lost)] == [(1, 1)]
    assert [r.incarnation for r in b.records.of(Joined) if r.worker == 1] == [1, 2]


# ---------------------------------------------------------------- rest, wake and the end


def test_the_resting_are_woken_when_leases_come_back(bench):
    b = bench("asp", 2, samples=8)
    go = b.begin()
    b.push(0, go[0])
    assert b.answer(0).leases == []
    b.say(0, Ask())
    assert b.answer(0) == Leased([])
    b.say(0, Rest(0.0, 0.0))
    assert b.quiet(0)
    b.ends[1].close()
    b.hear()
    assert isinstance(b.answer(0), Wake)
    b.say(0, Pull([]))
    assert b.answer(0).leases == go[1].leases


def test_leases_that_came_back_meanwhile_wake_one_that_goes_to_rest(bench):
    b = bench("asp", 2, samples=8)
    go = b.begin()
    b.push(0, go[0])
    b.answer(0)
    b.say(0, Ask())
    assert b.answer(0) == Leased([])
    b.ends[1].close()
    b.hear()
    assert b.quiet(0)  # it is not at rest yet
    b.say(0, Rest(0.0, 0.0))
    assert isinstance(b.answer(0), Wake)


def test_a_resting_worker_may_be_silent_but_not_one_that_was_woken(bench, now):
    b = bench("asp", 2, samples=8)
    go = b.begin()
    b.push(0, go[0])
    b.say(0, Ask())
    b.say(0, Rest(0.0, 0.0))
    now.at += 0.9 * PATIENCE
    b.say(1, Ask())
    now.at += 0.9 * PATIENCE
    b.hear()
    assert b.state(0) == State.RESTING
    now.at += 0.2 * PATIENCE
    b.hear()  # worker 1 is given up, worker 0 woken
    now.at += PATIENCE
    b.hear()
    assert b.state(0) == State.LOST


def test_last_words_are_heard_and_the_dead_are_not_waited_for(bench):
    b = bench("asp", 3)
    b.begin()
    b.ends[0].send(encode(Bye({"peak": 7.0})))
    b.ends[1].close()
    b.ends[2].send(encode(Ask()))  # it asks for more before it hears that it is over
    b.ends[2].send(encode(Bye({"peak": 9.0})))
    b.server.dismiss()
    b.send()
    b.hear()
    assert b.server.words == {0: {"peak": 7.0}, 2: {"peak": 9.0}}
    assert b.server.wires == {}
    assert b.answer(0) == Stop(False)
    assert b.answer(2) == Stop(False)
    assert b.answer(2) is None


def test_one_that_is_started_while_the_server_stops_is_sent_away(bench):
    b = bench("asp", 2)
    b.begin()
    b.ends[1].close()
    b.server.dismiss()
    b.hear()
    b.connect(1)
    assert b.answer(1) == Stop(False)
    b.ends[1].send(encode(Bye({"peak": 1.0})))
    b.hear()
    assert b.server.words == {1: {"peak": 1.0}}


def test_nobody_is_given_up_after_the_end(bench, now):
    b = bench("asp", 1)
    b.begin()
    b.server.dismiss()
    now.at += 2 * PATIENCE
    b.look()
    assert b.state(0) == State.ACTIVE
