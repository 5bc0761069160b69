"""Admission, gathering, staleness, dropping and waking, without any numbers."""

import json
from pathlib import Path

import msgspec
import pytest

import offbeat as ob
from offbeat.data.lease import Lease, Leases
from offbeat.discipline.course import Course
from offbeat.discipline.discipline import Discipline
from offbeat.errors import ConfigError
from offbeat.log import log
from offbeat.log.log import Listener, Log
from offbeat.log.records import (
    Admitted,
    Dropped,
    Entry,
    EpochDone,
    Lost,
    Part,
    Pulled,
    Refused,
    Rested,
    Turned,
    Updated,
)
from offbeat.store.board import Row
from offbeat.store.cost_only import CostOnlyParameters
from offbeat.store.store import Store
from offbeat.worker.contribution import Admission, Contribution


class Watch(Listener):
    """Keeps every record."""

    def __init__(self) -> None:
        self.seen: list[Entry] = []

    def see(self, record: Entry) -> None:
        self.seen.append(record)

    def of(self, kind: type[Entry]) -> list[Entry]:
        return [record for record in self.seen if isinstance(record, kind)]


class StoreWithWorkers:
    """A store with workers that have joined and pulled."""

    def __init__(
        self, discipline: Discipline | Course, workers: int = 3, samples: int = 24, batch: int = 2
    ):
        self.watch = Watch()
        log = Log()
        log.listeners.append(self.watch)
        self.store = Store(
            discipline, workers, Leases(samples, batch, 1), log, CostOnlyParameters()
        )
        self.sequence = [0] * workers
        self.incarnation = [self.store.join(worker, 0.0) for worker in range(workers)]
        self.base = [0] * workers
        for worker in range(workers):
            self.pull(worker)

    def pull(self, worker: int) -> None:
        self.base[worker] = self.store.pull(worker, 1.0).version

    def part(self, worker: int, lease: Lease | None = None) -> Part:
        found = lease or self.store.lease(worker)
        assert found is not None
        return Part(
            worker, self.incarnation[worker], self.sequence[worker], self.base[worker],
            [found], found.samples, compute=0.5,
        )  # fmt: skip

    def push(self, worker: int) -> Admission:
        verdict = self.store.push(Contribution(self.part(worker)), 2.0)
        self.sequence[worker] += 1
        return verdict


def test_a_repeat_is_recognised_and_changes_nothing() -> None:
    trial = StoreWithWorkers(ob.ASP())
    one = Contribution(trial.part(0))
    assert trial.store.push(one, 1.0) is Admission.ADMITTED
    state = trial.store.state()
    assert trial.store.push(one, 1.5) is Admission.REPEATED
    assert trial.store.state() == state
    assert trial.store.version == 1


def test_a_version_is_on_record_before_the_next_is_made(tmp_path: Path) -> None:
    found: list[list[int]] = []

    class Reader:
        """Reads the log whenever an update is about to be made."""

        def before(self) -> None:
            records = log.read(tmp_path / "log.jsonl")
            found.append([record.version for record in records if isinstance(record, Updated)])

        def write(self, version: int) -> None:
            pass

    # With a relay records wait until somebody asks for them.
    kept = Log(tmp_path / "log.jsonl", relay=lambda lines: None)
    store = Store(ob.ASP(), 1, Leases(4, 2, 1), kept, CostOnlyParameters(), witness=Reader())
    store.join(0, 0.0)
    for sequence in range(2):
        lease = store.lease(0)
        assert lease is not None
        store.push(Contribution(Part(0, 1, sequence, sequence, [lease], 2)), 1.0)
    assert found == [[], [1]]
    store.log.close()


def test_a_repeat_from_a_round_still_open_is_recognised_too() -> None:
    trial = StoreWithWorkers(ob.BSP())
    one = Contribution(trial.part(0))
    assert trial.store.push(one, 1.0) is Admission.ADMITTED
    assert trial.store.push(one, 1.0) is Admission.REPEATED
    assert len(trial.store.gathered) == 1


def test_the_dead_are_refused() -> None:
    trial = StoreWithWorkers(ob.ASP())
    part = trial.part(1)
    trial.store.lose(1, 1.0)
    assert trial.store.lost(1)
    assert trial.store.push(Contribution(part), 2.0) is Admission.REFUSED
    assert trial.watch.of(Refused) == [Refused(2.0, 1, 1, 0)]
    assert trial.store.version == 0


def test_a_worker_that_never_joined_is_refused() -> None:
    store = Store(ob.ASP(), 2, Leases(4, 2, 1), Log(), CostOnlyParameters())
    part = Part(0, 0, 0, 0, [Lease(0, 0, 2)], 2)
    assert store.push(Contribution(part), 0.0) is Admission.REFUSED


def test_an_old_incarnation_is_refused_and_the_new_one_admitted() -> None:
    trial = StoreWithWorkers(ob.ASP())
    old = trial.part(0)
    assert trial.store.join(0, 1.0) == 2  # gives the first one up
    assert trial.watch.of(Lost) == [Lost(1.0, 0, 1, [Lease(0, 0, 2)])]
    assert trial.store.push(Contribution(old), 2.0) is Admission.REFUSED
    trial.incarnation[0] = 2
    assert trial.push(0) is Admission.ADMITTED  # its sequence starts at 0 again


def test_a_lost_workers_samples_go_out_again_and_count_once() -> None:
    trial = StoreWithWorkers(ob.ASP(), samples=4)
    lease = trial.store.lease(0)
    trial.store.lose(0, 1.0)
    assert trial.store.lease(1) == lease
    trial.store.leases.hand_in(1, [lease])  # type: ignore[list-item]
    trial.store.push(Contribution(trial.part(1, lease)), 2.0)
    trial.sequence[1] += 1
    trial.push(1)
    assert trial.store.finished
    assert trial.watch.of(EpochDone) == [EpochDone(2.0, 0, 2)]
    assert trial.store.epoch == 1


def test_staleness_is_counted_at_the_store() -> None:
    trial = StoreWithWorkers(ob.ASP(ob.Inverse()))
    for worker in (0, 1, 2):
        trial.push(worker)
    trial.pull(0)
    trial.push(1)
    trial.push(0)
    parts = [record.parts[0] for record in trial.watch.seen if isinstance(record, Updated)]
    assert [part.staleness for part in parts] == [0, 1, 2, 3, 1]
    assert [part.weight for part in parts] == [1.0, 1.0, 0.5, 1 / 3, 1.0]


def test_what_a_worker_claims_about_staleness_does_not_count() -> None:
    trial = StoreWithWorkers(ob.ASP())
    trial.push(0)
    part = trial.part(1)
    part.staleness, part.weight = 99, 7.0
    trial.store.push(Contribution(part), 1.0)
    assert (part.staleness, part.weight) == (1, 1.0)


def test_a_round_is_one_update_sorted_by_worker() -> None:
    trial = StoreWithWorkers(ob.BSP())
    for worker in (2, 0):
        assert trial.push(worker) is Admission.ADMITTED
        assert trial.store.hold(worker) == []
    assert trial.store.version == 0
    assert len(trial.watch.of(Admitted)) == 2
    trial.push(1)
    (update,) = trial.watch.of(Updated)
    assert isinstance(update, Updated)
    assert [part.worker for part in update.parts] == [0, 1, 2]
    assert sorted(trial.store.hold(1)) == [0, 1, 2]


def test_nobody_is_released_twice() -> None:
    trial = StoreWithWorkers(ob.BSP(), workers=2)
    trial.push(0)
    assert trial.store.hold(0) == []
    trial.push(1)
    assert trial.store.released() == [0]
    assert trial.store.released() == []
    assert trial.store.hold(1) == [1]


def test_a_waiting_worker_shows_whom_it_waits_for() -> None:
    trial = StoreWithWorkers(ob.SSP(1))
    trial.push(0)
    assert trial.store.hold(0) == [0]
    trial.pull(0)
    trial.push(0)
    assert trial.store.hold(0) == []
    assert trial.store.cells[Row.BLOCKER, 0] in (1, 2)
    trial.push(1)
    assert trial.store.released() == []
    trial.push(2)
    assert trial.store.released() == [0]


def test_the_last_group_is_flushed_when_nobody_adds_to_it() -> None:
    trial = StoreWithWorkers(ob.SoftSync(3), samples=8)
    for worker in (0, 1, 2):
        trial.push(worker)
    trial.push(0)
    assert trial.store.version == 1
    for worker in (0, 1):
        trial.store.rest(worker, 3.0)
    assert trial.store.version == 1
    trial.store.rest(2, 3.0)
    assert trial.store.version == 2
    assert trial.store.finished
    assert len(trial.watch.of(Rested)) == 3


@pytest.mark.parametrize("leave", ["rest", "lose"])
def test_a_round_closes_without_those_who_stopped(leave: str) -> None:
    trial = StoreWithWorkers(ob.BSP())
    trial.push(0)
    trial.push(1)
    assert trial.store.hold(0) == []
    getattr(trial.store, leave)(2, 3.0)
    assert trial.store.version == 1
    assert 0 in trial.store.released()


def test_what_a_worker_sent_before_it_died_still_counts() -> None:
    trial = StoreWithWorkers(ob.BSP())
    trial.push(0)
    trial.store.lose(0, 1.0)
    trial.push(1)
    trial.push(2)
    (update,) = trial.watch.of(Updated)
    assert isinstance(update, Updated)
    assert [part.worker for part in update.parts] == [0, 1, 2]
    assert trial.store.leases.ledger.summary()[0]["repeated"] == 0


def test_backup_workers_are_dropped_and_counted() -> None:
    trial = StoreWithWorkers(ob.BSP(backup=1), samples=8)
    assert trial.push(0) is Admission.ADMITTED
    assert trial.push(1) is Admission.ADMITTED
    assert trial.store.version == 1
    assert trial.push(2) is Admission.DROPPED
    (dropped,) = trial.watch.of(Dropped)
    assert isinstance(dropped, Dropped)
    assert (dropped.part.worker, dropped.part.staleness) == (2, 1)
    assert trial.store.hold(2) == [2]
    trial.pull(2)
    assert trial.push(2) is Admission.ADMITTED
    assert trial.store.leases.ledger.summary() == [
        {"applied": 4, "repeated": 0, "missing": 2, "dropped": 2, "skipped": 0}
    ]


def test_what_is_staler_than_the_limit_is_dropped() -> None:
    """`ringmaster:2` applies a staleness of 1 and drops one of 2."""
    trial = StoreWithWorkers(ob.Ringmaster(2), samples=8)
    assert trial.push(0) is Admission.ADMITTED
    assert trial.push(1) is Admission.ADMITTED
    assert trial.push(2) is Admission.DROPPED
    (dropped,) = trial.watch.of(Dropped)
    assert isinstance(dropped, Dropped)
    assert (dropped.part.worker, dropped.part.staleness, dropped.redo) == (2, 2, False)
    assert trial.store.version == 2
    assert trial.store.leases.ledger.summary()[0]["dropped"] == 2
    trial.pull(2)
    assert trial.push(2) is Admission.ADMITTED


def test_an_update_takes_contributions_of_its_version_alone() -> None:
    trial = StoreWithWorkers(ob.Rennala(4), samples=16)
    for _ in range(2):  # more than there are workers: some contribute twice
        assert trial.push(0) is Admission.ADMITTED
        assert trial.push(1) is Admission.ADMITTED
    assert trial.store.version == 1
    assert trial.push(2) is Admission.DROPPED
    assert trial.push(0) is Admission.DROPPED
    assert not trial.store.gathered
    (update,) = trial.watch.of(Updated)
    assert isinstance(update, Updated)
    assert [(part.worker, part.staleness) for part in update.parts] == [
        (0, 0), (0, 0), (1, 0), (1, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "discipline",
    [ob.Ringmaster(1, redo=True), ob.Rennala(1, redo=True), ob.BSP(backup=2, redo=True)],
    ids=str,
)
def test_samples_of_what_was_dropped_go_out_again(discipline: Discipline) -> None:
    trial = StoreWithWorkers(discipline, samples=6)
    late = trial.part(1)
    assert trial.push(0) is Admission.ADMITTED
    assert trial.store.push(Contribution(late), 2.0) is Admission.DROPPED
    trial.sequence[1] = 1
    (dropped,) = trial.watch.of(Dropped)
    assert isinstance(dropped, Dropped)
    assert dropped.redo
    assert not trial.store.gives_up
    assert trial.store.given_up == 0
    for worker in (1, 2):  # the samples that were dropped go out before new ones
        trial.store.hold(worker)
        trial.pull(worker)
        assert trial.push(worker) is Admission.ADMITTED
        trial.store.hold(worker)
        trial.pull(worker)
    updates = [record for record in trial.watch.of(Updated) if isinstance(record, Updated)]
    assert updates[1].parts[0].leases == late.leases
    assert trial.store.finished
    assert trial.store.leases.ledger.summary() == [
        {"applied": 6, "repeated": 0, "missing": 0, "dropped": 0, "skipped": 0}
    ]


# ---------------------------------------------------------------- turns


def test_whoever_waits_is_released_by_the_new_discipline() -> None:
    trial = StoreWithWorkers(ob.Switch("bsp", ob.Turn("asp", "v1")), samples=24)
    trial.push(0)
    assert trial.store.hold(0) == []
    trial.push(1)
    assert trial.store.hold(1) == []
    trial.push(2)  # makes the update, and with it the turn
    assert trial.store.discipline == ob.ASP()
    assert trial.store.hold(2) == [0, 1, 2]
    trial.pull(0)
    trial.push(0)
    assert trial.store.version == 2
    assert trial.store.hold(0) == [0]


def test_the_loss_of_a_worker_may_lead_to_a_turn() -> None:
    trial = StoreWithWorkers(ob.Switch("bsp", ob.Turn("asp", "v1")), samples=24)
    for worker in (0, 1):
        trial.push(worker)
        assert trial.store.hold(worker) == []
    trial.store.lose(2, 3.0)
    assert trial.store.released() == [0, 1]


def test_under_slack_nobody_is_ahead_after_a_turn() -> None:
    trial = StoreWithWorkers(ob.Switch("asp", ob.Turn("ssp:1", "v6")), samples=48)
    for _ in range(5):
        trial.push(0)
        trial.pull(0)
    trial.push(1)
    assert trial.store.stage == 1
    assert trial.store.hold(0) == [0]  # it is five steps ahead, and they are forgotten
    trial.pull(0)
    trial.push(0)
    assert trial.store.hold(0) == [0]
    trial.pull(0)
    trial.push(0)
    assert trial.store.hold(0) == []
    trial.push(1)
    assert trial.store.released() == []
    trial.push(2)
    assert trial.store.released() == [0]


def test_what_was_under_way_is_judged_by_the_new_discipline() -> None:
    trial = StoreWithWorkers(ob.Switch("asp", ob.Turn("rennala:1", "v1")), samples=24)
    assert trial.push(0) is Admission.ADMITTED
    assert trial.push(1) is Admission.DROPPED
    (turn,) = trial.watch.of(Turned)
    assert turn == Turned(2.0, 1, 1, "rennala:1", 1.0, "version 1 is reached")


def test_a_share_of_the_work_counts_what_is_dealt_with_at_an_update() -> None:
    trial = StoreWithWorkers(ob.Switch("ringmaster:1", ob.Turn("asp", "50%")), samples=8)
    assert trial.push(0) is Admission.ADMITTED
    assert trial.push(1) is Admission.DROPPED  # half of the work, but no new version
    assert trial.store.stage == 0
    trial.pull(0)
    trial.push(0)
    assert trial.store.stage == 1


def test_several_turns_at_once_are_made_in_order() -> None:
    course = ob.Switch("asp", ob.Turn("soft:2", "v1"), ob.Turn("bsp", "10%"), ob.Turn("asp", "v2"))
    trial = StoreWithWorkers(course, samples=12)
    trial.push(0)
    told = [turn for turn in trial.watch.of(Turned) if isinstance(turn, Turned)]
    assert [turn.discipline for turn in told] == ["soft:2", "bsp"]
    assert trial.store.discipline == ob.BSP()


def test_the_rate_of_a_turn_is_in_the_weights() -> None:
    course = ob.Switch("asp", ob.Turn("asp:weigh=inverse", "v1", rate=0.5))
    trial = StoreWithWorkers(course, samples=12)
    for worker in (0, 1, 2):
        trial.push(worker)
    updates = [record for record in trial.watch.of(Updated) if isinstance(record, Updated)]
    assert [update.parts[0].weight for update in updates] == [1.0, 0.5, 0.25]


def test_a_stage_is_part_of_the_state() -> None:
    trial = StoreWithWorkers(ob.Switch("asp", ob.Turn("bsp", "v1")), samples=12)
    trial.push(0)
    state = json.loads(json.dumps(msgspec.to_builtins(trial.store.state(), str_keys=True)))
    other = StoreWithWorkers(ob.Switch("asp", ob.Turn("bsp", "v1")), samples=12)
    other.store.load(state)
    assert (other.store.stage, other.store.discipline) == (1, ob.BSP())
    del state["stage"]  # of a run of before
    other.store.load(state)
    assert (other.store.stage, other.store.discipline) == (0, ob.ASP())


def test_resting_workers_wake_for_leases_that_came_back() -> None:
    trial = StoreWithWorkers(ob.ASP(), samples=4)
    trial.store.lease(0)
    trial.store.lease(1)
    assert trial.store.lease(2) is None
    trial.store.rest(2, 1.0)
    assert trial.store.wake() == []
    trial.store.lose(0, 2.0)
    assert trial.store.wake() == [2]
    assert trial.store.wake() == []
    assert trial.store.lease(2) == Lease(0, 0, 2)


def test_no_more_wake_than_there_are_leases() -> None:
    trial = StoreWithWorkers(ob.ASP(), samples=2)
    trial.store.lease(0)
    trial.store.rest(1, 1.0)
    trial.store.rest(2, 1.0)
    trial.store.lose(0, 2.0)
    assert trial.store.wake() == [1]


@pytest.mark.parametrize(
    ("discipline", "steps"),
    [(ob.ASP(), 1), (ob.LocalSGD(7), 7), (ob.EASGD(3), 3), (ob.Downpour(4, 2), 4)],
    ids=str,
)
def test_a_pull_says_how_many_steps_follow(discipline: Discipline, steps: int) -> None:
    trial = StoreWithWorkers(discipline)
    assert trial.store.pull(0, 1.0).steps == steps
    pulled = trial.watch.of(Pulled)[-1]
    assert isinstance(pulled, Pulled)
    assert (pulled.worker, pulled.version, pulled.steps) == (0, 0, steps)


def test_slower_workers_make_fewer_local_steps() -> None:
    trial = StoreWithWorkers(ob.AsyncLocalSGD(8), workers=2)
    for worker, seconds in ((0, 0.1), (1, 0.4)):
        part = trial.part(worker)
        part.compute = seconds
        trial.store.push(Contribution(part), 1.0)
    assert trial.store.pull(0, 2.0).steps == 8
    assert trial.store.pull(1, 2.0).steps == 2


def test_skipped_contributions_move_clock_and_version() -> None:
    trial = StoreWithWorkers(ob.SSP(0), samples=6)
    part = trial.part(0)
    part.skipped = True
    assert trial.store.push(Contribution(part), 1.0) is Admission.ADMITTED
    assert trial.store.version == 1
    assert trial.store.cells[Row.CLOCK, 0] == 1
    assert trial.store.leases.ledger.summary()[0]["skipped"] == 2


@pytest.mark.parametrize("discipline", [ob.ASP(), ob.SSP(1), ob.BSP(backup=1)], ids=str)
def test_the_state_goes_through_json_and_back(discipline: Discipline) -> None:
    trial = StoreWithWorkers(discipline, samples=12)
    for worker in (0, 1):
        trial.push(worker)
        trial.store.hold(worker)
    trial.store.lease(2)
    saved = json.loads(json.dumps(msgspec.to_builtins(trial.store.state(), str_keys=True)))
    other = StoreWithWorkers(discipline, samples=12)
    other.store.load(saved)
    assert other.store.state() == trial.store.state()
    assert other.store.version == trial.store.version
    for one in (trial, other):
        one.sequence, one.base = [1, 1, 0], [0, 0, 0]
        one.store.lose(2, 4.0)
        one.store.join(2, 5.0)
        one.incarnation[2] = 2
        one.pull(2)
        one.push(2)
    assert other.store.released() == trial.store.released()
    assert other.store.state() == trial.store.state()


def test_more_contributions_than_workers_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="cannot gather 3 contributions from 2 workers"):
        Store(ob.SoftSync(3), 2, Leases(4, 2, 1), Log(), CostOnlyParameters())
