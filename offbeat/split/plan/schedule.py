"""Schedules of a pipeline: which process does what in which order, and when, event by event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"


class Op(NamedTuple):
    """A piece of work: a forward or backward pass of one microbatch through one stage.

    Where a schedule splits the backward pass, BACKWARD is the part that the stage before waits
    for, the gradient of its input, and WEIGHT the gradient of its parameters.
    """

    kind: str
    stage: int
    microbatch: int


class TimeSlot(NamedTuple):
    """An op with its time."""

    op: Op
    since: float
    until: float


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch: at every stage, and on the links to its two neighbours."""

    forward: Sequence[float]
    backward: Sequence[float]
    onward: Sequence[float] = ()  # from each stage but the last to the next
    back: Sequence[float] = ()  # from each stage but the first to the one before


@dataclass(frozen=True)
class PipelineTimeline:
    """What every process of a replica does in one step, and when."""

    slots: tuple[tuple[TimeSlot, ...], ...]

    @property
    def seconds(self) -> float:
        return max(mine[-1].until for mine in self.slots)

    def busy(self, process: int) -> float:
        """Seconds in which a process computes."""
        return sum(slot.until - slot.since for slot in self.slots[process])

    @property
    def idle_share(self) -> float:
        """Of all processes' time in the step."""
        total = self.seconds * len(self.slots)
        busy = sum(self.busy(process) for process in range(len(self.slots)))
        return 1 - busy / total if total else 0.0


def orders(schedule: str, processes: int, microbatches: int, chunks: int = 1) -> list[list[Op]]:
    """What each process does in one step, in order; stage s belongs to process s mod processes."""
    word = schedule.partition(":")[0]
    if word in ("layers", "gpipe"):
        return [_all_then_all(process, microbatches) for process in range(processes)]
    return [
        _alternating(process, processes, microbatches, chunks, word) for process in range(processes)
    ]


def in_flight(order: Sequence[Op]) -> dict[int, int]:
    """By stage of a process, the most microbatches whose activations it holds at once."""
    most: dict[int, int] = {}
    for counts in _counts(order):
        for stage, count in counts.items():
            most[stage] = max(most.get(stage, 0), count)
    return most


def most_held(order: Sequence[Op], sizes: Mapping[int, float]) -> float:
    """The most bytes of activations a process holds at once, given those of each of its stages."""
    return max(
        sum(count * sizes[stage] for stage, count in counts.items()) for counts in _counts(order)
    )


def simulate(order: Sequence[Sequence[Op]], times: StageTimes) -> PipelineTimeline:
    """Run the ops of each process in their order, each as soon as what it needs is there."""
    stages = len(times.forward)
    split = any(op.kind == WEIGHT for op in order[0])
    arrived: dict[Op, float] = {}  # when the input of an op is with its process
    links: dict[tuple[int, str], float] = {}  # until when a link is busy
    free = [0 * times.forward[0] for _ in order]
    done: list[list[TimeSlot]] = [[] for _ in order]
    left = sum(len(mine) for mine in order)
    while left:
        before = left
        for process, mine in enumerate(order):
            while len(done[process]) < len(mine):
                op = mine[len(done[process])]
                first = op.kind == FORWARD and op.stage == 0
                if not first and op not in arrived:
                    break
                since = free[process] if first else max(free[process], arrived[op])
                until = since + _work(op, times, split)
                free[process] = until
                done[process].append(TimeSlot(op, since, until))
                _deliver(op, until, stages, times, links, arrived)
                left -= 1
        assert left < before, "the order of ops has a circle"
    return PipelineTimeline(tuple(tuple(mine) for mine in done))


# ---------------------------------------------------------------- orders


def _all_then_all(process: int, microbatches: int) -> list[Op]:
    return [
        Op(kind, process, number) for kind in (FORWARD, BACKWARD) for number in range(microbatches)
    ]


def _alternating(
    process: int, processes: int, microbatches: int, chunks: int, schedule: str
) -> list[Op]:
    """Some forward passes to fill the pipeline, then one forward and one backward in turns.

    These are the orders of torch's Schedule1F1B, ScheduleInterleaved1F1B and
    ScheduleInterleavedZeroBubble.
    """
    total = microbatches * chunks
    apart = processes - 1 - process
    # With several chunks a gradient goes round twice as far before the first one returns.
    fill = (chunks - 1) * processes + (2 if schedule == "interleaved" else 1) * apart
    fill = min(fill, total)
    forward = [_turn(FORWARD, step, process, processes, chunks) for step in range(total)]
    backward = [_turn(BACKWARD, step, process, processes, chunks) for step in range(total)]
    weights = [op._replace(kind=WEIGHT) for op in backward] if schedule == "zero-bubble" else []
    found = forward[:fill]
    for step in range(total):
        found += forward[fill + step : fill + step + 1]
        found.append(backward[step])
        # Later stages get their first gradients sooner, and put off more of their own weights.
        if step >= process and weights:
            found.append(weights.pop(0))
    return found + weights


def _turn(kind: str, step: int, process: int, processes: int, chunks: int) -> Op:
    """The op of a process's turn `step`: a round of microbatches through each chunk in turn."""
    round_, place = divmod(step, processes * chunks)
    chunk, offset = divmod(place, processes)
    if kind == BACKWARD:
        chunk = chunks - 1 - chunk
    if chunks == 1:
        return Op(kind, process, step)
    return Op(kind, chunk * processes + process, round_ * processes + offset)


def _counts(order: Sequence[Op]) -> list[dict[int, int]]:
    """Microbatches in flight by stage, after each op."""
    last = WEIGHT if any(op.kind == WEIGHT for op in order) else BACKWARD
    held: dict[int, int] = {}
    found = []
    for op in order:
        change = (op.kind == FORWARD) - (op.kind == last)
        held[op.stage] = held.get(op.stage, 0) + change
        found.append(dict(held))
    return found


# ---------------------------------------------------------------- events


def _work(op: Op, times: StageTimes, split: bool) -> float:
    if op.kind == FORWARD:
        return times.forward[op.stage]
    # Gradients of inputs and of weights are each about half of a backward pass.
    return times.backward[op.stage] / 2 if split else times.backward[op.stage]


def _deliver(
    op: Op,
    until: float,
    stages: int,
    times: StageTimes,
    links: dict[tuple[int, str], float],
    arrived: dict[Op, float],
) -> None:
    """Send on what an op made; a link carries one thing at a time in each direction."""
    kind, stage, number = op
    if kind == WEIGHT:
        return
    if kind == BACKWARD:
        arrived[Op(WEIGHT, stage, number)] = until
    if kind == FORWARD and stage == stages - 1:
        arrived[Op(BACKWARD, stage, number)] = until
        return
    if kind == BACKWARD and stage == 0:
        return
    if kind == FORWARD:
        towards, seconds = stage + 1, times.onward[stage] if times.onward else 0
    else:
        towards, seconds = stage - 1, times.back[stage - 1] if times.back else 0
    since = max(until, links.get((stage, kind), until))
    links[stage, kind] = since + seconds
    arrived[Op(kind, towards, number)] = since + seconds
