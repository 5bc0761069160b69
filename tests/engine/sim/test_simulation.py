"""Small timelines computed by hand; every number here is exact in binary."""

import heapq
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.config.job import CostJob, CostOnly
from offbeat.discipline.course import Course
from offbeat.discipline.discipline import Discipline
from offbeat.engine.sim.compute_times import Constant
from offbeat.engine.sim.simulation import EventKind, SimEvent, Simulation
from offbeat.errors import RunError
from offbeat.log.log import Listener, Log
from offbeat.log.records import Entry, Joined, Lost, Pulled, Updated
from offbeat.report.summary import Summary, Tally


class Watch(Listener):
    """Keeps every record."""

    def __init__(self) -> None:
        self.seen: list[Entry] = []

    def see(self, record: Entry) -> None:
        self.seen.append(record)

    def times(self, kind: type[Entry]) -> list[float]:
        return [record.time for record in self.seen if isinstance(record, kind)]


class Case:
    """A cost-only run of `samples` single-sample steps."""

    def __init__(
        self,
        discipline: Discipline,
        machines: list[ob.Machine],
        samples: int,
        *,
        nbytes: int = 0,
        batch: int = 1,
        apply: float = 0.0,
        patience: float = 100.0,
    ):
        self.watch, self.tally = Watch(), Tally(len(machines))
        log = Log()
        log.listeners += [self.watch, self.tally]
        job = CostJob(CostOnly(nbytes, samples), Course(discipline), len(machines), batch, 1)
        self.store = job.make_store(log)
        cluster = ob.Cluster(tuple(machines), apply=apply, patience=patience)
        self.sim = Simulation(job, cluster, self.store)

    def run(self) -> Summary:
        self.sim.start()
        while self.sim.step():
            pass
        return self.tally.summary("", "", self.store.leases.ledger.summary(), {}, "")


def machine(seconds: float, **rest: object) -> ob.Machine:
    return ob.Machine(Constant(seconds), **rest)  # type: ignore[arg-type]


def test_events_come_by_time_and_then_as_planned() -> None:
    heap: list[SimEvent] = []
    late, early = SimEvent(2.0, 0, EventKind.JOIN, 0, 0), SimEvent(1.0, 2, EventKind.FAIL, 1, 0)
    first = SimEvent(1.0, 1, EventKind.WAKE, 2, 0)
    for event in (late, early, first):
        heapq.heappush(heap, event)
    assert [heapq.heappop(heap) for _ in range(3)] == [first, early, late]


def test_free_running() -> None:
    case = Case(ob.ASP(), [machine(1.0), machine(2.0)], 6)
    made = case.run()
    # 1: w0; 2: w1 then w0; 3: w0; 4: w1 (planned at 2) then w0 (planned at 3)
    assert case.watch.times(Updated) == [1.0, 2.0, 2.0, 3.0, 4.0, 4.0]
    assert made.seconds == 4.0
    assert made.staleness_counts == {0: 2, 1: 3, 2: 1}
    assert [w.steps for w in made.per_worker] == [4, 2]
    assert [w.compute for w in made.per_worker] == [4.0, 4.0]
    assert made.wait_share == 0.0
    assert case.sim.now == 4.0


def test_lock_step_over_slow_links() -> None:
    # 50 bytes at 100 bytes a second and 0.25 s of latency: 0.75 s each way.
    link = {"bandwidth": 100.0, "latency": 0.25}
    case = Case(ob.BSP(), [machine(1.0, **link), machine(2.0, **link)], 4, nbytes=50)
    made = case.run()
    assert case.watch.times(Updated) == [3.5, 7.0]
    assert [w.communication for w in made.per_worker] == [3.0, 3.0]
    assert [w.wait for w in made.per_worker] == [1.0, 0.0]
    assert made.wait_share == 1 / 13
    assert made.staleness_counts == {0: 4}
    assert made.bytes_sent == 200


def test_the_store_serves_one_contribution_at_a_time() -> None:
    case = Case(ob.ASP(), [machine(1.0), machine(1.0)], 4, apply=0.5)
    made = case.run()
    assert case.watch.times(Updated) == [1.5, 2.0, 3.0, 3.5]
    assert [w.communication for w in made.per_worker] == [1.0, 1.5]


def test_a_smaller_batch_takes_its_share_of_the_time() -> None:
    made = Case(ob.ASP(), [machine(1.0)], 3, batch=2).run()
    assert made.seconds == 1.5
    assert made.per_worker[0].compute == 1.5


@pytest.mark.parametrize(
    ("slack", "samples", "times", "waited"),
    [(0, 4, [1.0, 2.0, 3.0, 4.0], 2.0), (1, 6, [1.0, 2.0, 2.0, 3.0, 4.0, 5.0], 1.0)],
)
def test_bounded_staleness(slack: int, samples: int, times: list[float], waited: float) -> None:
    case = Case(ob.SSP(slack), [machine(1.0), machine(2.0)], samples)
    made = case.run()
    assert case.watch.times(Updated) == times
    assert [w.wait for w in made.per_worker] == [waited, 0.0]


def test_local_steps_talk_once_per_block() -> None:
    case = Case(ob.LocalSGD(3), [machine(1.0, latency=0.5)], 7)
    made = case.run()
    # pull .5, three steps, push .5: 4 s a block; the last block has one step
    assert case.watch.times(Updated) == [4.0, 8.0, 10.0]
    assert made.per_worker[0].communication == 3.0


def test_an_elastic_exchange_pulls_right_before_it_pushes() -> None:
    case = Case(ob.EASGD(2), [machine(1.0, latency=0.5)], 4)
    made = case.run()
    # pull .5, two steps, pull .5, push .5; then two steps, pull, push
    assert case.watch.times(Updated) == [3.5, 6.5]
    assert made.per_worker[0].communication == 2.5


def test_a_backup_worker_is_dropped_and_goes_on_fresh() -> None:
    case = Case(ob.BSP(backup=1), [machine(1.0), machine(1.0), machine(1.5)], 6)
    made = case.run()
    # 1: w0 and w1; 1.5: w2 comes late; 2: w0 and w1 again; 3: w2 late again
    assert case.watch.times(Updated) == [1.0, 2.0]
    assert made.dropped == 2
    assert made.seconds == 3.0
    assert made.ledger[0] == {
        "applied": 4, "repeated": 0, "missing": 0, "dropped": 2, "skipped": 0,
    }  # fmt: skip


# ---------------------------------------------------------------- faults


def test_a_worker_that_dies_holds_up_the_others_for_patience() -> None:
    dies = machine(1.0, failures=(ob.Failure(1.5),))
    case = Case(ob.BSP(), [machine(1.0), dies], 6, patience=2.0)
    made = case.run()
    # 1: both; w0 waits from 2 until w1 is given up at 3.5; then alone, w1's sample first
    assert case.watch.times(Updated) == [1.0, 3.5, 4.5, 5.5, 6.5]
    assert case.watch.times(Lost) == [3.5]
    assert made.per_worker[0].wait == 1.5
    assert made.ledger[0]["applied"] == 6


def test_a_worker_that_comes_back_early_is_a_new_incarnation_at_once() -> None:
    back = machine(1.0, failures=(ob.Failure(1.5, returns_after=1.0),))
    case = Case(ob.BSP(), [machine(1.0), back], 6, patience=2.0)
    made = case.run()
    assert case.watch.times(Updated) == [1.0, 2.5, 3.5, 4.5]
    assert case.watch.times(Joined) == [0.0, 0.0, 2.5]
    assert case.watch.times(Lost) == [2.5]
    assert made.per_worker[1].joins == 2
    assert made.ledger[0]["applied"] == 6


def test_a_pause_stretches_what_the_worker_was_doing() -> None:
    pauses = machine(1.0, pauses=(ob.Pause(0.5, 1.0),))
    case = Case(ob.BSP(), [machine(1.0), pauses], 4)
    made = case.run()
    assert case.watch.times(Updated) == [2.0, 3.0]
    assert made.per_worker[0].wait == 1.0
    assert made.per_worker[1].compute == 2.0
    assert made.lost == 0


def test_a_pause_beyond_patience_is_a_loss_and_the_late_answer_is_refused() -> None:
    pauses = machine(1.0, pauses=(ob.Pause(0.5, 3.0),))
    case = Case(ob.BSP(), [machine(1.0), pauses], 4, patience=1.0)
    made = case.run()
    # w1 is given up at 1.5, its sample goes to w0; at 4 its old result is refused
    assert case.watch.times(Updated) == [1.5, 2.5, 3.5, 4.5]
    assert case.watch.times(Lost) == [1.5]
    assert case.watch.times(Joined) == [0.0, 0.0, 4.0]
    assert (made.refused, made.lost) == (1, 1)
    assert made.per_worker[0].wait == 0.5
    assert made.ledger[0]["applied"] == 4


def test_a_worker_that_joins_late_begins_then() -> None:
    case = Case(ob.ASP(), [machine(1.0), machine(1.0, joins_at=1.5)], 4)
    made = case.run()
    assert case.watch.times(Updated) == [1.0, 2.0, 2.5, 3.0]
    assert [w.steps for w in made.per_worker] == [3, 1]


def test_a_worker_that_restarts_in_a_pause_holds_nobody_up_beyond_patience() -> None:
    odd = machine(1.0, pauses=(ob.Pause(1.0, 10.0),), failures=(ob.Failure(2.0, 1.0),))
    case = Case(ob.BSP(), [machine(1.0), odd], 8, patience=2.0)
    case.run()
    waits = [
        part.wait for record in case.watch.seen if isinstance(record, Updated)
        for part in record.parts if part.worker == 0
    ]  # fmt: skip
    assert max(waits) <= 2.0


def test_a_resting_worker_wakes_for_the_samples_of_a_lost_one() -> None:
    dies = machine(4.0, failures=(ob.Failure(2.0),))
    case = Case(ob.ASP(), [machine(1.0), dies], 2, patience=1.0)
    case.run()
    # w0 is done at 1 and rests; at 3 w1 is given up, and w0 does its sample
    assert case.watch.times(Updated) == [1.0, 4.0]


def test_all_dead_is_an_error_that_names_time_and_version() -> None:
    dies = machine(1.0, failures=(ob.Failure(1.5),))
    case = Case(ob.ASP(), [dies, dies], 8, patience=2.0)
    with pytest.raises(RunError) as caught:
        case.run()
    assert "no worker is left at 3.5 s and version 2" in str(caught.value)
    assert "give failures a returns_after, or add workers" in str(caught.value)


# ---------------------------------------------------------------- bytes on the link


def seconds_of(
    discipline: Discipline | str, batches: int = 2, **rest: object
) -> tuple[float, Summary]:
    """Real gradients of 16 bytes over a link of 16 bytes a second, one second of computing."""
    cluster = ob.Cluster((machine(1.0, bandwidth=16.0),))
    data = TensorDataset(torch.ones(batches, 4), torch.ones(batches, 1))
    made = ob.train(
        nn.Linear(4, 1, bias=False), data, F.mse_loss, discipline=discipline,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9), batch_size=1,
        cluster=cluster, **rest,
    ).summary()  # type: ignore[arg-type]  # fmt: skip
    return made.seconds, made


@pytest.mark.parametrize(
    ("codec", "seconds"), [(None, 6.0), ("plain", 6.0), ("bf16", 5.0), ("fp16", 5.0)]
)
def test_a_codec_makes_the_push_faster(codec: str | None, seconds: float) -> None:
    assert seconds_of("asp", codec=codec)[0] == seconds


def test_statistics_travel_too() -> None:
    cluster = ob.Cluster((machine(1.0, bandwidth=16.0),))
    data = TensorDataset(torch.randn(4, 2), torch.ones(4, 2))
    made = ob.train(
        nn.BatchNorm1d(2), data, F.mse_loss, discipline="asp", batch_size=4, cluster=cluster,
        optimizer=partial(torch.optim.SGD, lr=0.01),
    ).summary()  # fmt: skip
    # down: weight and bias, 16 bytes, and once more after the last push; up: these, 16 bytes of
    # statistics and a counter of 8
    assert (made.bytes_received, made.bytes_sent) == (32, 40)
    assert made.seconds == 1.0 + 1.0 + 2.5


@pytest.mark.parametrize("discipline", ["asp", "local:2", "average:1", "average:2", "easgd:2"])
def test_seconds_on_the_link_are_the_bytes_over_the_bandwidth(discipline: str) -> None:
    """Averaged updater state is traffic like any other."""
    watch = Watch()
    _, made = seconds_of(discipline, batches=4, listeners=[watch])
    pulled = pushed = 0
    waiting = 0  # what was pulled since the last update
    for record in watch.seen:
        if isinstance(record, Pulled):
            waiting += record.bytes
        elif isinstance(record, Updated):
            pulled, waiting = pulled + waiting, 0
            pushed += sum(part.bytes for part in record.parts)
    assert made.bytes_sent == pushed
    if discipline == "average:1":
        assert pushed == 4 * (16 + 16)  # weights and momentum
    assert made.per_worker[0].communication == (pulled + pushed) / 16.0
