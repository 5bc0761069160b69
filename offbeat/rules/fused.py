"""The tensors of a small model as one: where calling costs more than computing, call once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat import optim
from offbeat.model.table import EXACT, Flat

FEW = 1 << 20  # bytes up to which calling PyTorch costs more than computing

# Rules that do to each element what they would do to it in any other tensor.
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad,
    optim.RMSMomentum, optim.BlockMomentum, optim.DelayedNesterov,
)  # fmt: skip

_OTHER_WAYS = ("fused", "capturable", "differentiable", "foreach")  # of making the same step


def leaves_gradients(rule: torch.optim.Optimizer) -> bool:
    """Whether a rule is known to write nothing where gradients lie."""
    if type(rule) not in ELEMENTWISE:
        return False
    return not any(group.get(key) for group in rule.param_groups for key in _OTHER_WAYS)


class FusedRule:
    """The vector in which tensors lie side by side, in the place of all of them in their rule.

    The rule keeps one state for the vector. By name it has views of that, so whoever reads or saves
    the state of a tensor finds it; only a number, such as a count of steps, is shared by all.
    """

    def __init__(self, rule: torch.optim.Optimizer, flat: Flat, tensors: Mapping[str, Tensor]):
        self.rule, self.vector = rule, flat.spans[0]
        self.group: dict[str, Any] = rule.param_groups[0]
        self.names, self.each = list(tensors), list(tensors.values())
        size = self.vector.element_size()
        self.starts = [flat.table[name].offset // size for name in tensors]
        self.one = [self.vector]
        self.shared: list[Any] = []  # the state that the views by name belong to
        self.named: dict[str, Tensor] | None = None  # these views by `name/key`, while they hold

    @classmethod
    def of(
        cls,
        rule: torch.optim.Optimizer,
        flat: Flat,
        tensors: Mapping[str, Tensor],
        dtypes: Sequence[torch.dtype] = EXACT,
    ) -> "FusedRule | None":
        """None where the rule, its groups or the tensors do not allow it, or it does not pay."""
        groups, table = rule.param_groups, flat.table
        if any(span.dtype not in dtypes for span in table.spans):
            return None
        whole = len(flat.spans) == 1 and table.nbytes <= FEW and len(table) == len(tensors) > 1
        if not whole or type(rule) not in ELEMENTWISE or len(groups) != 1:
            return None
        odd = any(groups[0].get(key) for key in _OTHER_WAYS)
        if odd or isinstance(groups[0]["lr"], Tensor):
            return None
        # Whoever looks on wants to see the tensors. PyTorch has no public way to ask for hooks.
        if rule._optimizer_step_pre_hooks or rule._optimizer_step_post_hooks:
            return None
        # A number among the tensors would look like a number in the state.
        views = flat.views
        alike = all(t.dim() and t.data_ptr() == views[n].data_ptr() for n, t in tensors.items())
        free = not any(tensor.requires_grad for tensor in tensors.values())
        return cls(rule, flat, tensors) if alike and free else None

    def is_plain(self) -> bool:
        """Whether a step is nothing but p − lr g; asked at each, as a schedule may change that."""
        group = self.group
        odd = group.get("momentum") or group.get("weight_decay") or group.get("maximize")
        return type(self.rule) is torch.optim.SGD and not odd

    def descend(self, gradient: Tensor, rate: float) -> None:
        """Such a step: SGD's own line, without the way there, which takes four times as long."""
        self.vector.add_(gradient, alpha=-self.group["lr"] * rate)

    def enter(self, gradient: Tensor) -> bool:
        """Put the vector in the place of its tensors; False where their states have parted."""
        if self.vector not in self.rule.state and not self._gather():
            return False
        self.vector.grad = gradient
        self.group["params"] = self.one
        return True

    def leave(self) -> None:
        """After the step: everything is by name again."""
        self.group["params"] = self.each
        self.vector.grad = None
        state = self.rule.state[self.vector]
        now = list(state.values())
        if len(now) != len(self.shared) or any(
            a is not b for a, b in zip(now, self.shared, strict=True)
        ):
            self.shared = now
            self._share(state)

    def forget(self) -> None:
        """The state is another from now on."""
        self.named = None

    def part(self) -> None:
        """Let every tensor have a state of its own, since one of them goes another way."""
        if self.rule.state.pop(self.vector, None) is None:
            return
        for tensor in self.each:
            state = self.rule.state[tensor]
            for key, value in state.items():
                state[key] = value.clone() if isinstance(value, Tensor) else value

    def _gather(self) -> bool:
        """Make the vector's state of those of its tensors; False if they do not go together."""
        states = [self.rule.state.get(tensor, {}) for tensor in self.each]
        joined: dict[str, Any] = {}
        for key in states[0]:
            values = [state.get(key) for state in states]
            if all(_of(value, tensor) for value, tensor in zip(values, self.each, strict=True)):
                joined[key] = self._laid(values)
            elif all(_same(value, values[0]) for value in values):
                joined[key] = values[0].clone() if isinstance(values[0], Tensor) else values[0]
            else:
                return False
        if any(state.keys() != joined.keys() for state in states):
            return False
        self.rule.state[self.vector] = joined
        self.shared = list(joined.values())
        self._share(joined)
        return True

    def _laid(self, values: Sequence[Any]) -> Tensor:
        joined = torch.zeros_like(self.vector, dtype=values[0].dtype)
        for start, value in zip(self.starts, values, strict=True):
            joined[start : start + value.numel()].copy_(value.reshape(-1))
        return joined

    def _share(self, state: Mapping[str, Any]) -> None:
        """Give each tensor its part of the state, as a view."""
        self.named = {}
        for name, start, tensor in zip(self.names, self.starts, self.each, strict=True):
            mine = self.rule.state[tensor]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    mine[key] = value[start : start + tensor.numel()].view(tensor.shape)
                else:
                    mine[key] = value
                if isinstance(value, Tensor):
                    self.named[f"{name}/{key}"] = mine[key]


def _of(value: Any, tensor: Tensor) -> bool:
    """Whether a value has an element for each of the tensor's."""
    return isinstance(value, Tensor) and value.shape == tensor.shape


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not one.dim() and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
