"""The server of workers who add up among themselves, message by message."""

from collections import deque

import pytest

import offbeat as ob
from offbeat.data.lease import Leases
from offbeat.errors import RunError
from offbeat.log.log import Log
from offbeat.log.records import Joined, Lost, Part, Updated
from offbeat.protocol.allreduce import ATTEMPTS, AllreduceProtocol, ParametersLost
from offbeat.protocol.messages import (
    Applied,
    ApplyMean,
    AskLeases,
    Go,
    GroupFailed,
    HasMean,
    Join,
    Leased,
    Ping,
    Pong,
    Pull,
    Push,
    Rejoin,
    Rest,
    Seen,
    Show,
    Shown,
    StartRound,
    Wake,
    Welcome,
)
from offbeat.protocol.server import ServerSettings
from offbeat.store.cost_only import CostOnlyParameters
from offbeat.store.store import Store
from offbeat.worker.contribution import Contribution
from tests.contract.common import Records

PATIENCE = 10.0


class NotedCopies:
    """Notes whose parameters count; None are the store's own."""

    distant, here = False, True

    def __init__(self):
        self.looked_at = None
        self.taken_over = 0
        self.nobodys = set()

    def look_at(self, worker):
        self.looked_at = worker

    def looks_at(self, worker):
        return self.looked_at == worker

    def take_over(self):
        self.taken_over += 1
        self.looked_at = None
        return True

    def lacking(self, nobodys):
        self.nobodys = nobodys


class AllreduceDriver:
    """Delivers what workers say, and keeps what each is told; time passes when the test says so."""

    def __init__(self, workers=2, samples=40, discipline="bsp"):
        self.records = Records()
        log = Log()
        log.listeners.append(self.records)
        self.store = Store(
            ob.parse(discipline), workers, Leases(samples, 4, 1), log, CostOnlyParameters()
        )
        self.copies, self.secrets = NotedCopies(), 0
        self.protocol = AllreduceProtocol(
            self.store, workers, ServerSettings(PATIENCE), lambda w: "", self.copies, self.secret
        )
        self.now = 100.0
        self.told = [deque() for _ in range(workers)]
        self.sequence = [-1] * workers
        self.incarnation = [0] * workers

    def secret(self):
        self.secrets += 1
        return b"%d" % self.secrets

    def say(self, worker, message, contribution=None):
        self.protocol.receive(worker, message, contribution, self.now)
        self.go_on()

    def go_on(self):
        while self.protocol.proceed(self.now):
            pass
        for worker, message, _ in self.protocol.take():
            self.told[worker].append(message)

    def look(self):
        self.protocol.look(self.now, lambda worker: False)
        self.go_on()

    def die(self, worker):
        self.protocol.gone(worker, self.now)
        self.go_on()

    def connect(self, worker):
        self.told[worker].clear()
        self.protocol.disconnect(worker)
        self.protocol.connect(worker, self.now)
        self.go_on()

    def join(self, worker):
        self.connect(worker)
        self.say(worker, Join())

    def welcomed(self, worker):
        found = self.told[worker].popleft()
        assert isinstance(found, Welcome), found
        self.sequence[worker], self.incarnation[worker] = -1, found.incarnation
        self.say(worker, Pull([]))

    def begin(self):
        """Everybody joins and pulls; returns what they were told."""
        workers = range(len(self.told))
        for worker in workers:
            self.join(worker)
        for worker in workers:
            self.welcomed(worker)
        return {worker: self.take(worker, Go) for worker in workers}

    def take(self, worker, kind):
        found = self.told[worker].popleft()
        assert isinstance(found, kind), found
        return found

    def push(self, worker, go, skipped=False, lacking=(), absent=()):
        self.sequence[worker] += 1
        return self.repeat(worker, go, skipped, lacking, absent)

    def repeat(self, worker, go, skipped=False, lacking=(), absent=()):
        leases = go.leases[: go.steps]
        samples = sum(lease.samples for lease in leases)
        part = Part(
            worker, self.incarnation[worker], self.sequence[worker], go.version, leases, samples,
            skipped=skipped,
        )  # fmt: skip
        push = Push(part, True, [], list(absent), lacking=list(lacking))
        self.say(worker, push, Contribution(part))

    def add_up(self, go):
        """All of a round push and have the mean; all are told to apply it."""
        for worker, found in go.items():
            self.push(worker, found)
        for worker, found in go.items():
            self.say(worker, HasMean(found.start.attempt))
        return {worker: self.take(worker, ApplyMean) for worker in go}


# ---------------------------------------------------------------- a round


def test_a_round_is_a_version_when_all_have_applied_it():
    d = AllreduceDriver()
    go = d.begin()
    assert go[0].start == go[1].start
    assert go[0].start.members == [(0, 4), (1, 4)]
    assert all(found.fresh for found in go.values())
    d.add_up(go)
    d.say(0, Applied())
    assert d.store.version == 0
    assert not d.protocol.settle()
    d.say(1, Applied())
    assert d.store.version == 1
    assert d.copies.looked_at == 0
    following = {worker: d.take(worker, Go) for worker in range(2)}
    assert not any(found.fresh for found in following.values())
    assert following[0].start.attempt == go[0].start.attempt + 1
    assert following[0].start.group == go[0].start.group  # the same members stay connected


def test_nobody_applies_before_all_have_the_mean():
    d = AllreduceDriver()
    go = d.begin()
    d.push(0, go[0])
    d.push(1, go[1])
    d.say(0, HasMean(1))
    assert not d.told[0]
    assert d.protocol.settle()
    d.say(1, HasMean(1))
    assert isinstance(d.told[0][0], ApplyMean)


def test_the_mean_of_an_earlier_attempt_does_not_count():
    d = AllreduceDriver()
    go = d.begin()
    d.push(0, go[0])
    d.push(1, go[1])
    d.say(0, GroupFailed(1, "broken"))
    assert d.take(0, StartRound) == d.take(1, StartRound)
    d.say(0, HasMean(1))
    d.say(1, HasMean(1))
    assert not d.told[0]
    d.say(0, HasMean(2))
    d.say(1, HasMean(2))
    assert isinstance(d.take(0, ApplyMean), ApplyMean)


def test_what_is_not_finite_is_left_out_of_the_sum():
    d = AllreduceDriver()
    go = d.begin()
    d.push(0, go[0], skipped=True)
    d.push(1, go[1])
    start = d.take(0, StartRound)
    assert start.members == [(0, 0), (1, 4)]
    assert d.take(1, StartRound) == start
    d.say(0, HasMean(1))
    d.say(1, HasMean(1))
    assert not d.told[0]
    d.say(0, HasMean(start.attempt))
    d.say(1, HasMean(start.attempt))
    assert d.take(0, ApplyMean).live


def test_nothing_is_applied_where_nothing_is_finite():
    d = AllreduceDriver(1)
    go = d.begin()
    d.push(0, go[0], skipped=True)
    d.say(0, HasMean(d.take(0, StartRound).attempt))
    assert d.take(0, ApplyMean) == ApplyMean([], False, {})
    d.say(0, Applied())
    assert d.store.version == 1
    assert d.store.applied == 0


def test_parameters_without_a_gradient_are_those_that_no_worker_had_one_for():
    d = AllreduceDriver()
    go = d.begin()
    d.push(0, go[0], absent=["a", "b"])
    d.push(1, go[1], absent=["b", "c"])
    d.say(0, HasMean(1))
    d.say(1, HasMean(1))
    assert d.take(0, ApplyMean).absent == ["b"]


def test_local_state_that_some_lack_is_the_mean_over_those_who_have_it():
    d = AllreduceDriver(samples=42)
    go = d.begin()
    d.push(0, go[0], lacking=[0, 1])
    d.push(1, go[1], lacking=[1])
    d.say(0, HasMean(1))
    d.say(1, HasMean(1))
    assert d.take(0, ApplyMean).lifts == {0: 2.0}
    assert d.copies.nobodys == {1}


def test_one_without_samples_gets_none_in_the_middle_of_a_round():
    d = AllreduceDriver(samples=4)
    go = d.begin()
    assert go[1].start is None
    d.say(1, AskLeases())
    assert d.take(1, Leased) == Leased([])


def test_a_repeated_push_counts_once_whenever_it_comes():
    d = AllreduceDriver()
    go = d.begin()
    d.push(0, go[0])
    d.repeat(0, go[0])
    assert not d.protocol.round.whole
    d.push(1, go[1])
    for worker in range(2):
        d.say(worker, HasMean(1))
        d.repeat(worker, go[worker])
    for worker in range(2):
        d.take(worker, ApplyMean)
        d.say(worker, Applied())
    d.repeat(0, go[0])  # the next round is under way
    assert d.protocol.round.pushed == {}
    assert d.store.applied == 8
    assert len(list(d.records.of(Updated))) == 1


def test_one_whose_push_is_repeated_is_still_given_up_when_it_falls_silent():
    d = AllreduceDriver(1)
    go = d.begin()
    d.add_up(go)
    d.say(0, Applied())
    d.take(0, Go)
    d.repeat(0, go[0])
    d.now += PATIENCE
    d.look()
    assert [record.worker for record in d.records.of(Lost)] == [0]


# ---------------------------------------------------------------- who comes, and who dies


def test_without_one_who_dies_the_others_add_up_again_in_a_new_group():
    d = AllreduceDriver(3)
    go = d.begin()
    for worker in range(3):
        d.push(worker, go[worker])
    d.say(0, HasMean(1))
    d.die(2)
    start = d.take(0, StartRound)
    assert start.members == [(0, 4), (1, 4)]
    assert (start.attempt, start.group) == (2, 2)
    assert d.secrets == 2
    d.say(0, HasMean(2))
    d.say(1, HasMean(2))
    assert isinstance(d.take(0, ApplyMean), ApplyMean)


def test_those_who_are_left_are_watched_though_the_dead_one_had_not_contributed():
    d = AllreduceDriver(3)
    go = d.begin()
    d.push(0, go[0])
    d.push(1, go[1])
    d.die(2)
    assert d.protocol.deadline == {0: d.now + PATIENCE / 2, 1: d.now + PATIENCE / 2}


def test_one_that_dies_while_all_apply_has_contributed_all_the_same():
    d = AllreduceDriver(3)
    go = d.begin()
    d.add_up(go)
    d.say(1, Applied())
    d.die(0)
    assert d.store.version == 0
    d.say(2, Applied())
    assert d.store.version == 1
    assert d.store.applied == 12
    assert d.copies.looked_at == 1  # the smallest that lives
    assert [record.worker for record in d.records.of(Lost)] == [0]


def test_a_successor_that_joins_while_all_apply_is_welcomed_after_it():
    d = AllreduceDriver()
    go = d.begin()
    d.add_up(go)
    d.die(0)
    d.join(0)
    assert not d.told[0]
    d.say(1, Applied())
    assert d.take(0, Welcome) == Welcome(2)


def test_one_that_was_given_up_while_all_apply_and_lives_has_to_join_again():
    d = AllreduceDriver()
    go = d.begin()
    d.add_up(go)
    d.now += 0.6 * PATIENCE
    d.say(1, Pong())
    d.now += 0.4 * PATIENCE
    d.look()
    assert d.protocol.round.buried == {0: ""}
    d.say(0, Applied())
    assert d.take(0, Rejoin) == Rejoin()
    d.say(0, Join())
    d.say(1, Applied())
    assert d.take(0, Welcome) == Welcome(2)


def test_when_all_die_while_they_apply_the_parameters_are_lost():
    d = AllreduceDriver()
    d.add_up(d.begin())
    d.die(0)
    with pytest.raises(ParametersLost):
        d.die(1)


def test_one_that_comes_waits_for_the_round_to_be_over_and_gets_what_the_others_hold():
    d = AllreduceDriver()
    go = d.begin()
    d.die(1)
    d.push(0, go[0])
    start = d.take(0, StartRound)
    d.join(1)
    d.connect(1)  # an earlier process of it waited
    d.say(1, Join())
    assert not d.told[1]
    d.say(0, HasMean(start.attempt))
    d.take(0, ApplyMean)
    d.say(0, Applied())
    d.welcomed(1)
    assert d.take(1, Go).fresh
    assert not d.take(0, Go).fresh
    assert [r.incarnation for r in d.records.of(Joined) if r.worker == 1] == [1, 2]


def test_one_that_waits_to_join_is_welcomed_when_the_only_member_dies():
    d = AllreduceDriver()
    d.begin()
    d.die(1)
    d.join(1)
    assert not d.told[1]
    d.die(0)
    assert d.take(1, Welcome) == Welcome(2)


def test_one_that_joins_again_between_two_rounds_is_in_a_new_group():
    """The members are the same by their numbers, but one of them is connected to nobody."""
    d = AllreduceDriver()
    go = d.begin()
    d.add_up(go)
    d.die(0)
    d.join(0)
    d.say(1, Applied())
    d.welcomed(0)
    start = d.take(0, Go).start
    assert start.members == go[0].start.members
    assert start.group == go[0].start.group + 1


def test_what_a_lost_worker_holds_counts_no_more():
    d = AllreduceDriver(3)
    go = d.begin()
    d.add_up(go)
    for worker in range(3):
        d.say(worker, Applied())
    assert d.copies.looked_at == 0
    d.die(0)
    assert d.copies.looked_at == 1
    d.die(1)
    d.die(2)
    assert d.copies.looked_at is None
    assert d.copies.taken_over == 1
    d.join(0)
    d.welcomed(0)
    assert d.take(0, Go).fresh


def test_a_round_is_not_over_before_one_without_samples_has_gone_to_rest():
    """The store would wait for it, and others be woken meanwhile."""
    d = AllreduceDriver(3, samples=8)
    go = d.begin()
    assert go[2].start is None
    d.add_up({worker: go[worker] for worker in range(2)})
    d.say(0, Applied())
    d.say(1, Applied())
    assert d.store.version == 0
    d.say(2, AskLeases())
    d.say(2, Rest(0.0, 0.0))
    assert d.store.version == 1
    assert d.store.finished


@pytest.mark.parametrize("how", ["dies", "joins again"])
def test_or_is_gone(how):
    d = AllreduceDriver(3, samples=8)
    go = d.begin()
    d.add_up({worker: go[worker] for worker in range(2)})
    d.say(0, Applied())
    d.say(1, Applied())
    if how == "dies":
        d.die(2)
    else:
        d.join(2)
    assert d.store.version == 1


def test_the_resting_are_woken_between_two_rounds():
    d = AllreduceDriver(3, samples=8)
    go = d.begin()
    d.say(2, AskLeases())
    d.take(2, Leased)
    d.say(2, Rest(0.0, 0.0))
    d.die(1)
    assert not d.told[2]  # the round is under way
    d.push(0, go[0])
    d.say(0, HasMean(d.take(0, StartRound).attempt))
    d.take(0, ApplyMean)
    d.say(0, Applied())
    assert d.take(2, Wake) == Wake()


# ---------------------------------------------------------------- patience while adding up


def test_the_silent_are_asked_after_half_of_patience_and_given_up_after_the_other_half():
    d = AllreduceDriver()
    go = d.begin()
    d.push(0, go[0])
    d.push(1, go[1])
    d.now += PATIENCE / 2
    d.look()
    assert isinstance(d.take(0, Ping), Ping)
    assert isinstance(d.take(1, Ping), Ping)
    d.say(0, Pong())
    d.now += PATIENCE / 2
    d.look()
    assert [record.worker for record in d.records.of(Lost)] == [1]
    assert d.take(0, Ping) == Ping()
    assert d.take(0, StartRound).members == [(0, 4)]


def test_groups_that_fail_again_and_again_give_one_who_is_silent_no_more_time():
    d = AllreduceDriver()
    go = d.begin()
    d.push(0, go[0])
    d.push(1, go[1])
    for group in range(1, 7):
        d.say(0, GroupFailed(group, "worker 1 does not answer"))
        d.now += PATIENCE / 5
        d.look()
    assert [record.worker for record in d.records.of(Lost)] == [1]


def test_one_that_was_asked_before_has_all_of_patience_to_apply():
    d = AllreduceDriver()
    go = d.begin()
    d.push(0, go[0])
    d.push(1, go[1])
    d.now += PATIENCE / 2
    d.look()  # both are asked
    d.say(0, Pong())
    d.say(0, HasMean(1))
    d.say(1, HasMean(1))
    assert d.protocol.deadline == {0: d.now + PATIENCE, 1: d.now + PATIENCE}


def test_a_late_word_of_a_failed_group_is_no_leave_to_fall_silent():
    d = AllreduceDriver()
    go = d.begin()
    d.add_up(go)
    d.say(0, GroupFailed(1, "broken"))  # it had the mean already
    d.say(1, Applied())
    d.now += PATIENCE
    d.look()
    assert [record.worker for record in d.records.of(Lost)] == [0]


def test_a_group_that_never_adds_up_ends_the_run():
    d = AllreduceDriver()
    go = d.begin()
    d.push(0, go[0])
    d.push(1, go[1])
    for group in range(1, ATTEMPTS + 3):
        d.say(0, GroupFailed(group, "no route"))
    with pytest.raises(RunError, match=r"cannot add up, after 11 attempts \(no route\)"):
        d.say(0, GroupFailed(ATTEMPTS + 3, "no route"))


# ---------------------------------------------------------------- workers on other hosts


class DistantNotes(NotedCopies):
    """Copies that a worker has to show; the store begins with one of its own."""

    distant = True

    def __init__(self):
        super().__init__()
        self.shown, self.hash = [], None

    def look_at(self, worker):
        self.here = False

    def looks_at(self, worker):
        return not self.here

    def take_over(self):
        return False

    def take(self, worker):
        self.here = True
        self.shown.append(worker)

    def told(self, hash):
        self.hash = hash


def distant(workers=2, **what):
    d = AllreduceDriver(workers, **what)
    d.copies = d.protocol.copies = DistantNotes()
    return d


def applied(d, go, hash="12"):
    """A whole round; returns the next turns."""
    d.add_up(go)
    for worker in go:
        d.say(worker, Applied(hash))
    return {worker: d.take(worker, Go) for worker in go}


def test_what_is_to_be_tested_is_asked_of_one_that_holds_it():
    d = distant()
    go = d.begin()
    assert d.protocol.settle()  # the store began it
    applied(d, go)
    assert not d.protocol.settle()
    assert not d.protocol.settle()  # and nobody is asked twice
    d.go_on()
    assert d.take(0, Show).version == 1
    assert not d.told[1]
    d.say(0, Shown(1))
    d.take(0, Seen)
    assert d.copies.shown == [0]
    assert d.protocol.settle()


def test_what_is_about_to_be_shown_does_not_change():
    """Nor is a copy of it out of date as soon as it has come: it can be looked at meanwhile."""
    d = distant()
    go = applied(d, d.begin())
    assert not d.protocol.settle()
    d.go_on()
    for worker, found in go.items():
        d.push(worker, found)
    d.take(0, Show)
    for worker in go:
        d.say(worker, HasMean(go[0].start.attempt))
    assert not d.told[1]
    d.say(0, Shown(1))
    d.take(0, Seen)
    assert all(isinstance(d.take(worker, ApplyMean), ApplyMean) for worker in go)
    assert d.protocol.settle()
    d.say(0, Applied("34"))
    assert d.protocol.settle()
    d.say(1, Applied("34"))
    assert not d.protocol.settle()


def test_what_is_shown_too_late_is_not_taken():
    d = distant()
    go = applied(d, d.begin())
    applied(d, go)
    d.say(1, Shown(1))
    d.take(1, Seen)
    assert d.copies.shown == []
    d.say(1, Shown(2))
    assert d.copies.shown == [1]


def test_when_one_that_was_asked_dies_another_is_asked():
    d = distant(3, samples=200)
    go = applied(d, d.begin())
    assert not d.protocol.settle()
    d.go_on()
    d.take(0, Show)
    for worker, found in go.items():
        d.push(worker, found)
    d.die(0)
    assert not d.protocol.settle()
    d.go_on()
    assert [type(m) for m in d.told[1]] == [StartRound, Show]
    d.say(1, Shown(1))
    assert d.protocol.settle()


def test_one_that_is_asked_and_silent_is_given_up():
    d = distant()
    applied(d, d.begin())
    assert not d.protocol.settle()
    d.go_on()
    d.take(0, Show)
    d.now += PATIENCE / 2
    d.say(1, Pong())
    d.now += PATIENCE / 2
    d.look()
    assert [lost.worker for lost in d.records.of(Lost)] == [0]


def test_one_that_joins_gets_what_another_has_shown():
    d = distant(3, samples=200)
    go = applied(d, d.begin())
    d.join(2)  # its earlier process is lost with that
    for worker in (0, 1):
        d.take(worker, StartRound)
        d.push(worker, go[worker])
    for worker in (0, 1):
        d.say(worker, HasMean(d.protocol.attempt))
    for worker in (0, 1):
        d.take(worker, ApplyMean)
        d.say(worker, Applied("56"))
    d.welcomed(2)
    assert d.take(0, Show).version == 2
    assert not d.told[2]
    d.say(0, Shown(2))
    d.take(0, Seen)
    turns = {worker: d.take(worker, Go) for worker in range(3)}
    assert [turns[worker].fresh for worker in range(3)] == [False, False, True]


def test_without_anybody_who_holds_it_everything_is_lost():
    d = distant()
    applied(d, d.begin())
    d.die(0)
    with pytest.raises(ParametersLost):
        d.die(1)


def test_what_has_been_shown_outlives_its_worker():
    d = distant()
    applied(d, d.begin())
    d.say(0, Shown(1))
    d.die(0)
    d.die(1)
    assert d.protocol.settle()


def test_the_hash_of_a_version_is_said_by_those_who_hold_it():
    d = distant()
    go = d.begin()
    assert all(order.hashed for order in d.add_up(go).values())
    d.say(0, Applied("ab"))
    assert d.copies.hash is None
    d.say(1, Applied("ab"))
    assert d.copies.hash == "ab"


def test_workers_that_hold_different_parameters_end_the_run():
    d = distant()
    d.add_up(d.begin())
    d.say(0, Applied("ab"))
    with pytest.raises(RunError, match="workers 0 and 1 hold different parameters at version 1"):
        d.say(1, Applied("cd"))


def test_one_that_the_others_cannot_reach_ends_the_run():
    """One that is dead has been given up by then, and what is reached in between counts."""
    d = distant(3)
    go = d.begin()
    for worker in range(3):
        d.push(worker, go[worker])

    def failed():
        d.say(1, GroupFailed(d.protocol.group, "worker 1 cannot reach worker 0", 0))

    failed()
    failed()
    d.say(1, HasMean(d.protocol.attempt))
    failed()
    failed()
    with pytest.raises(RunError, match="reach worker 0, and via='allreduce' needs workers that"):
        failed()


def test_one_whose_way_has_just_been_alive_is_asked_all_the_same():
    """Else the time for that would come on top of patience."""
    d = distant()
    go = d.begin()
    for worker, found in go.items():
        d.push(worker, found)
    d.now += PATIENCE / 2
    d.protocol.look(d.now, lambda worker: True)
    d.go_on()
    assert [d.take(worker, Ping) for worker in range(2)] == [Ping(), Ping()]
    d.say(0, Pong())
    d.now += PATIENCE / 2
    d.look()
    assert [lost.worker for lost in d.records.of(Lost)] == [1]
