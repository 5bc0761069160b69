"""The cycle says what comes next; workers turn leases into contributions."""

import json
import math
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.discipline.discipline import Discipline
from offbeat.errors import RunError
from offbeat.model.replica import Replica
from offbeat.model.table import BySize, buffer_entries, parameter_entries, place
from offbeat.protocol.cycle import Action, Cycle
from offbeat.worker.contribution import Snapshot
from offbeat.worker.send import make_sender
from offbeat.worker.worker import CostOnlyWorker, NumberWorker, Timing


def walk(discipline: Discipline, steps: int, leases: int, actions: int) -> str:
    """The first letters of what a worker does when `leases` are to be had."""
    cycle, found = Cycle.of(discipline), ""
    for _ in range(actions):
        action = cycle.action
        found += {"pull": "v", "lease": "", "compute": "c", "push": "^", "rest": "."}[action.value]
        if action is Action.PULL:
            cycle.pulled(steps)
        elif action is Action.LEASE:
            cycle.leased(leases > 0)
            leases -= 1
        elif action is Action.COMPUTE:
            cycle.computed()
        elif action is Action.PUSH:
            cycle.pushed()
        else:
            break
    return found


@pytest.mark.parametrize(
    ("discipline", "steps", "leases", "expected"),
    [(ob.ASP(), 1, 2, "vc^vc^v."), (ob.BSP(), 1, 1, "vc^v."),
     (ob.LocalSGD(2), 2, 4, "vcc^vcc^v."),
     (ob.LocalSGD(3), 3, 4, "vccc^vc^v."),  # the last block is shorter
     (ob.Downpour(2, 1), 2, 4, "vcvc^vcvc^v."),
     (ob.Downpour(1, 2), 1, 4, "vc^c^vc^c^v."),
     (ob.Downpour(2, 2), 2, 4, "vcc^vcc^v."),
     (ob.Downpour(3, 2), 3, 6, "vccvc^cvcc^v."),
     (ob.EASGD(2), 2, 4, "vccv^ccv^."), (ob.EASGD(2), 2, 3, "vccv^cv^."),
     (ob.ASP(), 1, 0, "v.")],
)  # fmt: skip
def test_the_order_of_what_a_worker_does(
    discipline: Discipline, steps: int, leases: int, expected: str
) -> None:
    assert walk(discipline, steps, leases, 60).startswith(expected)


def test_a_woken_worker_pulls_first() -> None:
    cycle = Cycle.of(ob.ASP())
    cycle.pulled(1)
    cycle.leased(False)
    assert cycle.action is Action.REST
    cycle.woken()
    assert cycle.action is Action.PULL


def test_a_cost_only_worker_moves_bytes_and_samples() -> None:
    worker = CostOnlyWorker(2, 3, 100)
    worker.accept(Snapshot(7, 1, 0))
    worker.take(Lease(0, 0, 4))
    assert worker.catch_up() == [Lease(0, 0, 4)]
    assert worker.catch_up() == []
    worker.take(Lease(0, 4, 6))
    sent = worker.contribution(5, Timing(1.0, 2.0, 3.0), 0)
    part = sent.part
    assert (part.worker, part.incarnation, part.sequence, part.base) == (2, 3, 5, 7)
    assert part.leases == [Lease(0, 0, 4), Lease(0, 4, 6)]
    assert (part.samples, part.bytes) == (6, 100)
    assert (part.compute, part.wait, part.communication) == (1.0, 2.0, 3.0)
    assert sent.payload is None
    assert worker.done == []


# ---------------------------------------------------------------- workers with numbers

X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2


def number_worker(skip: bool = False, x: torch.Tensor = X, codec: Any = None) -> NumberWorker:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    reader = Reader(TensorDataset(x, Y), shuffle=False)
    tables = place(parameter_entries(model), BySize(1))
    replica = Replica(model, tables, reader, F.cross_entropy)
    sender = make_sender(ob.ASP(), replica, codec, None)
    worker = NumberWorker(1, 1, sender, buffer_entries(model, {}), skip)
    worker.accept(Snapshot(3, 1, 0, [flat.clone() for flat in replica.flats]))
    return worker


def test_leases_are_computed_when_the_result_is_needed() -> None:
    worker = number_worker()
    worker.take(Lease(0, 0, 4))
    assert worker.losses == []
    sent = worker.contribution(0, Timing(), 0)
    assert sent.part.leases == [Lease(0, 0, 4)]
    assert sent.part.loss > 0
    assert sent.part.base == 3
    assert sent.payload is not None
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert sent.statistics.keys() == {f"1.{name}" for name in names}
    # 8 weights and biases of the linear layer, 4 of the norm; 4 + 4 + 8 bytes more of statistics.
    assert sent.part.bytes == sent.nbytes == 12 * 4 + 2 * 4 + 2 * 4 + 8


def test_the_loss_of_a_contribution_is_the_mean_over_samples() -> None:
    worker = number_worker()
    for lease in (Lease(0, 0, 4), Lease(0, 4, 6)):
        worker.take(lease)
    worker.catch_up()
    first, second = worker.losses
    sent = worker.contribution(0, Timing(), 0)
    assert sent.part.loss == pytest.approx((4 * first + 2 * second) / 6)


BAD = X.clone()
BAD[5] = math.nan


def test_a_loss_that_is_no_number_stops_with_worker_version_and_samples() -> None:
    worker = number_worker(x=BAD)
    worker.take(Lease(0, 4, 8))
    with pytest.raises(RunError) as caught:
        worker.contribution(0, Timing(), 0)
    says = str(caught.value)
    assert "the loss is nan at worker 1, version 3, epoch 0, samples 4 to 7" in says
    assert "nonfinite='skip'" in says


def test_with_skip_it_is_marked_and_the_worker_goes_on() -> None:
    worker = number_worker(skip=True, x=BAD)
    worker.take(Lease(0, 4, 8))
    assert worker.contribution(0, Timing(), 0).part.skipped


def test_good_contributions_are_not_marked() -> None:
    worker = number_worker(skip=True)
    worker.take(Lease(0, 0, 4))
    assert not worker.contribution(0, Timing(), 0).part.skipped


def test_the_state_goes_into_tensors_and_back() -> None:
    first, second = number_worker(codec=ob.codec.TopK(0.5)), number_worker(codec=ob.codec.TopK(0.5))
    first.take(Lease(0, 0, 4))
    first.contribution(0, Timing(), 0)
    first.take(Lease(0, 4, 8))
    first.catch_up()
    first.take(Lease(0, 8, 12))
    meta = json.loads(msgspec.json.encode(first.meta()))
    second.load({k: t.clone() for k, t in first.tensors().items()}, meta)
    assert (second.todo, second.done, second.base) == (first.todo, first.done, first.base)
    assert second.losses == first.losses
    one, other = (w.contribution(1, Timing(), 0) for w in (first, second))
    assert one.part == other.part
    assert torch.equal(one.unpacked()[0].buffer, other.unpacked()[0].buffer)
    assert first.nbytes == second.nbytes > 0
