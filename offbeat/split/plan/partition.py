"""The partitioner: consecutive blocks into stages, the slowest stage as fast as can be."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from offbeat.errors import ConfigError

# Bytes of the stage with this number if it has the blocks `first` to `last` - 1.
StageMemory = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Problem:
    """Blocks with their `times`, and one process per stage with its speed.

    `cuts` are the seconds that the link behind each block but the last would be busy for one
    microbatch. `memory` gives the bytes of a stage, `limit` the most it may have.
    """

    times: tuple[float, ...]
    speeds: tuple[float, ...]
    cuts: tuple[float, ...] = ()
    memory: StageMemory | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.cuts and len(self.cuts) != len(self.times) - 1:
            raise ConfigError(
                f"{len(self.times)} blocks have {len(self.times) - 1} cuts between them, "
                f"not {len(self.cuts)}"
            )
        for speed in self.speeds:
            if not (speed > 0 and math.isfinite(speed)):
                raise ConfigError(f"a speed must be a number above zero, not {speed}; write 1")
        check_count(len(self.times), len(self.speeds))

    def fits(self, number: int, first: int, last: int) -> bool:
        """Whether the stage stays within the limit."""
        if self.limit is None or self.memory is None:
            return True
        return self.memory(number, first, last) <= self.limit


def check_count(blocks: int, stages: int) -> None:
    """Refuse more stages than there are blocks."""
    if stages > blocks:
        few = "1 block" if blocks == 1 else f"{blocks} blocks"
        raise ConfigError(
            f"the model has {few}, too few for {stages} stages: write pp={blocks} or less"
        )


def partition(problem: Problem) -> tuple[int, ...]:
    """The first block of each stage, such that the slowest stage is the fastest possible.

    This is PipeDream's dynamic programme without replicated stages: a replica of the model is
    replicated as a whole. Among equally fast splits it takes the most even one.
    """
    stages = len(problem.speeds)
    allowed = {
        (number, first, last): time
        for number, first, last, time in _candidates(problem)
        if problem.fits(number, first, last)
    }
    slowest, _ = _best(len(problem.times), stages, allowed, max)
    if math.isinf(slowest):
        raise ConfigError(_too_small(problem))
    even = {stage: time * time for stage, time in allowed.items() if time <= slowest}
    _, starts = _best(len(problem.times), stages, even, lambda before, here: before + here)
    return starts


def evenly(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first block of each stage, such that the heaviest stage is the lightest possible."""
    return partition(Problem(tuple(weights), (1.0,) * stages))


def _candidates(problem: Problem) -> list[tuple[int, int, int, float]]:
    """Every stage that can be part of a split: number, first block, end, seconds."""
    blocks, stages = len(problem.times), len(problem.speeds)
    before = [0.0, *accumulate(problem.times)]
    found = []
    for number in range(stages):
        behind = stages - number - 1
        for first in range(number, blocks - behind) if number else (0,):
            ends = range(first + 1, blocks - behind + 1) if behind else (blocks,)
            link = problem.cuts[first - 1] if problem.cuts and first else 0.0
            for last in ends:
                time = (before[last] - before[first]) / problem.speeds[number]
                found.append((number, first, last, max(time, link)))
    return found


def _best(
    blocks: int,
    stages: int,
    allowed: dict[tuple[int, int, int], float],
    add: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The cheapest way through the allowed stages; infinity if there is none."""
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for number in range(stages):
        further: dict[int, tuple[float, tuple[int, ...]]] = {}
        for (mine, first, last), cost in allowed.items():
            if mine != number or first not in reached:
                continue
            so_far, starts = reached[first]
            total = add(so_far, cost)
            if last not in further or total < further[last][0]:
                further[last] = (total, (*starts, first))
        reached = further
    return reached.get(blocks, (math.inf, ()))


def _too_small(problem: Problem) -> str:
    """The least memory that some split needs, for the error that says it is not there."""
    assert problem.memory is not None
    sizes = {
        (number, first, last): problem.memory(number, first, last)
        for number, first, last, _ in _candidates(problem)
    }
    least, _ = _best(len(problem.times), len(problem.speeds), sizes, max)
    return (
        f"no split into {len(problem.speeds)} stages keeps every process within "
        f"{problem.limit:,.0f} bytes; the best needs {least:,.0f}: allow that much memory, "
        "or write a larger pp, or more microbatches"
    )
