"""Parameters of which every worker has its own, and the meetings that keep them together."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.config.setup import make_job
from offbeat.log.log import Log
from offbeat.log.records import Part
from offbeat.model.table import Flat
from offbeat.store.gossip import GossipParameters
from offbeat.worker.contribution import Contribution
from tests.contract.common import MOMENTUM, asked, problem


def made(
    workers: int, optimizer: Any = MOMENTUM, apart: int | None = None, **options: Any
) -> GossipParameters:
    """GossipParameters of a small model; `apart` is the seed of random values, one set for each."""
    job = make_job(asked(*problem(), ob.Gossip(), optimizer, workers, 4, 1, **options))
    store = job.make_store(Log())
    found = store.parameters
    assert isinstance(found, GossipParameters)
    generator = torch.Generator().manual_seed(apart or 0)
    for worker in range(workers):
        found.enter(worker)
        if apart is not None:
            for flat in found.of(worker):
                for view in flat.views.values():
                    view.copy_(torch.randn(view.shape, generator=generator, dtype=view.dtype))
    return found


def step(found: GossipParameters, worker: int, sequence: int) -> Part:
    """One contribution of all ones."""
    payload = [Flat(flat.table) for flat in found.flats]
    for flat in payload:
        for view in flat.views.values():
            view.fill_(1.0)
    part = Part(worker, 1, sequence, 0, [], 4)
    found.update([Contribution(part, payload)])
    return part


def total(found: GossipParameters) -> list[torch.Tensor]:
    flats = [own.flats for own in found.own.values()]
    return [sum(f[0].views[name] for f in flats) for name in flats[0][0].views]  # type: ignore[misc]


@given(workers=st.integers(2, 6), seed=st.integers(0, 99), data=st.data())
def test_an_exchange_conserves_the_sum_and_leaves_two_alike(workers, seed, data):
    found = made(workers, apart=seed)
    one, other = data.draw(st.permutations(range(workers)))[:2]
    before, others = total(found), [w for w in range(workers) if w not in (one, other)]
    kept = {worker: found.own[worker].digest.sum() for worker in others}
    found.exchange(one, other)
    for was, now in zip(before, total(found), strict=True):
        torch.testing.assert_close(now, was, rtol=1e-14, atol=1e-14)
    assert found.own[one].digest.sum() == found.own[other].digest.sum()
    assert kept == {worker: found.own[worker].digest.sum() for worker in others}


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_without_a_rate_everybody_comes_to_the_mean_and_the_mean_stays(workers):
    found = made(workers, partial(torch.optim.SGD, lr=0.0), apart=3)
    before = total(found)
    assert len({own.digest.sum() for own in found.own.values()}) == workers
    for sequence in range(60):
        for worker in range(workers):
            step(found, worker, sequence)
    for name, was in zip(found.flats[0].views, before, strict=True):
        for worker in range(workers):
            mine = found.of(worker)[0].views[name]
            torch.testing.assert_close(mine, was / workers, rtol=1e-6, atol=1e-6)


def test_a_step_moves_its_worker_alone_after_the_meeting():
    found = made(2, partial(torch.optim.SGD, lr=0.5), apart=1)
    name = next(iter(found.flats[0].views))
    mean = (found.of(0)[0].views[name] + found.of(1)[0].views[name]) / 2
    assert step(found, 0, 0).partner == 1
    torch.testing.assert_close(found.of(1)[0].views[name], mean)
    torch.testing.assert_close(found.of(0)[0].views[name], mean - 0.5)
    found.refresh()
    torch.testing.assert_close(found.flats[0].views[name], mean - 0.25)


def test_every_worker_has_a_rule_of_its_own():
    found = made(2, partial(torch.optim.SGD, lr=0.5, momentum=0.9))
    for sequence in range(2):
        step(found, 0, sequence)
    states = [own.updaters[0].tensors_of_state() for own in found.own.values()]
    assert states[0]
    assert not states[1]


@given(workers=st.integers(2, 7), seed=st.integers(0, 9), worker=st.integers(0, 6))
def test_partners_are_by_chance_but_always_the_same(workers, seed, worker):
    worker %= workers
    found = made(workers)
    found.seed = seed
    met = [found.partner(worker, 1, sequence) for sequence in range(40)]
    assert met == [found.partner(worker, 1, sequence) for sequence in range(40)]
    across = {other for other in range(workers) if (other - worker) % 2}
    assert set(met) <= across
    if len(across) > 1:
        assert len(set(met)) > 1


def test_who_is_lost_is_not_met_and_comes_back_with_what_it_had():
    found = made(3, apart=2)
    before = found.own[1].digest.sum()
    found.forget(1)
    assert found.partner(0, 1, 0) == 2  # the only one left, though of the same parity
    found.refresh()
    name = next(iter(found.flats[0].views))
    mean = (found.of(0)[0].views[name] + found.of(2)[0].views[name]) / 2
    torch.testing.assert_close(found.flats[0].views[name], mean)
    found.enter(1)
    assert found.own[1].digest.sum() == before
    found.forget(0)
    found.forget(1)
    assert found.partner(2, 1, 0) is None
    found.forget(2)
    found.refresh()  # nobody is there: all of them count
    whole = sum(found.of(w)[0].views[name] for w in range(3)) / 3  # type: ignore[misc]
    torch.testing.assert_close(found.flats[0].views[name], whole)


def test_who_is_new_begins_at_the_mean():
    found = made(2, apart=4)
    found.enter(2)
    found.refresh()
    mean = found.of(2)[0].clone()
    found.forget(2)
    found.refresh()
    assert all(torch.equal(mean.views[n], v) for n, v in found.flats[0].views.items())


def test_state_goes_through_a_checkpoint():
    found = made(3, apart=5)
    for worker in range(3):
        step(found, worker, 0)
    found.forget(2)
    other = made(1)
    other.load({k: t.clone() for k, t in found.state().items()}, found.meta())
    assert other.digest() == found.digest()
    assert other.present == {0, 1}
    for both in (found, other):
        both.enter(2)
        for worker in range(3):
            step(both, worker, 1)
    assert other.digest() == found.digest()


def test_who_is_new_after_a_checkpoint_has_the_rates_of_that_time():
    schedule = ob.Schedule(partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), "version")
    one, other = (made(2, schedule=schedule) for _ in range(2))
    one.advance(4, 0, 4)
    other.load({k: t.clone() for k, t in one.state().items()}, one.meta())
    for found in (one, other):
        found.enter(2)
        step(found, 2, 0)
    assert other.digest() == one.digest()


def test_two_that_differ_in_one_replica_differ_in_their_hash():
    one, other = made(2), made(2)
    assert one.digest() == other.digest()
    view = next(iter(other.of(1)[0].views.values()))
    view.view(-1)[0] += 1
    assert one.digest() != other.digest()


def test_what_pairs_cannot_do_is_refused():
    for given_too in ({"wait": 1}, {"weigh": ob.Inverse()}, {"apply": ob.Rule("sgd")}):
        with pytest.raises(ob.ConfigError, match="meet in pairs"):
            ob.Discipline(ob.Gradient(), ob.Pair(), **given_too)
    with pytest.raises(ob.ConfigError, match="meet in pairs"):
        ob.Discipline(ob.Accumulated(2, 2), ob.Pair())
    assert ob.parse("gossip") == ob.Gossip()
    assert str(ob.Gossip()) == "gossip"
    assert ob.parse("custom:gather=pair") == ob.Gossip()
