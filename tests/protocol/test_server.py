"""The server's protocol message by message: a real store, no input or output, no clock."""

import pytest
import torch

from offbeat.data.lease import Lease
from offbeat.errors import RunError
from offbeat.log.records import Joined, Lost, Pulled, Refused, Updated
from offbeat.protocol.messages import (
    Accepted,
    AskLeases,
    EndRun,
    Go,
    Goodbye,
    Join,
    Leased,
    Leave,
    Pull,
    Rejoin,
    Rest,
    Stop,
    Wake,
    Welcome,
)
from offbeat.protocol.server import FROZEN, IN_VAIN
from offbeat.store.board import Row, State
from tests.protocol.common import PATIENCE, ProtocolDriver

# ---------------------------------------------------------------- the path of a gradient


def test_nobody_begins_before_everybody_is_there():
    d = ProtocolDriver("asp", 2)
    d.connect(0)
    d.connect(1)
    d.enter(0)
    d.say(0, Pull([]))
    assert d.quiet(0)
    d.enter(1)
    go = d.go(0)
    assert (go.version, go.steps, go.leases) == (0, 1, [Lease(0, 0, 4)])
    assert d.quiet(1)


def test_one_that_died_before_it_joined_is_not_waited_for():
    d = ProtocolDriver("asp", 2)
    d.connect(0)
    d.connect(1)
    d.enter(0)
    d.say(0, Pull([]))
    d.die(1)
    assert isinstance(d.answer(0), Go)


def test_a_worker_that_is_replaced_before_the_first_step_gets_one_turn():
    d = ProtocolDriver("asp", 2)
    d.connect(0)
    d.connect(1)
    d.enter(0)
    d.say(0, Pull([]))  # its turn comes when worker 1 is there, but it dies before
    d.connect(0)
    assert d.enter(0) == 2
    d.say(0, Pull([]))
    d.enter(1)
    assert isinstance(d.answer(0), Go)
    assert d.quiet(0)
    assert len(list(d.records.of(Pulled))) == 1


def test_time_stands_still_until_everybody_is_there():
    d = ProtocolDriver("asp", 2)
    d.connect(0)
    d.enter(0)
    d.now += 7.0
    d.connect(1)
    d.enter(1)
    d.say(0, Pull([]))
    d.say(1, Pull([]))
    d.now += 3.0
    d.push(0, 0, d.go(0).leases)
    assert [r.time for r in d.records.of(Joined)] == [0.0, 0.0]
    assert [r.time for r in d.records.of(Updated)] == [3.0]


def test_lock_step_holds_a_worker_until_all_have_contributed():
    d = ProtocolDriver("bsp", 2)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    assert d.quiet(0)
    d.now += 3.0
    d.push(1, 0, go[1].leases)
    first = d.go(0)
    assert first.version == 1
    assert first.waited == pytest.approx(3.0)
    assert d.go(1).waited == pytest.approx(0.0)


def test_what_the_store_itself_takes_is_not_waiting():
    """The driver asks again what time it is before it lets anybody proceed."""
    d = ProtocolDriver("asp", 1)
    leases = d.begin()[0].leases
    push = d.store.push

    def takes_long(contribution, now):
        d.now += 5.0
        return push(contribution, now)

    d.store.push = takes_long
    d.push(0, 0, leases)
    assert d.go(0).waited == pytest.approx(0.0)


def test_a_push_alone_is_answered_at_once():
    d = ProtocolDriver("downpour:2,3", 1)
    leases = d.begin()[0].leases
    d.say(0, AskLeases())
    assert isinstance(d.answer(0), Leased)
    d.push(0, 0, leases[:2], pull=False)
    assert isinstance(d.answer(0), Accepted)


def test_a_push_alone_lets_go_on_who_waits_for_it():
    d = ProtocolDriver("ssp:0", 2)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    assert d.quiet(0)
    d.push(1, 0, go[1].leases, pull=False)
    assert isinstance(d.answer(1), Accepted)
    assert d.go(0).version == 2


def test_leases_ahead_come_with_the_answer():
    d = ProtocolDriver("asp", 1, ahead=2)
    go = d.begin()[0]
    assert len(go.leases) == 3
    d.push(0, 0, go.leases[:1])
    assert d.go(0).leases == [Lease(0, 12, 16)]


def test_what_is_pushed_is_applied():
    d = ProtocolDriver("asp", 1)
    leases = d.begin()[0].leases
    assert d.store.parameters is not None
    before = [t.clone() for flat in d.store.parameters.flats for t in flat.views.values()]
    d.fill(0, 1.0)
    d.push(0, 0, leases)
    after = [t for flat in d.store.parameters.flats for t in flat.views.values()]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old - 0.05)
    assert d.store.applied == 4


def test_a_repeated_push_counts_once_and_has_one_answer():
    d = ProtocolDriver("asp", 1)
    leases = d.begin()[0].leases
    d.push(0, 0, leases)
    d.repeat(0, 0, leases)
    assert d.go(0).version == 1
    assert d.quiet(0)
    assert d.store.applied == 4


def test_one_whose_push_is_repeated_is_still_given_up_when_it_falls_silent():
    d = ProtocolDriver("asp", 1)
    leases = d.begin()[0].leases
    d.push(0, 0, leases)
    d.repeat(0, 0, leases)
    d.now += PATIENCE
    d.look()
    assert d.state(0) == State.LOST


def test_a_held_worker_whose_push_is_repeated_may_still_be_silent():
    d = ProtocolDriver("bsp", 2)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    d.repeat(0, 0, go[0].leases)
    for _ in range(3):
        d.now += 0.9 * PATIENCE
        d.say(1, AskLeases())
    assert d.state(0) == State.ACTIVE
    assert d.quiet(0)


@pytest.mark.parametrize("noticed", [True, False])
def test_what_an_earlier_incarnation_computed_is_not_told_of_the_next(noticed):
    """It died while others held it up, and with it the step that it was about."""
    d = ProtocolDriver("bsp", 2, ahead=1)
    go = d.begin()
    d.push(0, 0, go[0].leases[:1], ahead=go[0].leases[1:])
    assert d.quiet(0)
    if noticed:
        d.die(0)
    d.connect(0)
    assert d.enter(0) == 2
    d.say(0, Pull([]))
    d.push(1, 0, go[1].leases[:1])
    d.go(0)
    last = [record for record in d.records.of(Pulled) if record.worker == 0][-1]
    assert last.leases == []


# ---------------------------------------------------------------- the silent and the dead


def test_a_silent_worker_is_given_up_after_patience_and_not_before():
    d = ProtocolDriver("bsp", 2, why="it waits for its disk")
    go = d.begin()
    d.push(0, 0, go[0].leases)
    assert d.protocol.next_deadline(d.now, lambda worker: False) == d.now + PATIENCE
    d.now += PATIENCE - 0.1
    d.look()
    assert d.state(1) == State.ACTIVE
    d.now += 0.2
    d.look()
    assert d.state(1) == State.LOST
    lost = next(d.records.of(Lost))
    assert (lost.worker, lost.leases, lost.why) == (1, go[1].leases, "it waits for its disk")
    assert d.go(0).leases == go[1].leases  # before anything new


def test_a_held_worker_may_be_silent_for_ever():
    d = ProtocolDriver("bsp", 2)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    for _ in range(3):  # worker 1 gives signs of life, worker 0 has nothing to say
        d.now += 0.9 * PATIENCE
        d.say(1, AskLeases())
        assert isinstance(d.answer(1), Leased)
    assert d.state(0) == State.ACTIVE


def test_what_was_said_in_time_counts_although_it_is_heard_late():
    """Somebody stopped the server, not the worker."""
    d = ProtocolDriver("asp", 1)
    leases = d.begin()[0].leases
    d.unheard.add(0)
    spoken = d.unheard.__contains__
    assert d.protocol.next_deadline(d.now, spoken) == d.now + PATIENCE
    d.now += 5 * PATIENCE
    assert d.protocol.next_deadline(d.now, spoken) is None  # nobody looks again for its sake
    d.look()
    assert d.state(0) == State.ACTIVE
    d.unheard.clear()
    d.push(0, 0, leases)
    assert d.state(0) == State.ACTIVE
    assert d.store.version == 1


def test_what_is_said_to_a_silent_worker_is_no_sign_of_life():
    d = ProtocolDriver("asp", 2, samples=8)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    d.go(0)
    d.say(0, AskLeases())
    d.say(0, Rest(0.0, 0.0))
    d.protocol.silent_since(0, d.now)  # its machine is known to stand still
    d.now += 0.5 * PATIENCE
    d.die(1)  # its leases wake worker 0
    assert isinstance(d.told[0][-1], Wake)
    d.now += 0.5 * PATIENCE
    d.look()
    assert d.state(0) == State.LOST


def test_one_that_nothing_gets_through_to_has_patience_to_come_back():
    d = ProtocolDriver("bsp", 2)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    d.protocol.unreachable(0, d.now)  # though it is not its turn
    d.now += 0.9 * PATIENCE
    d.push(1, 0, go[1].leases)
    assert d.quiet(0)
    d.now += 0.1 * PATIENCE
    d.look()
    assert d.state(0) == State.LOST
    assert d.state(1) == State.ACTIVE


def test_one_that_wakes_is_refused_and_joins_again():
    d = ProtocolDriver("asp", 2)
    go = d.begin()
    d.now += PATIENCE
    d.unheard.add(0)
    d.look()
    d.unheard.clear()
    d.push(0, 0, go[0].leases)
    d.answer(0)
    assert d.state(1) == State.LOST
    d.push(1, 0, go[1].leases)
    assert isinstance(d.answer(1), Rejoin)
    refused = next(d.records.of(Refused))
    assert (refused.worker, refused.incarnation, refused.sequence) == (1, 1, 0)
    assert d.enter(1) == 2
    d.say(1, Pull([]))
    assert isinstance(d.answer(1), Go)
    applied = [part for r in d.records.of(Updated) for part in r.parts]
    assert [part.worker for part in applied] == [0]


@pytest.mark.parametrize(
    "message", [Pull([]), AskLeases(), Rest(0.0, 0.0)], ids=lambda m: str(m)[:4]
)
def test_whatever_one_that_wakes_says_it_is_told_to_join_again(message):
    d = ProtocolDriver("asp", 1)
    d.begin()
    d.now += PATIENCE
    d.look()
    d.say(0, message)
    assert isinstance(d.answer(0), Rejoin)


def test_a_frozen_worker_is_reported_once_and_only_if_it_stays_silent():
    d = ProtocolDriver("asp", 2)
    d.begin()
    d.now += PATIENCE
    d.look()
    assert d.protocol.take_silent() == []
    d.say(0, AskLeases())  # it woke
    d.now += FROZEN * PATIENCE
    d.look()
    d.look()
    assert d.protocol.take_silent() == [1]
    assert d.protocol.take_silent() == []


def test_one_given_up_before_every_contribution_ends_the_run():
    d = ProtocolDriver("asp", 1)
    d.begin()
    for _ in range(IN_VAIN - 1):
        d.now += PATIENCE
        d.look()
        d.say(0, AskLeases())
        d.answer(0)
        d.enter(0)
    d.now += PATIENCE
    with pytest.raises(RunError, match=r"worker 0 was silent for longer than patience \(10 s\)"):
        d.look()


def test_a_contribution_between_makes_good_for_silence():
    d = ProtocolDriver("asp", 1, samples=240)
    go = d.begin()[0]
    for incarnation in range(1, 3 * IN_VAIN):
        d.push(0, go.version, go.leases, incarnation=incarnation)
        d.answer(0)
        d.now += PATIENCE
        d.look()
        assert d.state(0) == State.LOST
        d.say(0, AskLeases())
        d.answer(0)
        d.enter(0)
        d.say(0, Pull([]))
        go = d.go(0)


def test_what_an_earlier_incarnation_pushed_is_refused():
    d = ProtocolDriver("asp", 1)
    leases = d.begin()[0].leases
    d.connect(0)
    assert d.enter(0) == 2
    d.push(0, 0, leases, incarnation=1)
    assert d.answer(0) == Rejoin()
    assert d.store.applied == 0
    d.now += PATIENCE
    d.look()
    assert d.state(0) == State.LOST


def test_a_dead_worker_is_lost_at_once():
    d = ProtocolDriver("bsp", 2)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    d.die(1)
    assert d.state(1) == State.LOST
    assert d.go(0).version == 1


@pytest.mark.parametrize("discipline", ["bsp", "soft:3"])
def test_what_a_dead_worker_had_contributed_is_kept(discipline):
    """Its successor writes into the same buffers while the round is still open."""
    d = ProtocolDriver(discipline, 3)
    go = d.begin()
    d.fill(0, 1.0)
    d.push(0, 0, go[0].leases)
    d.die(0)
    d.connect(0)
    d.enter(0)
    for worker in range(3):
        d.fill(worker, 100.0 if worker == 0 else 0.0)
    (kept,) = d.store.gathered
    assert kept.payload is not None
    assert all(bool((v == 1.0).all()) for flat in kept.payload for v in flat.views.values())
    assert kept.part.incarnation == 1


def test_one_that_joins_again_before_its_end_was_noticed_is_another_incarnation():
    """The new process may be there before the end of the old one has been seen."""
    d = ProtocolDriver("bsp", 2)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    d.connect(1)
    assert d.enter(1) == 2
    assert [(r.worker, r.incarnation) for r in d.records.of(Lost)] == [(1, 1)]
    assert [r.incarnation for r in d.records.of(Joined) if r.worker == 1] == [1, 2]


def test_one_that_joins_again_holds_up_nobody_who_waited_for_its_earlier_incarnation():
    d = ProtocolDriver("ssp:0", 2)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    assert d.quiet(0)
    d.connect(1)
    d.enter(1)
    assert d.go(0).version == 1


# ---------------------------------------------------------------- rest, wake and the end


def test_the_resting_are_woken_when_leases_come_back():
    d = ProtocolDriver("asp", 2, samples=8)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    assert d.go(0).leases == []
    d.say(0, AskLeases())
    assert d.answer(0) == Leased([])
    d.say(0, Rest(0.0, 0.0))
    assert d.quiet(0)
    d.die(1)
    assert isinstance(d.answer(0), Wake)
    d.say(0, Pull([]))
    assert d.go(0).leases == go[1].leases


def test_the_resting_are_woken_when_one_joins_again_before_its_end_was_noticed():
    d = ProtocolDriver("asp", 2, samples=8)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    d.answer(0)
    d.say(0, Rest(0.0, 0.0))
    d.connect(1)
    d.enter(1)
    assert isinstance(d.answer(0), Wake)


def test_leases_that_came_back_meanwhile_wake_one_that_goes_to_rest():
    d = ProtocolDriver("asp", 2, samples=8)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    d.answer(0)
    d.say(0, AskLeases())
    assert d.answer(0) == Leased([])
    d.die(1)
    assert d.quiet(0)  # it is not at rest yet
    d.say(0, Rest(0.0, 0.0))
    assert isinstance(d.answer(0), Wake)


def test_a_resting_worker_may_be_silent_but_not_one_that_was_woken():
    d = ProtocolDriver("asp", 2, samples=8)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    d.say(0, AskLeases())
    d.say(0, Rest(0.0, 0.0))
    d.now += 0.9 * PATIENCE
    d.say(1, AskLeases())
    d.now += 0.9 * PATIENCE
    d.look()
    assert d.state(0) == State.RESTING
    d.now += 0.2 * PATIENCE
    d.look()  # worker 1 is given up, worker 0 woken
    d.now += PATIENCE
    d.look()
    assert d.state(0) == State.LOST


def test_one_whose_script_leaves_its_loop_is_not_lost_and_the_others_go_on():
    d = ProtocolDriver("bsp", 2)
    go = d.begin()
    d.push(0, 0, go[0].leases)
    d.say(1, Leave())
    assert d.state(1) == State.LEFT
    assert d.go(0).leases == go[1].leases
    assert not list(d.records.of(Lost))
    assert not d.protocol.ended


def test_a_run_has_ended_when_every_script_has_left_and_said_goodbye():
    d = ProtocolDriver("asp", 2)
    d.begin()
    for worker in range(2):
        d.say(worker, Leave())
        assert not d.protocol.ended
        d.say(worker, Goodbye({}))
    assert d.protocol.ended


def test_one_script_may_end_the_run_for_all():
    d = ProtocolDriver("asp", 2)
    d.begin()
    d.say(1, EndRun())
    assert d.protocol.ended
    assert d.protocol.ended_by == 1
    d.dismiss()
    assert [d.answer(worker) for worker in range(2)] == [Stop(True)] * 2


def test_last_words_are_heard_and_the_dead_are_not_waited_for():
    d = ProtocolDriver("asp", 3)
    d.begin()
    d.dismiss()
    d.say(0, Goodbye({"peak": 7.0}))
    d.die(1)
    d.say(2, AskLeases())  # it asks for more before it hears that it is over
    d.say(2, Goodbye({"peak": 9.0}))
    assert d.protocol.goodbyes == {0: {"peak": 7.0}, 2: {"peak": 9.0}}
    assert d.protocol.connected == set()
    for worker in (0, 2):
        assert d.answer(worker) == Stop(False)
        assert d.quiet(worker)
    assert not list(d.records.of(Lost))


def test_one_that_is_started_while_the_server_stops_is_sent_away():
    d = ProtocolDriver("asp", 2)
    d.begin()
    d.dismiss()
    d.die(1)
    d.connect(1)
    assert d.answer(1) == Stop(False)
    d.say(1, Goodbye({"peak": 1.0}))
    assert d.protocol.goodbyes == {1: {"peak": 1.0}}


def test_nobody_is_given_up_after_the_end():
    d = ProtocolDriver("asp", 1)
    d.begin()
    d.dismiss()
    d.now += 2 * PATIENCE
    d.look()
    assert d.state(0) == State.ACTIVE


def test_one_that_comes_back_after_its_goodbye_is_a_new_incarnation():
    d = ProtocolDriver("asp", 1)
    d.begin()
    d.say(0, Leave())
    d.say(0, Goodbye({"peak": 1.0}))
    d.connect(0)
    d.say(0, Join())
    assert d.answer(0) == Welcome(2)
    assert d.protocol.goodbyes == {}
    assert d.store.cells[Row.INCARNATION, 0] == 2
