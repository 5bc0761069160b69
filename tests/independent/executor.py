"""A second opinion: follows the log of a run in plain PyTorch, with nothing of offbeat's in it.

It reads `run.json` and `log.jsonl` and knows the formulas of docs/disciplines. All parameters are
one vector of float64, so what is left between it and a run is rounding.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


class RMSMomentum(torch.optim.Optimizer):
    """s ← ρs + (1 − ρ)g², v ← μv + lr·g/√(s + ε), w ← w − v."""

    def __init__(self, params: Any, lr: float, rho: float, momentum: float, eps: float = 1e-8):
        super().__init__(params, {"lr": lr, "rho": rho, "momentum": momentum, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (w,) = group["params"]
        state = self.state[w]
        s, v = state.get("s", torch.zeros_like(w)), state.get("v", torch.zeros_like(w))
        s = group["rho"] * s + (1 - group["rho"]) * w.grad**2
        v = group["momentum"] * v + group["lr"] * w.grad / (s + group["eps"]).sqrt()
        state["s"], state["v"] = s, v
        w -= v


class BlockMomentum(torch.optim.Optimizer):
    """Δ ← ηΔ + ζG, W ← W + Δ; the next block starts at W, or at W + ηΔ."""

    def __init__(self, params: Any, lr: float, momentum: float, nesterov: bool = False):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (anchor,) = group["params"]
        state = self.state[anchor]
        delta = group["momentum"] * state.get("delta", 0.0) - group["lr"] * anchor.grad
        state["delta"], state["w"] = delta, state.get("w", anchor.clone()) + delta
        anchor.copy_(state["w"] + (group["momentum"] * delta if group["nesterov"] else 0.0))


class DelayedNesterov(torch.optim.Optimizer):
    """D ← D + g/N, θ ← θ − εg/N; each N-th time also m ← βm + D, θ ← θ − εβm, D ← 0."""

    def __init__(self, params: Any, lr: float, momentum: float, delay: int):
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay})
        self.pushes = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (w,) = group["params"]
        state, n = self.state[w], group["delay"]
        state["d"] = state.get("d", 0.0) + w.grad / n
        w -= group["lr"] * w.grad / n
        self.pushes += 1
        if self.pushes % n == 0:
            state["m"] = group["momentum"] * state.get("m", 0.0) + state["d"]
            w -= group["lr"] * group["momentum"] * state["m"]
            state["d"] = 0.0


@dataclass(frozen=True)
class Way:
    """What the executor has to know of a discipline; who waits for whom is in the log."""

    send: str = "gradient"  # or sum, change, elastic, pair
    weigh: tuple[Any, ...] = ("constant",)
    store: Make | None = None  # None is the user's own rule
    state: str = "keep"  # what becomes of a local rule's state at a sync
    alpha: float = 0.0


@dataclass(frozen=True)
class Yours:
    """What the user brings: an optimiser, and perhaps a schedule and limits on the gradient."""

    optimizer: Make | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    per: str = "epoch"
    norm: float | None = None
    value: float | None = None


class Rule:
    """An optimiser over one vector, with its schedule and its limits."""

    def __init__(self, start: Tensor, make: Make, yours: Yours | None):
        self.w = start.clone()
        self.yours = yours or Yours()
        self.optimizer = make([self.w])
        schedule = self.yours.schedule
        self.scheduler = schedule(self.optimizer) if schedule is not None else None
        self.moved = 0

    def step(self, gradient: Tensor, rate: float = 1.0) -> None:
        g = gradient.clone()
        if self.yours.value is not None:
            g.clamp_(-self.yours.value, self.yours.value)
        if self.yours.norm is not None:
            g *= min(1.0, float(self.yours.norm / (g.norm() + 1e-6)))
        self.w.grad = g
        (group,) = self.optimizer.param_groups
        lr = group["lr"]
        group["lr"] = lr * rate
        self.optimizer.step()
        group["lr"] = lr

    def advance(self, version: int, epoch: int, last: int | None = None) -> None:
        target = epoch if self.yours.per == "epoch" else version
        target = target if last is None else min(target, last)
        while self.scheduler is not None and self.moved < target:
            self.scheduler.step()
            self.moved += 1


@dataclass
class Worker:
    """What one worker holds."""

    rule: Rule
    centre: Tensor | None = None  # what it has pulled last
    pending: Tensor | None = None  # a gradient that an elastic worker has not applied yet
    total: Tensor | None = None  # the sum of gradients since the last push
    done: list[Any] = field(default_factory=list)  # leases computed before the last pull


class Executor:
    """Follows one log."""

    def __init__(self, folder: Path, model: nn.Module, data: TensorDataset, loss: Any, way: Way):
        self.config = json.loads((folder / "run.json").read_text())
        self.log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        self.model, self.data, self.loss, self.way = model, data, loss, way
        self.sizes = [p.numel() for p in model.parameters()]
        self.start = parameters_to_vector(model.parameters()).detach().double()

    def run(self, yours: Yours, last: int | None = None) -> Tensor:
        """The final parameters; `last` is where a schedule of fixed length ends."""
        local = self.way.send in ("change", "elastic")
        self.yours, self.last = yours, last
        make = self.way.store or yours.optimizer
        assert make is not None
        self.rule = Rule(self.start, make, None if local else yours)
        self.history = [self.start.clone()]
        self.version = self.epoch = 0
        self.workers: dict[int, Worker] = {}
        self.own: dict[int, Rule] = {}  # under gossip
        self.present: set[int] = set()
        self.waiting: dict[tuple[int, int, int], Tensor] = {}
        self.averaged: dict[str, Tensor] = {}
        self.square = torch.zeros_like(self.start)
        self.step_size: list[Tensor | None] = [None] * len(self.sizes)
        for record in self.log:
            handler = getattr(self, f"_{record['kind']}", None)
            if handler is not None:
                handler(record)
        if self.way.send == "pair":
            return torch.stack([self.own[w].w for w in sorted(self.present)]).mean(0)
        weights = self.rule.optimizer.state[self.rule.w].get("w")
        return self.rule.w if weights is None else weights  # block momentum looks ahead

    # ------------------------------------------------------------ what the log says

    def _join(self, record: Mapping[str, Any]) -> None:
        number, yours = record["worker"], self.yours
        make = yours.optimizer or (lambda params: torch.optim.SGD(params, lr=0.0))
        self.workers[number] = Worker(Rule(self.start, make, yours))
        if self.way.send == "pair" and number not in self.own:
            others = [self.own[w].w for w in sorted(self.present)]
            mean = torch.stack(others).mean(0) if others else self.start
            self.own[number] = Rule(mean, make, yours)
            self.own[number].advance(self.version, self.epoch, self.last)
        self.present.add(number)

    def _lost(self, record: Mapping[str, Any]) -> None:
        self.present.discard(record["worker"])

    def _pull(self, record: Mapping[str, Any]) -> None:
        assert record["version"] == self.version
        worker = self.workers[record["worker"]]
        for lease in record.get("leases", []):
            self._compute(worker, lease)
            worker.done.append(lease)
        rule, first = worker.rule, worker.centre is None
        now = self.own[record["worker"]].w if self.way.send == "pair" else self.rule.w
        worker.centre = now.clone()
        if self.way.send != "elastic" or first:
            rule.w.copy_(now)
        if self.way.send in ("change", "elastic"):
            rule.advance(self.version, self.epoch, self.last)
        if self.way.state == "reset":
            rule.optimizer.state.clear()
        elif self.way.state == "average" and self.averaged:
            rule.optimizer.state[rule.w] = {k: t.clone() for k, t in self.averaged.items()}

    def _push(self, record: Mapping[str, Any]) -> None:
        key = (record["worker"], record["incarnation"], record.get("sequence", 0))
        self.waiting[key] = self._contribution(record["worker"], record["leases"], self.version)

    def _drop(self, record: Mapping[str, Any]) -> None:
        self.workers[record["part"]["worker"]].done = []

    def _epoch(self, record: Mapping[str, Any]) -> None:
        self.epoch = record["epoch"] + 1
        self._advance()

    def _update(self, record: Mapping[str, Any]) -> None:
        if self.way.send == "pair":
            self._meet(record["parts"][0])
        else:
            self._apply(record)
        self.version += 1
        assert record["version"] == self.version
        self.history.append(self.rule.w.clone())
        self._advance()

    def _advance(self) -> None:
        for rule in (self.rule, *self.own.values()):
            rule.advance(self.version, self.epoch, self.last)

    def _meet(self, part: Mapping[str, Any]) -> None:
        mine = self.own[part["worker"]]
        gradient = self._gradient(self.workers[part["worker"]].rule.w, part["leases"][0])
        if part.get("partner") is not None:
            other = self.own[part["partner"]]
            mean = (mine.w + other.w) / 2
            mine.w.copy_(mean)
            other.w.copy_(mean)
        mine.step(gradient)

    def _apply(self, record: Mapping[str, Any]) -> None:
        total, weights, samples = torch.zeros_like(self.start), 0.0, 0
        states = []
        for part in record["parts"]:
            number, base = part["worker"], part["base"]
            key = (number, part["incarnation"], part.get("sequence", 0))
            payload = self.waiting.pop(key, None)
            if payload is None:
                payload = self._contribution(number, part["leases"], base)
            elif self.way.send == "gradient":  # only now the log says what it was computed on
                payload = self._gradient(self.history[base], part["leases"][0])
            weight = part["samples"] * self._factor(self.version - base)
            total += weight * self._corrected(payload, base)
            weights, samples = weights + weight, samples + part["samples"]
            worker = self.workers[number].rule
            states.append((part["samples"], worker.optimizer.state[worker.w]))
        before = self.rule.w.clone()
        self.rule.step(total / weights, weights / samples)
        self._measure(self.rule.w - before)
        if self.way.state == "average":
            self.averaged = {
                key: torch.as_tensor(sum(n * state[key] for n, state in states) / samples)
                for key in states[0][1]
            }

    # ------------------------------------------------------------ what staleness does

    def _factor(self, staleness: int) -> float:
        kind, *rest = self.way.weigh
        if kind == "inverse":
            return 1 / staleness if staleness else 1.0
        return float((1 + staleness) ** -rest[0]) if kind == "poly" else 1.0

    def _corrected(self, g: Tensor, base: int) -> Tensor:
        kind, *rest = self.way.weigh
        moved = self.rule.w - self.history[base]
        if kind == "dc":
            return g + rest[0] * g * g * moved
        if kind == "dc-adaptive":
            self.square = rest[1] * self.square + (1 - rest[1]) * g * g
            return g + rest[0] / (self.square + 1e-7).sqrt() * g * g * moved
        if kind == "gap":
            each = [0.0 if size is None else float(size) for size in self.step_size]
            size = torch.tensor(each, dtype=torch.float64).repeat_interleave(
                torch.tensor(self.sizes)
            )
            return torch.where(size > 0, g / (1 + moved.abs() / size), g)
        return g

    def _measure(self, moved: Tensor) -> None:
        if self.way.weigh[0] != "gap":
            return
        decay = self.way.weigh[1]
        for i, piece in enumerate(moved.split(self.sizes)):
            now, old = piece.abs().mean(), self.step_size[i]
            self.step_size[i] = now if old is None else decay * old + (1 - decay) * now

    # ------------------------------------------------------------ what a worker computes

    def _contribution(self, number: int, leases: Sequence[Any], base: int) -> Tensor:
        worker = self.workers[number]
        if self.way.send == "gradient":
            return self._gradient(self.history[base], leases[0])
        assert leases[: len(worker.done)] == worker.done
        for lease in leases[len(worker.done) :]:
            self._compute(worker, lease)
        worker.done = []
        rule = worker.rule
        if self.way.send == "sum":
            assert worker.total is not None
            total, worker.total = worker.total, None
            return total
        assert worker.centre is not None
        if self.way.send == "change":
            return worker.centre - rule.w
        pull = self.way.alpha * (worker.centre - rule.w)
        rule.w += pull
        self._settle(worker)
        return pull

    def _compute(self, worker: Worker, lease: Any) -> None:
        self._settle(worker)
        gradient = self._gradient(worker.rule.w, lease)
        if self.way.send == "sum":
            worker.total = gradient if worker.total is None else worker.total + gradient
        elif self.way.send == "change":
            worker.rule.step(gradient)
        elif self.way.send == "elastic":
            worker.pending = gradient

    def _settle(self, worker: Worker) -> None:
        if worker.pending is not None:
            worker.rule.step(worker.pending)
            worker.pending = None

    def _gradient(self, at: Tensor, lease: Any) -> Tensor:
        epoch, start, stop = lease
        rows = self._order(epoch)[start:stop]
        vector_to_parameters(at, self.model.parameters())
        batch = [tensor[rows] for tensor in self.data.tensors]
        loss = self.loss(self.model(batch[0]), batch[1])
        return parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))

    def _order(self, epoch: int) -> Tensor:
        count = len(self.data)
        if not self.config["shuffle"]:
            return torch.arange(count)
        seed = _mix(self.config["seed"], 1, epoch)
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _mix(*numbers: int) -> int:
    """SplitMix64 over several numbers, without its lowest bit."""
    state, word = 0, (1 << 64) - 1
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & word
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
        state ^= state >> 31
    return state >> 1
