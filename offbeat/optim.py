"""Update rules that PyTorch lacks: RMS-scaled momentum, block momentum and delayed Nesterov."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from offbeat.errors import ConfigError

__all__ = ["BlockMomentum", "DelayedNesterov", "RMSMomentum"]

# Every rule descends `.grad`. Where workers send a change instead of a gradient, the store sets
# `.grad` to minus the mean change, that is anchor - mean(worker weights); plain SGD with lr=1 is
# then "add the mean change". `group["lr"]` is read at every step, so a schedule, or a store that
# weighs a contribution by scaling the rate, takes effect at once.


class _Limit(NamedTuple):
    """What a hyper-parameter may be, as a test and in words."""

    holds: Callable[[float], bool]
    wanted: str


_RATE = _Limit(lambda x: math.isfinite(x) and x >= 0, "a finite number >= 0")
_POSITIVE = _Limit(lambda x: math.isfinite(x) and x > 0, "a finite number > 0")
_FRACTION = _Limit(lambda x: 0 <= x < 1, "a number from 0 up to, but not including, 1")


class _Rule(Optimizer):
    """The part every rule shares: checked groups, and a step that visits tensors with a gradient.

    A rule says what happens to one tensor, in `_update`. All of its memory is tensors in
    `self.state[p]`, so `state_dict` carries it whole.
    """

    limits: ClassVar[dict[str, _Limit]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group after checking its hyper-parameters; `__init__` passes here as well."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check(self, group: dict[str, Any]) -> None:
        for name, limit in self.limits.items():
            try:
                good = limit.holds(float(group[name]))
            except (TypeError, ValueError):
                good = False
            if not good:
                raise self._mistake(f"{name} is {group[name]!r}; write {limit.wanted}")

    def _mistake(self, what: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__}: {what}")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply one update to every tensor whose `.grad` is set; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Look at every gradient before touching any tensor: a refused step changes nothing.
        for group in self.param_groups:
            for p in group["params"]:
                self._refuse_unsupported(p.grad)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, self.state[p], group)
        return loss

    def _refuse_unsupported(self, grad: Tensor | None) -> None:
        if grad is None:
            return
        if grad.layout != torch.strided:
            raise self._mistake(
                "sparse gradients are not supported; write sparse=False in the embedding, "
                "or call p.grad = p.grad.to_dense() before step()"
            )
        if not grad.is_floating_point():
            raise self._mistake(
                f"a gradient has type {grad.dtype}; use real floating-point tensors "
                "(torch.view_as_real turns a complex one into such a tensor)"
            )

    def _update(
        self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class RMSMomentum(_Rule):
    """ASU-P's rule: momentum over gradients divided by the root of their average square.

        s <- rho * s + (1 - rho) * g^2
        v <- momentum * v + lr * g / sqrt(s + eps)
        w <- w - v

    `torch.optim.RMSprop` has eps outside the root and lr outside the buffer. Here eps is inside:
    the root never falls below sqrt(eps), 1e-4 by default. And lr is inside: a new rate changes
    what enters the buffer and leaves what is in it alone, so a contribution that is weighed
    down does not slow the momentum of the others. `weight_decay` adds weight_decay * w to g.
    """

    limits: ClassVar[dict[str, _Limit]] = {
        "lr": _RATE,
        "rho": _FRACTION,
        "momentum": _FRACTION,
        "eps": _POSITIVE,
        "weight_decay": _RATE,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        rho: float = 0.9,
        momentum: float = 0.9,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "rho": rho,
            "momentum": momentum,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def _update(
        self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        if not state:
            state["square_avg"] = torch.zeros_like(p)
            state["momentum_buffer"] = torch.zeros_like(p)
        square, velocity = state["square_avg"], state["momentum_buffer"]
        if group["weight_decay"]:
            grad = grad.add(p, alpha=group["weight_decay"])
        square.mul_(group["rho"]).addcmul_(grad, grad, value=1 - group["rho"])
        root = square.add(group["eps"]).sqrt_()
        velocity.mul_(group["momentum"]).addcdiv_(grad, root, value=float(group["lr"]))
        p.sub_(velocity)


class BlockMomentum(_Rule):
    """BMUF, blockwise model-update filtering, as in the paper: lr is zeta, momentum is eta.

        G <- mean(worker weights) - W_g     which arrives as -grad
        D <- eta * D + zeta * G
        W <- W + D
        W_g <- W                            classical
        W_g <- W + eta * D                  nesterov=True

    The tensor being optimised is W_g, the anchor that workers pull; G is always measured from
    it. The classical form needs no second copy because W_g is W. The Nesterov form keeps W in
    the state and writes W_g anew at every step, so a change made to the tensor from outside
    lasts only until the next step. `eval_tensor` gives W, the one to evaluate and to save.

    eta=0 with zeta=1 is model averaging in both forms. A constant G moves W by
    zeta / (1 - eta) * G per block in the long run; eta = 1 - 1/N makes that N * G, the change
    that N workers would have made one after the other.
    """

    limits: ClassVar[dict[str, _Limit]] = {"lr": _RATE, "momentum": _FRACTION}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    def eval_tensor(self, p: Tensor) -> Tensor:
        """Return W for the tensor `p`, without the look-ahead; it shares memory, so only read."""
        # `get`, because indexing the state would make an empty entry for a tensor not yet stepped.
        weights: Tensor = self.state.get(p, {}).get("weights", p)
        return weights.detach()

    def _update(
        self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
            if group["nesterov"]:
                # D is still zero, so the anchor the workers pulled is W itself.
                state["weights"] = p.detach().clone()
        delta = state["momentum_buffer"]
        delta.mul_(group["momentum"]).sub_(grad, alpha=float(group["lr"]))
        if group["nesterov"]:
            weights = state["weights"].add_(delta)
            torch.add(weights, delta, alpha=group["momentum"], out=p)
        else:
            p.add_(delta)


class DelayedNesterov(_Rule):
    """Asynchronous Local-SGD's rule: momentum moves once per N pushes, gradients at once.

    With N = delay, beta = momentum, and D and m zero at the start, push t = 0, 1, 2, ... does

        D <- D + g / N
        if (t + 1) mod N = 0:   m <- beta * m + D
                                w <- w - lr * ((1 - c * (N - 1)) * beta * m + g / N)
                                D <- 0
        otherwise:              w <- w - lr * (c * beta * m + g / N)

    With c=0 the N pushes of a block add up to w <- w - lr * (D + beta * m), where D is their mean
    gradient: one step of `torch.optim.SGD(nesterov=True)`, DiLoCo's outer step. c > 0 spreads
    the momentum over the block; 1/N spreads it evenly.

    lr stands outside m: a push whose rate is scaled down still enters m at full size, and the
    momentum applied at that push is scaled as well. A tensor without a gradient keeps its place
    in its own block.
    """

    limits: ClassVar[dict[str, _Limit]] = {"lr": _RATE, "momentum": _FRACTION, "c": _RATE}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.7,
        momentum: float = 0.9,
        *,
        delay: int,
        c: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay, "c": c})

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        delay, c = group["delay"], group["c"]
        if not isinstance(delay, int) or isinstance(delay, bool) or delay < 1:
            raise self._mistake(
                f"delay is {delay!r}; write a whole number >= 1, usually the number of workers"
            )
        if c > 1 / delay:
            raise self._mistake(
                f"c is {c!r} with delay={delay}; write a number from 0 to 1/delay = {1 / delay:g}"
            )

    def _update(
        self, p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        if not state:
            # "step" is the one key whose type load_state_dict leaves alone, so it stays whole.
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["block_grad"] = torch.zeros_like(p)
            state["momentum_buffer"] = torch.zeros_like(p)
        lr, beta, delay, c = float(group["lr"]), group["momentum"], group["delay"], group["c"]
        block, velocity = state["block_grad"], state["momentum_buffer"]
        state["step"] += 1
        block.add_(grad, alpha=1 / delay)
        share = c
        if int(state["step"]) % delay == 0:
            velocity.mul_(beta).add_(block)
            block.zero_()
            share = 1 - c * (delay - 1)
        p.add_(grad, alpha=-lr / delay)
        if share:
            p.add_(velocity, alpha=-lr * share * beta)
