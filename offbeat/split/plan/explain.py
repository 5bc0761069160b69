"""`explain`: what a layout of a model would cost on this machine, and where to cut it better."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offbeat.config.units import bandwidth as bytes_per_second
from offbeat.errors import ConfigError
from offbeat.split.layout import Layout, as_layout
from offbeat.split.plan.blocks import Block, find, ties, whole, wrappers
from offbeat.split.plan.costs import Machines, Profile
from offbeat.split.plan.measure import profile as measured
from offbeat.split.plan.measure import state_copies
from offbeat.split.plan.predict import (
    PredictedProcess,
    Prediction,
    StageFigures,
    at_names,
    check_count_of,
    crowded,
    improved,
    predict,
    where,
)
from offbeat.split.stages import check_same, tied_across
from offbeat.split.tensor_shards import find as find_shards
from offbeat.split.tensor_shards import planned
from offbeat.split.tree import batch_size, head

# A split has to save more than this before it is worth naming: times vary by as much.
WORTHWHILE = 0.02

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Better:
    """A split that is faster than the one that was asked for."""

    split: tuple[str, ...]
    seconds: float
    saved: float  # share of the step's time


@dataclass(frozen=True)
class Explanation:
    """What one step of a layout is predicted to take; times in seconds, sizes in bytes."""

    layout: str
    processes: int  # of all replicas
    batch_size: int
    microbatches: int
    seconds: float  # of a step of one replica
    alone: float  # of the same microbatches, all by one process of speed 1
    idle_share: float
    samples_per_second: float  # of all replicas
    stages: tuple[StageFigures, ...]
    per_process: tuple[PredictedProcess, ...]  # of one replica
    split: tuple[str, ...]  # the first block of every stage but the first
    better: Better | None
    notes: tuple[str, ...]
    profile: Profile


def check(layout: Layout | str, model: nn.Module, batch_size: int) -> tuple[Block, ...]:
    """Refuse a layout that does not fit the model or the batch; returns the model's blocks.

    Nothing is computed and no process is started.
    """
    layout = as_layout(layout)
    if layout.schedule == "zero-bubble" and (found := wrappers(model)):
        raise ConfigError(
            f"the model has modules wrapped in {found[0]}, which merges gradients before "
            "schedule=zero-bubble has computed them: unwrap them, or write schedule=1f1b"
        )
    blocks = whole(model) if layout.stages == 1 else find(model)
    check_count_of(layout, len(blocks))
    if not isinstance(layout.split, str):
        at_names(layout, blocks)
    if layout.tp > 1:
        find_shards(model, layout.tp)
    layout.microbatch(batch_size)
    return blocks


def explain(
    layout: Layout | str,
    model: nn.Module,
    sample: Any,
    *,
    optimizer: OptimizerFactory | None = None,
    speeds: Sequence[float] | None = None,
    bandwidth: str | float = "inf",
    memory: float | None = None,
) -> Explanation:
    """Predict a step of `layout` from the model's blocks, measured here on `sample`.

    `sample` is what the model takes for one batch, or the `profile` of an earlier explanation.
    `speeds` are those of a replica's processes in the order of their stages, 1 being as fast as
    here; `bandwidth` is of the links between them, `memory` the most bytes each may hold.
    `optimizer` counts its state in. No process is started.
    """
    layout = as_layout(layout)
    known = isinstance(sample, Profile)
    batch = sample.samples * layout.pieces if known else batch_size(sample)
    blocks = check(layout, model, batch)
    machines = _machines(layout, speeds, bandwidth, memory)
    copies = state_copies(optimizer)
    profile = _known(blocks, sample) if known else _measured(layout, model, blocks, sample)
    each = profile.divided(layout.tp, machines.bandwidth) if layout.tp > 1 else profile
    asked = predict(layout, each, machines, where(layout, blocks, each, machines, copies), copies)
    alone = replace(layout, replicas=1, pp=1, tp=1, schedule="layers", microbatches=1, split="time")
    one = predict(alone, profile, Machines((1.0,)), (0,))
    return Explanation(
        layout=str(layout),
        processes=layout.processes,
        batch_size=batch,
        microbatches=layout.pieces,
        seconds=asked.seconds,
        alone=one.seconds * layout.pieces,
        idle_share=asked.idle_share,
        samples_per_second=layout.replicas * batch / asked.seconds if asked.seconds else 0.0,
        stages=asked.stages,
        per_process=asked.processes,
        split=_names(blocks, asked.starts),
        better=_better(layout, blocks, each, machines, asked, copies),
        notes=tuple(_notes(layout, model, blocks, machines, asked, profile)),
        profile=profile,
    )


def _machines(
    layout: Layout,
    speeds: Sequence[float] | None,
    bandwidth: str | float,
    memory: float | None,
) -> Machines:
    given = tuple(speeds) if speeds is not None else (1.0,) * layout.pp
    if len(given) != layout.pp:
        raise ConfigError(
            f"pp={layout.pp} has {layout.pp} processes and speeds has {len(given)} numbers: "
            f"write {','.join(['2', *['1'] * (layout.pp - 1)])} if the first is twice as fast"
        )
    for speed in given:
        if not 0 < speed < float("inf"):
            raise ConfigError(f"a speed must be a number above zero, not {speed}; write 1")
    if memory is not None and not memory > 0:
        raise ConfigError(
            f"memory must be bytes above zero, not {memory}; leave it out for no limit"
        )
    return Machines(given, bytes_per_second(bandwidth), memory)


def _measured(layout: Layout, model: nn.Module, blocks: Sequence[Block], sample: Any) -> Profile:
    piece = head(sample, layout.microbatch(batch_size(sample)))
    check_same(model, blocks, piece)
    return measured(model, blocks, piece, layout.precision, words=planned(model))


def _known(blocks: Sequence[Block], profile: Profile) -> Profile:
    if [cost.name for cost in profile.blocks] != [block.name for block in blocks]:
        raise ConfigError(
            f"the profile has {len(profile)} blocks that are not this model's {len(blocks)}: "
            "give a sample instead"
        )
    return profile


def _names(blocks: Sequence[Block], starts: Sequence[int]) -> tuple[str, ...]:
    return tuple(blocks[start].name for start in starts[1:])


def _better(
    layout: Layout,
    blocks: Sequence[Block],
    profile: Profile,
    machines: Machines,
    asked: Prediction,
    copies: float,
) -> Better | None:
    """The split by time with its cuts moved where the simulation likes them, if it saves enough."""
    try:
        starts = where(replace(layout, split="time"), blocks, profile, machines, copies)
    except ConfigError:
        return None  # no split fits the memory: the one that was asked for says so
    first = predict(layout, profile, machines, starts, copies)
    other = improved(layout, profile, machines, first, copies)
    saved = 1 - other.seconds / asked.seconds if asked.seconds else 0.0
    if saved <= WORTHWHILE:
        return None
    return Better(_names(blocks, other.starts), other.seconds, saved)


def _notes(
    layout: Layout,
    model: nn.Module,
    blocks: Sequence[Block],
    machines: Machines,
    asked: Prediction,
    profile: Profile,
) -> list[str]:
    """What a reader should know before believing the figures."""
    notes = []
    for tie, stages in tied_across(ties(model, blocks), asked.starts):
        held = " and ".join(map(str, stages))
        be, whose = ("are", "their") if len(tie.names) > 1 else ("is", "its")
        notes.append(
            f"{' and '.join(tie.names)} {be} one parameter, held by stages {held}: "
            f"{whose} gradients have to be summed"
        )
    normalised = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    if normalised and layout.pieces > 1:
        notes.append(
            f"batch norm sees microbatches of {profile.samples}, not the batch: "
            "results differ from those of one process"
        )
    if over := crowded(asked, machines):
        notes.append(
            f"process {', '.join(map(str, over))} would need more than the memory allowed: "
            "write split=time, a larger pp, or more microbatches"
        )
    return notes
