"""From the layout that a user asks for to the cut of one model, checked with the rest of a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.discipline.course import Course
from offbeat.discipline.discipline import Discipline
from offbeat.errors import ConfigError
from offbeat.split import tensor_shards as shards
from offbeat.split.layout import Layout, as_layout
from offbeat.split.plan.costs import Profile
from offbeat.split.plan.cut import Cut
from offbeat.split.plan.explain import check, explain
from offbeat.split.plan.partition import evenly
from offbeat.split.plan.predict import at_names
from offbeat.split.stages import check_same
from offbeat.split.tree import batch_size, head, mapped

Apart = Callable[[Callable[[], Profile], type[Profile]], Profile]
PROBE = 16  # rows and columns of a tensor that an optimiser is tried on


@dataclass(frozen=True)
class RunAround:
    """What else a run was asked for, as far as a split model minds."""

    course: Course
    batch_size: int
    accumulate: int = 1
    whole_loss: bool = False  # whether the loss takes the whole model
    codec: bool = False
    clips_norm: bool = False
    skips: bool = False  # whether contributions that are not finite are left out
    optimizer: Any = None
    apart: Apart | None = None  # what measures where that leaves nothing behind

    @property
    def discipline(self) -> Discipline:
        """What it begins with, and sends and applies throughout."""
        return self.course.first


def resolve(
    asked: Layout | str, model: nn.Module, around: RunAround, sample: Callable[[], Any]
) -> Cut:
    """Where `model` is cut; `sample` gives what the model takes for one batch, None if unknown."""
    layout = replace(as_layout(asked), replicas=1)
    _check_around(layout, around)
    blocks = check(layout, model, around.batch_size)
    shared = shards.find(model, layout.tp) if layout.tp > 1 else None
    if layout.stages == 1:
        cut = replace(Cut.of(layout, model, blocks, (0,)), shards=shared)
        _check_cut(cut, around, model)
        return cut
    inputs = sample()
    if inputs is not None:
        inputs = _whole(inputs, around.batch_size)
        check_same(model, blocks, head(inputs, layout.microbatch(batch_size(inputs))))
    elif layout.split in ("time", "parameters"):
        raise ConfigError(
            f"split={layout.split} measures the model with the first of a pair (inputs, target), "
            "and the model does not take what the dataset has there: write split=count, or the "
            "names of blocks"
        )
    predicted = None
    if layout.split == "count":
        starts = evenly([1.0] * len(blocks), layout.stages)
    elif isinstance(layout.split, str):
        measured = partial(_measured, layout, model, inputs)
        known = inputs if around.apart is None else around.apart(measured, Profile)
        told = explain(layout, model, known, optimizer=around.optimizer)
        predicted = (told.seconds, told.idle_share)
        starts = at_names(replace(layout, split=told.split), blocks)
    else:
        starts = at_names(layout, blocks)
    cut = replace(Cut.of(layout, model, blocks, starts), predicted=predicted, shards=shared)
    _check_cut(cut, around, model)
    return cut


def _measured(layout: Layout, model: nn.Module, inputs: Any) -> Profile:
    return explain(layout, model, inputs).profile


def _whole(inputs: Any, count: int) -> Any:
    """A batch of `count` samples; a dataset that has fewer gives some of them again."""
    numbers = torch.arange(count) % batch_size(inputs)
    return inputs if len(numbers) == batch_size(inputs) else mapped(lambda t: t[numbers], inputs)


def _check_around(layout: Layout, around: RunAround) -> None:
    if around.whole_loss:
        raise ConfigError(
            "ob.BatchLoss calls the whole model, and a layout takes it apart: write the loss as "
            "loss(output, target), or leave layout out"
        )
    if around.accumulate > 1:
        raise ConfigError(
            f"accumulate={around.accumulate} and a layout both cut batches into pieces: "
            f"write layout='microbatches={around.accumulate * layout.pieces}' alone"
        )
    if around.discipline.send.in_place:
        raise ConfigError(
            "hogwild writes parameters while others read them, and the stages of a replica must "
            "see one version: use asp, or leave layout out"
        )
    if layout.asynchronous and not around.discipline.send.each_gradient:
        raise ConfigError(
            f"schedule={layout.schedule} sends a gradient for every batch, and "
            f"{around.discipline} does not: use bsp, ssp, asp or soft, or schedule=1f1b"
        )
    if layout.asynchronous and layout.tp > 1:
        raise ConfigError(
            f"schedule={layout.schedule} has one process for each stage: write tp=1, or "
            "schedule=1f1b"
        )
    half = layout.precision == "fp16"
    if layout.asynchronous and (around.course.drops or around.skips or half):
        what = "precision=fp16 leaves" if half else "nonfinite='skip' leaves"
        what = f"{around.course} drops" if around.course.drops else f"{what} out"
        raise ConfigError(
            f"schedule={layout.schedule} has later batches under way already when {what} one: "
            "write schedule=1f1b"
        )
    if layout.pp * layout.tp > 1 and around.codec:
        raise ConfigError("codecs work on whole replicas so far: leave codec out, or write pp=1")


def _check_cut(cut: Cut, around: RunAround, model: nn.Module) -> None:
    if not around.discipline.steps_locally or cut.layout.pp * cut.layout.tp == 1:
        return
    if around.clips_norm:
        raise ConfigError(
            f"{around.discipline} clips at the worker, and a norm over several processes is not "
            "there yet: use clip=ob.Clip(value=...), or a discipline that sends gradients"
        )
    if cut.ties() and (cut.shards is not None or around.discipline.send.centre):
        raise ConfigError(
            f"{cut.ties()[0]} is tied over several stages, which {around.discipline} "
            f"{'with tp > 1 ' if cut.shards else ''}cannot keep equal: split elsewhere, or use asp"
        )
    narrow = [name for name, p in model.named_parameters() if p.requires_grad and p.itemsize < 4]
    if cut.shards is not None and narrow:
        raise ConfigError(
            f"{narrow[0]!r} has fewer than 32 bits, of which PyTorch rounds the last elements of a "
            f"tensor otherwise, and with tp={cut.layout.tp} a worker of {around.discipline} makes "
            "steps on parts: keep parameters in float32 and write precision=bf16, or use a "
            "discipline that sends gradients"
        )
    if cut.shards is not None and _looks_at_wholes(around.optimizer):
        raise ConfigError(
            f"the optimiser looks at whole tensors, and with tp={cut.layout.tp} a worker of "
            f"{around.discipline} has parts: use SGD or AdamW, or a discipline that sends gradients"
        )
    for stage in range(cut.stages):
        if not cut.owned(stage):
            raise ConfigError(
                f"stage {stage} has no parameters of its own to train, and {around.discipline} "
                "makes steps there: write a smaller pp, or name blocks in split="
            )


def _looks_at_wholes(optimizer: Any) -> bool:
    """Whether a step of a tensor is another than the steps of its halves, as with norms."""
    if optimizer is None:
        return False
    halves = [slice(0, PROBE // 2), slice(PROBE // 2, PROBE)]
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(2, PROBE, PROBE, generator=generator)
    gradient[: PROBE // 2] *= 10  # so that the halves are not alike
    whole = _stepped(optimizer, start, gradient)
    parts = [_stepped(optimizer, start[half], gradient[half]) for half in halves]
    return not torch.allclose(whole, torch.cat(parts), rtol=1e-4, atol=1e-6)


def _stepped(optimizer: Any, start: Tensor, gradient: Tensor) -> Tensor:
    parameter = nn.Parameter(start.clone())
    made = optimizer([parameter])
    for _ in range(2):
        parameter.grad = gradient.clone()
        made.step()
    return parameter.detach()
