"""The optimiser of a script's loop: PyTorch's own class, whose steps are made elsewhere."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.config.task import OptimizerFactory
from offbeat.errors import ConfigError
from offbeat.log.records import Settings
from offbeat.rules.schedule import Schedule, Shown, before_any_step, move_on
from offbeat.rules.updater import is_plain, made

Groups = Callable[[nn.Module], Sequence[dict[str, Any]]]
Hand = Callable[[Any], None]


class ScriptOptimizer(torch.optim.Optimizer):
    """Hands over the gradient of a batch; the rule itself works at the store or at the worker.

    The settings of its groups are the script's to change, by hand or by one of PyTorch's
    schedulers: each contribution takes along those that differ from the beginning.
    """

    def __init__(
        self,
        model: nn.Module,
        factory: OptimizerFactory | None,
        groups: Groups | None,
        schedule: Schedule | None,
        hand: Hand,
    ):
        """`hand` is called for each step, with the loss of a closure if there was one."""
        self._hand, self._schedule, self._shown = hand, schedule, None
        chosen: Any = groups(model) if groups else None
        if chosen is None:
            chosen = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        rule = None if factory is None else made(factory, chosen)
        if rule is not None:
            chosen = [dict(group) for group in rule.param_groups]
        super().__init__(chosen, {} if rule is None else rule.defaults)
        self._first = _settings(self.param_groups)
        if factory is not None and schedule is not None:
            self._shown = Shown(partial(factory, [dict(group) for group in chosen]), schedule)
            self.show(0, 0, 0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_first"):
            raise ConfigError(
                "a group of parameters cannot be added to run.optimizer(...): build the whole "
                "model first, and pass all groups to the optimiser when you make it"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand over the gradient of this batch; afterwards the model holds what was pulled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand(loss)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict["state"]:
            raise ConfigError(
                "what an optimiser keeps (momentum and the like) lies in the store and not in "
                "run.optimizer(...): go on with a run by resume=True, or begin with another "
                "run's folder by start="
            )
        super().load_state_dict(dict(state_dict))

    # ------------------------------------------------------------ what the script has set

    def settings(self) -> Settings | None:
        """What differs from the beginning, for each group; None if nothing does."""
        if len(self.param_groups) != len(self._first):
            raise ConfigError(
                f"run.optimizer(...) had {len(self._first)} groups of parameters and has "
                f"{len(self.param_groups)} now: pass all groups when you make it"
            )
        if self._shown is not None:
            self._check_shown()
            return None
        found: Settings = []
        for group, first in zip(self.param_groups, self._first, strict=True):
            mine = {}
            for key, value in first.items():
                now = group.get(key)
                if isinstance(now, Tensor) and not now.dim():
                    now = now.item()
                if now != value:
                    mine[key] = _told(key, now)
            found.append(mine)
        return found if any(found) else None

    def _check_shown(self) -> None:
        for group, shown in zip(self.param_groups, self._showing, strict=True):
            for key, value in shown.items():
                if group.get(key) != value or "initial_lr" in group:
                    raise ConfigError(
                        f"{key} follows the schedule= of run.optimizer(...): leave that out to "
                        "set it in the loop, or to attach a scheduler of PyTorch's"
                    )

    def show(self, version: int, epoch: int, progress: int) -> None:
        """Let groups show what a schedule has come to."""
        if self._shown is None:
            return
        self._showing = _settings(self._shown.groups(version, epoch, progress))
        for group, shown in zip(self.param_groups, self._showing, strict=True):
            group.update(shown)


def _settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plain settings of each group, without what schedulers keep there."""
    odd = ("params", "initial_lr")
    return [{k: v for k, v in g.items() if k not in odd and is_plain(v)} for g in groups]


def _told(key: str, value: Any) -> Any:
    if not is_plain(value) or (key == "lr" and not isinstance(value, int | float)):
        raise ConfigError(f"{key} of a group must be a number or another plain value, not {value}")
    return list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------------- a scheduler of all


class SharedScheduler:
    """A scheduler of PyTorch's that counts what all workers have done, as a plain loop would.

    Its place follows from the run: it needs no state, and is right after a resume, in a worker
    that comes back, and where workers are not equally fast.
    """

    def __init__(self, scheduler: LRScheduler, per: str, where: Callable[[], int]):
        """`where` says how often it has moved on by now."""
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            raise ConfigError(
                f"run.scheduler takes a scheduler that depends on the step alone, and not "
                f"{type(scheduler).__name__}: step that one in the loop, as it is"
            )
        if per not in ("batch", "epoch"):
            raise ConfigError(f"a scheduler is stepped per 'batch' or per 'epoch', not {per!r}")
        self.scheduler, self.per, self._where = scheduler, per, where
        self.moved, self.called = 0, False

    def step(self) -> None:
        """Move on to where the run is; called in the loop where a plain one has it."""
        self.called = True
        self.follow()

    def follow(self) -> None:
        """Set the rates of where the run is."""
        with before_any_step():
            self.moved = move_on(self.scheduler, self.moved, self._where())

    def get_last_lr(self) -> list[float]:
        """The rates in force."""
        return [float(rate) for rate in self.scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: its place follows from the run."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        if state_dict:
            raise ConfigError(
                "the place of run.scheduler(...) follows from the run: it has no state"
            )


# ---------------------------------------------------------------- an optimiser taken apart


def taken_apart(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[OptimizerFactory, Groups]:
    """What makes such an optimiser anew over other tensors: its factory, and its groups."""
    kind = type(optimizer)
    if optimizer.state:
        raise ConfigError(
            f"this {kind.__name__} has made steps, and what it keeps would be lost: pass it to "
            "run.optimizer when it is new"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            "a scheduler is attached to this optimiser, and would not act on the one that trains: "
            "attach it to what run.optimizer returns"
        )
    takes = inspect.signature(kind).parameters
    told = {key: value for key, value in optimizer.defaults.items() if key in takes}
    names = {p: name for name, p in model.named_parameters()}
    groups: list[tuple[list[str], dict[str, Any]]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigError(
                    f"the optimiser has a parameter of shape {tuple(parameter.shape)} that is not "
                    "the replica's: make it of model.parameters(), where model is what "
                    "run.replica returned"
                )
        settings = {
            key: value
            for key, value in group.items()
            if key not in ("params", "param_names") and optimizer.defaults.get(key) != value
        }
        groups.append(([names[p] for p in group["params"]], settings))

    def choose(model: nn.Module) -> Sequence[dict[str, Any]]:
        own = dict(model.named_parameters())
        return [{**settings, "params": [own[name] for name in mine]} for mine, settings in groups]

    return partial(kind, **told), choose
