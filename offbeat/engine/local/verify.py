"""Before training: one step of the whole layout beside one process, parameter by parameter."""

import copy
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from offbeat.config.job import Job, Training
from offbeat.data.lease import Lease
from offbeat.discipline.course import Course
from offbeat.discipline.named import ASP
from offbeat.engine.local.pipeline_group import PipelineSender
from offbeat.engine.local.process import fork
from offbeat.engine.local.replica_group import SplitSender
from offbeat.engine.local.shared_memory import MemoryPlan, SharedMemory
from offbeat.engine.local.split_worker import SplitWorker
from offbeat.engine.signals import children_kept
from offbeat.errors import RunError
from offbeat.model.copies import same_chance
from offbeat.model.objective import BatchLoss, cost
from offbeat.model.table import Table, parameter_entries, place
from offbeat.split.plan.cut import Cut
from offbeat.store.slot import Slot

# Of the largest element of a gradient: sums are taken in another order, and in fewer digits.
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4}
ROUGH = 5e-2  # where blocks compute in half precision


@dataclass(frozen=True)
class StepDifference:
    """How far the gradient of one parameter is off, as a share of its largest element."""

    name: str
    share: float
    allowed: float

    @property
    def wrong(self) -> bool:
        return not self.share <= self.allowed  # so that what is no number is wrong


def verify(job: Job, threads: int = 1) -> list[StepDifference]:
    """Compare, and raise if any gradient is wrong; the cause that is likely is in the error.

    Both compute the first batch in evaluation mode, so that neither chance nor the statistics of
    a microbatch make a difference.
    """
    assert job.content.cut is not None
    lease = Lease(0, 0, min(job.batch_size, job.samples))
    cut = job.content.cut
    if cut.layout.precision == "fp16":  # a scale that no gradient overflows is not known yet
        cut = replace(cut, layout=replace(cut.layout, precision="float32"))
    found = _split(job, cut, lease, threads)  # before this process makes a backward pass itself
    with same_chance(job.content.model):
        wanted = _alone(job.content, lease)
    told = [_difference(name, wanted[name], found[name], cut) for name in wanted]
    wrong = [one for one in told if one.wrong]
    if wrong:
        first = wrong[0]
        raise RunError(
            f"verify: with {job.content.cut.layout} the gradient of {first.name} is off by "
            f"{first.share:.2g} of its largest element, where {first.allowed:g} is allowed "
            f"({len(wrong)} of {len(told)} parameters are wrong): {_cause(job, wanted, found)}"
        )
    return told


def _alone(numbers: Training, lease: Lease) -> dict[str, Tensor]:
    """The gradients that one process finds; nothing where it finds none."""
    model, device = copy.deepcopy(numbers.model).eval(), numbers.devices.of(0)
    device.move(model)
    numbers.reader.reseed(lease)
    batch = device.batch(numbers.reader.read(lease))
    cost(model, batch, numbers.loss).backward()  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad.cpu()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _split(job: Job, cut: Cut, lease: Lease, threads: int) -> dict[str, Tensor]:
    """What the processes of a replica find together, in processes that end with this call."""
    # Whatever the discipline sends, what is compared is the gradient.
    plain = replace(job, course=Course(ASP()), workers=1, nonfinite="stop")
    tables = place(parameter_entries(job.content.model), job.content.placement)
    layout = cut.layout
    each = layout.pp * layout.tp
    nothing = Table.of([])
    depth = layout.under_way
    shared = SharedMemory(MemoryPlan(tables, nothing, nothing, 1, depth, depth, each))
    own = dict(job.content.model.named_parameters())
    slot = shared.slots[0]
    for flats in slot.incoming:
        for flat in flats:
            for name, view in flat.views.items():
                view.copy_(own[name].detach())
    buffers = {name: b.clone() for name, b in job.content.model.named_buffers()}
    split = SplitWorker(plain, cut, slot, shared.wait_notes[0], buffers)
    try:
        with children_kept():
            child = fork("offbeat verify", partial(_lead, split, slot, lease, threads), threads)
            words = child.reap()
    finally:
        shared.arena.close()
    if words is not None:
        raise RunError(f"verify: one step of {layout} failed: {words.message}")
    if not child.well:
        raise RunError(f"verify: a process of {layout} was killed")
    return {name: v for flat in slot.outgoing[0] for name, v in flat.views.items()}


def _lead(split: SplitWorker, slot: Slot, lease: Lease, threads: int) -> None:
    """In the leader's process: one step, and home."""
    wire, other = socket.socketpair()
    other.close()
    group = split.group(0, wire, threads)
    flows = split.cut.layout.asynchronous
    sender = (PipelineSender if flows else SplitSender)(group, slot, still=True)
    if isinstance(sender, PipelineSender):
        sender.let_in(lease, 0)
        sender.stop()
    else:
        sender.step(lease)
        sender.payload()
    group.leave()


def _difference(name: str, wanted: Tensor, found: Tensor, cut: Cut) -> StepDifference:
    scale = wanted.abs().max().item() or 1.0
    off = (wanted - found).abs().max().item() / scale
    allowed = ROUGH if cut.layout.precision != "float32" else CLOSE.get(wanted.dtype, ROUGH)
    return StepDifference(name, off, allowed)


def _cause(job: Job, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """The first of some known mistakes that fits what was found."""
    assert job.content.cut is not None
    layout = job.content.cut.layout
    assert not isinstance(job.content.loss, BatchLoss)
    if layout.pieces > 1 and all(_times(wanted[n], found[n], 1 / layout.pieces) for n in wanted):
        return (
            "all are smaller by the number of microbatches, as with a loss that is a sum: use the "
            "mean over samples"
        )
    lost = [n for n in wanted if wanted[n].abs().max() > 0 and not found[n].abs().max() > 0]
    if lost:
        return f"no gradient came for {lost[0]}: does a block detach what it returns?"
    if any(name in job.content.cut.ties() for name in wanted):
        return "some weights are tied; is one of them replaced when the model is copied?"
    return (
        "is there a block that looks at the whole batch, or keeps something between two calls? "
        "Microbatches must not depend on each other"
    )


def _times(wanted: Tensor, found: Tensor, factor: float) -> bool:
    return torch.allclose(wanted * factor, found, rtol=1e-3, atol=1e-6)
