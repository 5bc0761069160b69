"""The model as a script holds it while its stages are computed elsewhere.

It is the object that the script passed in. Until the run is over its `forward` hands the batch to
the stages and brings the output back as part of the script's own graph, so that `loss.backward()`
reaches the stages too.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from offbeat.data.lease import Lease
from offbeat.data.random_state import undisturbed
from offbeat.errors import ConfigError
from offbeat.split.part import pieces_of
from offbeat.split.passes import Gradients
from offbeat.split.script_replica import Asked
from offbeat.split.tree import batch_size, mapped, tensors

ONE_PASS = "with a layout a step is one model(x) and one loss.backward()"


@runtime_checkable
class Stages(Protocol):
    """Who computes: the stages of a replica, all here or some in other processes."""

    def forward(self, asked: Asked, inputs: Any) -> list[Any]:
        """The outputs of all microbatches."""

    def backward(self, gradients: Sequence[Gradients]) -> list[Gradients]:
        """From the gradients of the outputs to those of the inputs, by microbatch."""


class ScriptModel:
    """What a script's model does in its loop; `stages` may change from batch to batch."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.stages: Stages | None = None
        self.lease = Lease(0, 0, 0)
        self.went = self.came = False  # whether this batch has gone forward, and come back
        self.ranges: list[tuple[int, int]] = []  # the samples of its microbatches
        model.forward = _Forward(self)

    def begin(self, stages: Stages, lease: Lease) -> None:
        """A batch is handed to the script."""
        self.stages, self.lease = stages, lease
        self.went = self.came = False

    def check(self) -> None:
        """The script is about to make a step."""
        if not self.came:
            what = "loss.backward()" if self.went else "model(x)"
            raise ConfigError(f"optimizer.step() without {what}: {ONE_PASS}")
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                raise ConfigError(
                    f"the loss uses {name} itself, and with a layout gradients go through "
                    "model(x) alone: use weight_decay= of the optimiser, or leave layout out"
                )

    def close(self) -> None:
        """The model is an ordinary one again."""
        self.model.__dict__.pop("forward", None)

    # ------------------------------------------------------------ the two passes

    def forward(self, value: Any) -> Any:
        learns = torch.is_grad_enabled()
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError(
                "torch.autocast does not reach the other processes of a replica: write "
                "precision=bf16 in the layout instead"
            )
        if self.stages is None:
            raise ConfigError("model(x) before the first batch: call it inside run.batches")
        if learns and self.went:
            raise ConfigError(
                f"model(x) for a second time before optimizer.step(): {ONE_PASS}; to evaluate, "
                "call it under torch.no_grad()"
            )
        modules = [m for _, m in self.model.named_modules(remove_duplicate=False)]
        asked = Asked(self.lease, batch_size(value), learns, bytes(m.training for m in modules))
        # What the script draws afterwards must not depend on which stages are computed here.
        with undisturbed():
            return self._taught(asked, value) if learns else self._computed(asked, value)[0]

    def _computed(self, asked: Asked, value: Any) -> tuple[Any, list[bool]]:
        """The output of the batch, and which of its tensors a gradient comes back for."""
        assert self.stages is not None
        found = self.stages.forward(asked, value)
        ranges = pieces_of(asked.samples, len(found))
        if asked.learns:
            self.ranges = ranges
        return _joined(found, ranges), [tensor.requires_grad for tensor in tensors(found[0])]

    def _taught(self, asked: Asked, value: Any) -> Any:
        """The output as part of the script's graph."""
        self.went = True
        form: list[Any] = []  # the tensors in it come out of the graph

        def compute() -> tuple[list[Tensor], list[bool]]:
            output, taught = self._computed(asked, value)
            form.append(output)
            return list(tensors(output)), taught

        start = torch.zeros(0, requires_grad=True)  # else inputs alone would make no graph
        left = iter(_Through.apply(self.descend, compute, start, *tensors(value)))  # type: ignore[no-untyped-call]
        return mapped(lambda tensor: next(left), form[0])

    def descend(self, gradients: Gradients) -> list[Tensor | None]:
        """Back through the stages; returns the gradients of those inputs that want one."""
        if self.came or not self.went or self.stages is None:
            raise ConfigError(f"loss.backward() for a second time: {ONE_PASS}")
        self.came = True
        with undisturbed():
            found = self.stages.backward(
                [[g if g is None else g[a:b] for g in gradients] for a, b in self.ranges]
            )
        return [_stacked(mine) for mine in zip(*found, strict=True)]


class _Forward:
    """What stands in for a model's `forward`; a copy of the model gets its own one back."""

    def __init__(self, front: ScriptModel):
        self.front = front

    def __call__(self, *values: Any, **named: Any) -> Any:
        if len(values) != 1 or named:
            raise ConfigError(
                "with a layout the model takes one argument: pass a tuple or a dict of tensors"
            )
        return self.front.forward(values[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = self.front.model
        return type(model).forward.__get__(memo[id(model)])


class _Through(torch.autograd.Function):
    """From the inputs to the outputs of a batch, through stages with graphs of their own."""

    @staticmethod
    def forward(ctx: Any, descend: Any, compute: Any, start: Tensor, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        found, ctx.taught = compute()
        ctx.descend = descend
        ctx.mark_non_differentiable(
            *(tensor for tensor, taught in zip(found, ctx.taught, strict=True) if not taught)
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found = iter(
            ctx.descend([g for g, taught in zip(gradients, ctx.taught, strict=True) if taught])
        )
        back = [next(found) if wanted else None for wanted in ctx.needs_input_grad[3:]]
        return None, None, None, *back


def _joined(outputs: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> Any:
    """The outputs of all microbatches as that of the batch."""
    columns = [list(tensors(output)) for output in outputs]
    for column, (start, stop) in zip(columns, ranges, strict=True):
        if any(tensor.dim() == 0 or len(tensor) != stop - start for tensor in column):
            raise ConfigError(
                "the model's output must have a row for each sample, as microbatches are put "
                "together again: let the last block return no sums or means, or leave layout out"
            )
    if len({len(column) for column in columns}) > 1:
        raise ConfigError("the model returns other tensors for one microbatch than for another")
    rows = iter(zip(*columns, strict=True))
    return mapped(lambda tensor: torch.cat([t.detach() for t in next(rows)]), outputs[0])


def _stacked(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The gradient of an input from those of its microbatches."""
    found = [gradient for gradient in gradients if gradient is not None]
    return torch.cat(found) if len(found) == len(gradients) else None
