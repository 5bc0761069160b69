"""A worker with several leases under way: each on the version it began with, out in order."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.config.setup import make_job
from offbeat.data.lease import Lease
from offbeat.log.log import Log
from offbeat.store.store import Store
from offbeat.worker.contribution import Contribution, Snapshot
from offbeat.worker.worker import StreamWorker, Timing
from tests.contract.common import asked

LEASES = [Lease(0, start, start + 4) for start in (0, 4, 8)]


@pytest.fixture
def made() -> tuple[Store, StreamWorker]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    data = TensorDataset(*torch.randn(2, 12, 2, dtype=torch.float64))
    rule = partial(torch.optim.SGD, lr=0.1)
    wanted = asked(model, data, loss, "asp", rule, 1, 4, 1, layout="pp=2,schedule=2bw,split=count")
    job = make_job(wanted)
    store = job.make_store(Log())
    worker = job.make_worker(store, 0, 1)
    assert isinstance(worker, StreamWorker)
    return store, worker


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target[:, :1])


def accept(store: Store, worker: StreamWorker, version: int, scale: float) -> None:
    """Hand over parameters that tell versions apart."""
    assert store.parameters is not None
    flats = [flat.clone() for flat in store.parameters.flats]
    for flat in flats:
        flat.buffer.view(torch.float64).mul_(scale)
    worker.accept(Snapshot(version, 1, 0, flats, {}))


def payload(sent: Contribution) -> dict[str, torch.Tensor]:
    assert sent.payload is not None
    return {name: view.clone() for flat in sent.payload for name, view in flat.views.items()}


def test_contributions_leave_in_order_each_on_its_own_version(
    made: tuple[Store, StreamWorker],
) -> None:
    store, worker = made
    wanted = []
    for version, lease in enumerate(LEASES):  # what one after the other would give
        accept(store, worker, version, 1.0 + version)
        worker.take(lease)
        sent = worker.contribution(version, Timing(), 0)
        wanted.append((payload(sent), sent.part.loss))
        assert sent.part.base == version
    accept(store, worker, 0, 1.0)
    worker.take(LEASES[0])
    worker.catch_up()
    accept(store, worker, 1, 2.0)
    worker.take(LEASES[1])
    worker.catch_up()
    assert worker.computed() == [LEASES[0]]
    found = [worker.contribution(3, Timing(), 0)]
    got = [(payload(found[0]), found[0].part.loss)]
    assert worker.computed() == [LEASES[1]]
    accept(store, worker, 2, 3.0)
    worker.take(LEASES[2])
    for sequence in (4, 5):
        found.append(worker.contribution(sequence, Timing(), 0))
        got.append((payload(found[-1]), found[-1].part.loss))
    assert worker.computed() == []
    assert [sent.part.leases for sent in found] == [[lease] for lease in LEASES]
    assert [sent.part.base for sent in found] == [0, 1, 2]
    for (mine, its_loss), (theirs, their_loss) in zip(got, wanted, strict=True):
        assert its_loss == their_loss
        for name, gradient in theirs.items():
            assert torch.equal(mine[name], gradient), name
    assert not torch.equal(wanted[0][0]["0.weight"], wanted[1][0]["0.weight"])


def test_what_a_pipeline_computed_is_sent_as_it_lies(made: tuple[Store, StreamWorker]) -> None:
    store, worker = made
    accept(store, worker, 0, 1.0)
    worker.sender.step(LEASES[1])
    worker.sender.payload()
    accept(store, worker, 5, 2.0)
    worker.ready(LEASES[1], 0.25, base=3)
    sent = worker.contribution(0, Timing(), 0)
    assert sent.part.leases == [LEASES[1]]
    assert (sent.part.base, sent.part.loss, sent.part.samples) == (3, 0.25, 4)
    assert worker.computed() == []


def test_a_loss_that_is_not_finite_is_told_when_its_turn_comes(
    made: tuple[Store, StreamWorker],
) -> None:
    _, worker = made
    with pytest.raises(ob.RunError, match="the loss is nan at worker 0"):
        worker.ready(LEASES[0], float("nan"), 0)
