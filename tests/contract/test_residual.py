"""Nothing is lost on the way: what was sent plus what is still owed is what was computed."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.config.setup import make_job
from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.log.log import Log
from offbeat.worker.worker import Timing
from tests.contract.common import CODECS, MOMENTUM, asked, examples, optimizer_for, problem, seeds

DISCIPLINES = {
    "gradient": ob.ASP(),
    "accumulated": ob.Downpour(push=3, fetch=3),
    "change": ob.LocalSGD(3),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", DISCIPLINES)
@examples(6)
@given(seed=seeds, pushes=st.integers(1, 6))
def test_sent_and_residual_add_up_to_what_was_computed(name, codec, seed, pushes):
    """Through a whole worker: batches in, packed contributions out, unpacked as the store does."""
    what = problem(samples=20, seed=seed)
    discipline = DISCIPLINES[name]
    mine = what._replace(model=copy.deepcopy(what.model))  # which follows the worker
    wanted = asked(*mine, discipline, optimizer_for(discipline), 1, 2, 9, seed, codec=codec)
    job = make_job(wanted)
    store = job.make_store(Log())
    worker = job.make_worker(store, 0, store.join(0, 0.0))
    steps = 1 if name == "gradient" else 3
    zero = {n: torch.zeros_like(p) for n, p in what.model.named_parameters()}
    sent, computed = dict(zero), dict(zero)
    rule = None  # the change-sender's optimiser goes on from push to push
    for number in range(pushes):
        worker.accept(store.pull(0, 0.0))
        leases = [store.lease(0) for _ in range(steps)]
        for lease in leases:
            worker.take(lease)
        out = worker.contribution(number, Timing(), seed)
        for flat in out.unpacked():
            for n, view in flat.views.items():
                sent[n] = sent[n] + view
        expected, rule = _expected(what, name, leases, seed, rule)
        computed = {n: computed[n] + expected[n] for n in computed}
    feedback = worker.sender.feedback
    residual = feedback.residual if feedback is not None else {}
    assert (feedback is None) == (codec is None)
    for n in computed:
        total = sent[n] + residual.get(n, 0.0)
        torch.testing.assert_close(total, computed[n], rtol=0, atol=1e-12)


def _expected(what, name, leases: list[Lease], seed, rule):
    """What the leases come to at the initial parameters, in plain PyTorch."""
    model = copy.deepcopy(what.model)
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    own = MOMENTUM(model.parameters())
    if rule is not None:
        own.load_state_dict(rule)
    for lease in leases:
        rows = Reader(what.data, seed).order(lease.epoch)[lease.start : lease.stop]
        inputs, target = (tensor[rows] for tensor in what.data.tensors)
        model.zero_grad()
        what.loss(model(inputs), target).backward()
        if name == "change":
            own.step()
        else:
            for n, p in model.named_parameters():
                total[n] += p.grad
    if name == "change":
        start = dict(what.model.named_parameters())
        total = {n: (start[n] - p).detach() for n, p in model.named_parameters()}
    return total, own.state_dict()


@pytest.mark.parametrize("codec", [c for c in CODECS if c])
def test_codecs_do_leave_something_unsent(codec):
    """So that the sums above say something."""
    what = problem()
    job = make_job(asked(*what, ob.ASP(), MOMENTUM, 1, 2, 9, codec=codec))
    store = job.make_store(Log())
    worker = job.make_worker(store, 0, store.join(0, 0.0))
    worker.accept(store.pull(0, 0.0))
    worker.take(store.lease(0))
    worker.contribution(0, Timing(), 0)
    assert any(bool(rest.any()) for rest in worker.sender.feedback.residual.values())
