"""From costs to figures: where a layout cuts a model, and what a step takes of each process."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from offbeat.errors import ConfigError
from offbeat.split.layout import Layout
from offbeat.split.plan.blocks import Block, number
from offbeat.split.plan.costs import HeldBytes, Machines, Profile, held
from offbeat.split.plan.partition import Problem, check_count, evenly, partition
from offbeat.split.plan.schedule import Op, StageTimes, in_flight, most_held, orders, simulate


@dataclass(frozen=True)
class StageFigures:
    """One stage of a replica: its blocks, and what a microbatch takes."""

    process: int
    first: str
    last: str
    blocks: int
    forward: float  # seconds
    backward: float  # seconds


@dataclass(frozen=True)
class PredictedProcess:
    """One process of a replica in one step; bytes to neighbours are of the whole step."""

    busy: float  # seconds
    idle_share: float
    memory: HeldBytes
    sent: int  # to the neighbours: activations onward, gradients back
    received: int
    exchanged: int  # gradients to the store, and as much in parameters back


@dataclass(frozen=True)
class Prediction:
    """What one split of a model into stages comes to."""

    starts: tuple[int, ...]
    stages: tuple[StageFigures, ...]
    processes: tuple[PredictedProcess, ...]
    seconds: float  # of a step
    idle_share: float


def where(
    layout: Layout,
    blocks: Sequence[Block],
    profile: Profile,
    machines: Machines,
    state_copies: float = 0.0,
) -> tuple[int, ...]:
    """The first block of each stage, as the layout's split asks."""
    check_count_of(layout, len(blocks))
    if not isinstance(layout.split, str):
        return at_names(layout, blocks)
    if layout.split == "count":
        return evenly([1.0] * len(blocks), layout.stages)
    if layout.split == "parameters":
        return evenly([float(cost.parameters) for cost in profile.blocks], layout.stages)
    return partition(by_time(layout, profile, machines, state_copies))


def check_count_of(layout: Layout, blocks: int) -> None:
    """Refuse a layout with more stages than the model has blocks."""
    if layout.chunks > 1 and layout.stages > blocks:
        raise ConfigError(
            f"the model has {blocks} blocks, too few for pp={layout.pp} processes with "
            f"{layout.chunks} stages each: write a smaller pp, or schedule=1f1b"
        )
    check_count(blocks, layout.stages)


def at_names(layout: Layout, blocks: Sequence[Block]) -> tuple[int, ...]:
    """The first block of each stage where `split` names them."""
    starts = (0, *(number(blocks, name) for name in layout.split))
    for name, (before, start) in zip(layout.split, pairwise(starts), strict=True):
        if start <= before:
            told = "is where the first stage begins" if start == 0 else "comes too early"
            raise ConfigError(
                f"split: {name!r} {told}; name the first block of every stage but the first, in "
                "the order in which the blocks run"
            )
    return starts


def by_time(
    layout: Layout, profile: Profile, machines: Machines, state_copies: float = 0.0
) -> Problem:
    """The problem that the split by time solves."""
    flights: dict[int, int] = {}
    for order in _orders(layout):
        flights |= in_flight(order)

    def memory(stage: int, first: int, last: int) -> float:
        return held(profile, first, last, state_copies, flights[stage]).total

    # Activations and gradients travel in opposite directions, at the same time.
    cuts = [machines.transfer(max(cost.output, cost.returned)) for cost in profile.blocks[:-1]]
    return Problem(
        times=profile.times,
        speeds=tuple(machines.speeds[stage % layout.pp] for stage in range(layout.stages)),
        cuts=tuple(cuts) if any(cuts) else (),
        memory=memory,
        # The stages of one process share its memory.
        limit=None if machines.memory is None else machines.memory / layout.chunks,
    )


def predict(
    layout: Layout,
    profile: Profile,
    machines: Machines,
    starts: Sequence[int],
    state_copies: float = 0.0,
) -> Prediction:
    """Simulate one step of the stages that begin at `starts`."""
    ends = list(pairwise([*starts, len(profile)]))
    speeds = [machines.speeds[stage % layout.pp] for stage in range(len(ends))]
    times = _times(profile, machines, ends, speeds)
    order = _orders(layout)
    timeline = simulate(order, times)
    seconds = _steady(layout, times) if layout.asynchronous else timeline.seconds
    stages = tuple(
        StageFigures(
            stage % layout.pp,
            profile.blocks[first].name,
            profile.blocks[last - 1].name,
            last - first,
            times.forward[stage],
            times.backward[stage],
        )
        for stage, (first, last) in enumerate(ends)
    )
    processes = []
    for process in range(layout.pp):
        mine = range(process, len(ends), layout.pp)
        parts = [held(profile, *ends[stage], state_copies) for stage in mine]
        sizes = {stage: float(profile.activations(*ends[stage])) for stage in mine}
        busy = timeline.busy(process)
        sent, received = _traffic(layout, profile, ends, mine)
        processes.append(
            PredictedProcess(
                busy=busy,
                idle_share=1 - busy / seconds if seconds else 0.0,
                memory=HeldBytes(
                    sum(part.parameters for part in parts) * layout.under_way,
                    sum(part.gradients for part in parts),
                    sum(part.state for part in parts),
                    most_held(order[process], sizes),
                ),
                sent=sent,
                received=received,
                exchanged=sum(part.gradients for part in parts),
            )
        )
    idle = sum(process.idle_share for process in processes) / len(processes)
    return Prediction(tuple(starts), stages, tuple(processes), seconds, idle)


def _steady(layout: Layout, times: StageTimes) -> float:
    """Seconds of a step when one follows the other: what some steps more take, for each."""
    few, more = layout.pp + 2, layout.pp + 6
    ends = [
        simulate(orders("1f1b", layout.pp, layout.pieces * count), times).seconds
        for count in (few, more)
    ]
    return (ends[1] - ends[0]) / (more - few)


def improved(
    layout: Layout,
    profile: Profile,
    machines: Machines,
    found: Prediction,
    state_copies: float = 0.0,
) -> Prediction:
    """Move one cut at a time to where the simulated step is fastest, until no move helps.

    The split by time makes the slowest stage fast. With few microbatches, filling and emptying
    the pipeline count as well, and so does a link that is waited for.
    """
    while True:
        best = found
        for cut in range(1, len(found.starts)):
            after = [*found.starts, len(profile)][cut + 1]
            for place in range(found.starts[cut - 1] + 1, after):
                starts = (*found.starts[:cut], place, *found.starts[cut + 1 :])
                other = predict(layout, profile, machines, starts, state_copies)
                if other.seconds < best.seconds and not crowded(other, machines):
                    best = other
        if best is found:
            return found
        found = best


def crowded(found: Prediction, machines: Machines) -> list[int]:
    """Processes that would hold more than they may."""
    limit = machines.memory
    return [
        number
        for number, process in enumerate(found.processes)
        if limit is not None and process.memory.total > limit
    ]


def _orders(layout: Layout) -> list[list[Op]]:
    return orders(layout.schedule, layout.pp, layout.pieces, layout.chunks)


def _times(
    profile: Profile,
    machines: Machines,
    ends: Sequence[tuple[int, int]],
    speeds: Sequence[float],
) -> StageTimes:
    costs = [profile.blocks[first:last] for first, last in ends]
    return StageTimes(
        [sum(c.forward for c in mine) / v for mine, v in zip(costs, speeds, strict=True)],
        [sum(c.backward for c in mine) / v for mine, v in zip(costs, speeds, strict=True)],
        [machines.transfer(mine[-1].output) for mine in costs[:-1]],
        [machines.transfer(mine[-1].returned) for mine in costs[:-1]],
    )


def _traffic(
    layout: Layout, profile: Profile, ends: Sequence[tuple[int, int]], mine: Sequence[int]
) -> tuple[int, int]:
    """Bytes that a process sends to its neighbours and peers and receives in one step."""
    sent = received = 0
    for stage in mine:
        first, last = ends[stage]
        shared = sum(block.exchanged for block in profile.blocks[first:last])
        sent, received = sent + shared, received + shared
        if stage:
            sent += profile.blocks[first - 1].returned
            received += profile.blocks[first - 1].output
        if stage < len(ends) - 1:
            sent += profile.blocks[last - 1].output
            received += profile.blocks[last - 1].returned
    return sent * layout.pieces, received * layout.pieces
