"""Lock-step in its three forms is large-batch SGD."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from tests.contract.common import (
    MOMENTUM,
    SGD,
    assert_close,
    clusters,
    examples,
    plain,
    problem,
    run,
    seeds,
)
from tests.contract.real import level

BATCH = 3


def _problem(workers: int, seed: int):
    return problem(samples=workers * BATCH * 3, seed=seed)


@examples(20)
@given(clusters(), seeds)
def test_ssp_without_slack_is_a_large_batch_at_the_sum_of_the_rates(engine, cluster, seed):
    n = len(cluster)
    what = level(engine, _problem(n, seed), n)
    got = run(engine, what, ob.SSP(0), cluster=cluster, optimizer=SGD, batch_size=BATCH, seed=seed)
    large = partial(torch.optim.SGD, lr=n * 0.05)
    assert_close(got.model, plain(what, large, batch_size=n * BATCH, seed=seed))
    assert got.summary().updates == 2 * 3 * n


@examples(20)
@given(
    clusters(),
    seeds,
    st.sampled_from([SGD, MOMENTUM, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)]),
)
def test_gathering_all_is_a_large_batch_with_any_optimiser(engine, cluster, seed, optimizer):
    n = len(cluster)
    what = _problem(n, seed)
    got = run(
        engine, what, ob.BSP(), cluster=cluster, optimizer=optimizer, batch_size=BATCH, seed=seed
    )
    assert_close(got.model, plain(what, optimizer, batch_size=n * BATCH, seed=seed), 1e-10)
    assert got.summary().updates == 2 * 3


@examples(20)
@given(
    clusters(),
    seeds,
    st.sampled_from([ob.Average(1), ob.Average(1, "keep"), ob.LocalSGD(1)]),
    st.sampled_from([SGD, MOMENTUM]),
)
def test_averaging_every_step_is_a_large_batch(engine, cluster, seed, discipline, optimizer):
    """With heavy-ball momentum too: it is linear, so the mean of buffers is the buffer of means."""
    n = len(cluster)
    what = _problem(n, seed)
    got = run(
        engine, what, discipline, cluster=cluster, optimizer=optimizer, batch_size=BATCH, seed=seed
    )
    assert_close(got.model, plain(what, optimizer, batch_size=n * BATCH, seed=seed))


def test_a_short_last_batch_counts_by_its_samples(engine):
    """Three workers, 7 samples in batches of 3: the round is 3 + 3 + 1 and its mean that of 7."""
    what = problem(samples=7)
    got = run(engine, what, ob.BSP(), workers=3, optimizer=SGD, batch_size=3)
    assert_close(got.model, plain(what, SGD, batch_size=7))


@pytest.mark.parametrize("discipline", [ob.SSP(1), ob.ASP(), ob.LocalSGD(2)])
def test_looser_disciplines_are_not_a_large_batch(engine, discipline):
    """So that the equalities above say something."""
    what = _problem(3, 0)
    got = run(engine, what, discipline, cluster="10ms,20ms,31ms", optimizer=SGD, batch_size=BATCH)
    for rate in (0.05, 0.15):
        other = plain(what, partial(torch.optim.SGD, lr=rate), batch_size=3 * BATCH)
        with pytest.raises(AssertionError):
            assert_close(got.model, other)
