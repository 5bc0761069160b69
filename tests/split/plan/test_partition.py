"""The partitioner against exhaustive search."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat as ob
from offbeat.recipes.chars import CharTransformer
from offbeat.recipes.resnet import ResNet50
from offbeat.split.plan.partition import Problem, evenly, partition


def all_splits(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *cuts) for cuts in combinations(range(1, blocks), stages - 1)]


def fits(problem: Problem, starts: tuple[int, ...]) -> bool:
    ends = pairwise([*starts, len(problem.times)])
    return all(problem.fits(number, *mine) for number, mine in enumerate(ends))


def slowest(problem: Problem, starts: tuple[int, ...]) -> float:
    """The time of the slowest stage, or of the slowest link into one."""
    ends = pairwise([*starts, len(problem.times)])
    stages = [
        sum(problem.times[first:last]) / speed
        for (first, last), speed in zip(ends, problem.speeds, strict=True)
    ]
    links = [problem.cuts[start - 1] for start in starts[1:] if problem.cuts]
    return max(stages + links)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    blocks = draw(st.integers(1, 8))
    stages = draw(st.integers(1, min(blocks, 4)))
    whole = st.integers(0, 20).map(float)
    times = draw(st.lists(whole, min_size=blocks, max_size=blocks))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=stages, max_size=stages))
    cuts = draw(st.just(()) | st.lists(whole, min_size=blocks - 1, max_size=blocks - 1))
    sizes = draw(st.lists(st.integers(0, 9), min_size=blocks, max_size=blocks))
    limit = draw(st.none() | st.integers(5, 40))

    def memory(stage: int, first: int, last: int) -> float:
        # As under 1F1B, earlier stages keep more.
        return sum(sizes[first:last]) * (stages - stage)

    return Problem(tuple(times), tuple(speeds), tuple(cuts), memory, limit)


@settings(deadline=None, max_examples=150)
@given(problems())
def test_no_split_has_a_faster_slowest_stage(problem: Problem) -> None:
    every = all_splits(len(problem.times), len(problem.speeds))
    possible = [starts for starts in every if fits(problem, starts)]
    if not possible:
        with pytest.raises(ob.ConfigError) as error:
            partition(problem)
        assert problem.memory is not None
        least = min(
            max(
                problem.memory(number, *mine)
                for number, mine in enumerate(pairwise([*starts, len(problem.times)]))
            )
            for starts in every
        )
        assert f"the best needs {least:,.0f}: allow that much" in str(error.value)
        return
    found = partition(problem)
    assert found in possible
    assert slowest(problem, found) == min(slowest(problem, starts) for starts in possible)


def test_a_fast_process_gets_more() -> None:
    assert partition(Problem((1.0,) * 6, (2.0, 1.0))) == (0, 4)
    assert partition(Problem((1.0,) * 6, (1.0, 2.0))) == (0, 2)


def test_costly_cuts_are_avoided() -> None:
    assert partition(Problem((1.0,) * 4, (1.0, 1.0), (0.0, 9.0, 0.0))) in {(0, 1), (0, 3)}
    assert partition(Problem((1.0,) * 4, (1.0, 1.0))) == (0, 2)


def test_equally_fast_splits_are_as_even_as_can_be() -> None:
    # The block of 9 decides; what is left is shared 2 and 2, not 1 and 3.
    assert evenly([9.0, 1.0, 1.0, 1.0, 1.0], 3) == (0, 1, 3)
    assert evenly([1.0] * 7, 3) in {(0, 2, 4), (0, 2, 5), (0, 3, 5)}


def test_memory_moves_a_cut() -> None:
    def memory(stage: int, first: int, last: int) -> float:
        return 10.0 * (last - first)

    assert partition(Problem((3.0, 1.0, 1.0, 1.0), (1.0, 1.0))) == (0, 1)
    limited = Problem((3.0, 1.0, 1.0, 1.0), (1.0, 1.0), (), memory, 20.0)
    assert partition(limited) == (0, 2)


def test_bad_problems() -> None:
    with pytest.raises(ob.ConfigError, match="3 blocks, too few for 4 stages: write pp=3 or less"):
        evenly([1.0] * 3, 4)
    with pytest.raises(ob.ConfigError, match="a speed must be a number above zero"):
        Problem((1.0, 1.0), (1.0, 0.0))
    with pytest.raises(ob.ConfigError, match="1 cuts"):
        Problem((1.0, 1.0), (1.0,), (1.0, 2.0))


REAL = {
    "ResNet-50": (lambda: ResNet50(10), lambda: torch.randn(2, 3, 32, 32)),
    "characters": (
        lambda: CharTransformer("abcdefgh", 8, 32, 6, 2),
        lambda: torch.randint(8, (4, 8)),
    ),
}


@pytest.mark.parametrize("speeds", [(1.0,) * 2, (1.0,) * 4, (2.0, 1.0), (1.0, 2.0, 2.0, 1.0)])
@pytest.mark.parametrize("name", REAL)
def test_real_models_are_cut_as_well_as_can_be(name: str, speeds: tuple[float, ...]) -> None:
    """With the times that were measured, no split at all has a stage less as its slowest."""
    make, sample = REAL[name]
    model: nn.Module = make()
    inputs: Tensor = sample()
    layout = ob.Layout(pp=len(speeds), microbatches=1, schedule="gpipe")
    told = ob.explain(layout, model, inputs, speeds=speeds)
    problem = Problem(told.profile.times, speeds)
    starts = [cost.name for cost in told.profile.blocks]
    found = slowest(problem, (0, *(starts.index(first) for first in told.split)))
    best = min(slowest(problem, every) for every in all_splits(len(problem.times), len(speeds)))
    assert found == pytest.approx(best)
    if speeds == (2.0, 1.0):  # the faster process has about two thirds of the work
        first = told.stages[0]
        share = 2 * (first.forward + first.backward) / sum(problem.times)
        largest = max(problem.times) / sum(problem.times)
        assert abs(share - 2 / 3) <= largest
