"""Schedules: their orders are torch's, and equal stages give the known formulas exactly."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from offbeat.split.plan.schedule import (
    BACKWARD,
    FORWARD,
    Op,
    StageTimes,
    in_flight,
    most_held,
    orders,
    simulate,
)

ONE, TWO = Fraction(1), Fraction(2)
SIZES = [(1, 1), (2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (4, 8), (6, 9)]


def equal(processes: int, chunks: int = 1) -> StageTimes:
    return StageTimes([ONE] * processes * chunks, [TWO] * processes * chunks)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_idle_share_of_equal_stages(schedule: str, p: int, m: int) -> None:
    timeline = simulate(orders(schedule, p, m), equal(p))
    assert timeline.idle_share == Fraction(p - 1, m + p - 1)
    assert timeline.seconds == 3 * (m + p - 1)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_idle_share_of_layers(p: int) -> None:
    assert simulate(orders("layers", p, 1), equal(p)).idle_share == 1 - Fraction(1, p)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_of_equal_parts(p: int, m: int) -> None:
    # Forward, gradient of inputs and gradient of weights take one second each.
    assert simulate(orders("zero-bubble", p, m), equal(p)).seconds == 3 * m + p - 1


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 6, 3), (3, 6, 2), (4, 8, 2), (4, 4, 3)])
def test_interleaved_of_equal_chunks(p: int, m: int, v: int) -> None:
    seconds = simulate(orders("interleaved", p, m, v), equal(p, v)).seconds
    ideal = 3 * v * m
    assert (seconds - ideal) / ideal == Fraction(p - 1, v * m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8)])
@pytest.mark.parametrize(
    ("ours", "torchs", "chunks"),
    [
        ("gpipe", "GPipe", 1),
        ("interleaved", "Interleaved1F1B", 2),
        ("interleaved", "Interleaved1F1B", 3),
    ],
)
def test_orders_are_those_of_torch(ours: str, torchs: str, chunks: int, p: int, m: int) -> None:
    theirs = get_schedule_ops(torchs, p, m, num_stages_per_rank=chunks)
    wanted = [
        [str(action) for action in mine if action and "REDUCE" not in str(action)]
        for mine in theirs
    ]
    found = orders(ours, p, m, chunks)
    assert [[f"{op.stage}{op.kind}{op.microbatch}" for op in mine] for mine in found] == wanted


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations_in_flight(p: int, m: int) -> None:
    for stage in range(p):
        assert in_flight(orders("gpipe", p, m)[stage]) == {stage: m}
        assert in_flight(orders("1f1b", p, m)[stage]) == {stage: min(m, p - stage)}
        # Late weights keep their activations for longer: all stages as much as 1F1B's first.
        assert in_flight(orders("zero-bubble", p, m)[stage]) == {stage: p}


def test_most_held_is_of_one_moment() -> None:
    order = [Op(FORWARD, 0, 0), Op(BACKWARD, 0, 0), Op(FORWARD, 1, 0), Op(BACKWARD, 1, 0)]
    assert most_held(order, {0: 5.0, 1: 7.0}) == 7.0


def test_a_slow_stage_and_links_are_waited_for() -> None:
    times = StageTimes([1, 3], [2, 2], onward=[10], back=[20])
    first, second = simulate(orders("1f1b", 2, 2), times).slots
    assert [(slot.since, slot.until) for slot in second] == [(11, 14), (14, 16), (21, 24), (24, 26)]
    # The link is busy until 36 with the first gradient, and brings the second one at 56.
    assert [(slot.since, slot.until) for slot in first] == [(0, 1), (1, 2), (36, 38), (56, 58)]


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    p=st.integers(1, 4),
    rounds=st.integers(1, 3),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"]),
)
def test_every_op_runs_once_and_after_what_it_needs(
    data: st.DataObject, p: int, rounds: int, schedule: str
) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    m, stages = p * rounds, p * chunks
    seconds = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    times = StageTimes(data.draw(seconds), data.draw(seconds))
    timeline = simulate(orders(schedule, p, m, chunks), times)
    when = {slot.op: slot for mine in timeline.slots for slot in mine}
    kinds = 3 if schedule == "zero-bubble" else 2
    assert len(when) == sum(map(len, timeline.slots)) == kinds * m * stages
    for (kind, stage, number), slot in when.items():
        needed = None
        if kind == FORWARD and stage:
            needed = Op(FORWARD, stage - 1, number)
        elif kind == BACKWARD:
            last = stage == stages - 1
            needed = Op(FORWARD, stage, number) if last else Op(BACKWARD, stage + 1, number)
        if needed:
            assert slot.since >= when[needed].until
    for process, mine in enumerate(timeline.slots):
        assert {slot.op.stage % p for slot in mine} == {process}
        assert all(a.until <= b.since for a, b in pairwise(mine))
    work = m * (sum(times.forward) + sum(times.backward))
    assert sum(timeline.busy(process) for process in range(p)) == pytest.approx(work)
