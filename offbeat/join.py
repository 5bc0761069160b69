"""The front door for scripts: `with ob.join() as run`, and the loop is the user's own."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from offbeat.codec import Codec
from offbeat.config.keywords import check_join, check_kinds
from offbeat.config.task import OptimizerFactory
from offbeat.data.lease import Lease
from offbeat.data.reader import Collate
from offbeat.discipline.course import Course
from offbeat.discipline.discipline import Discipline
from offbeat.engine.script import Participant, ScriptHost, host, script_config
from offbeat.engine.script_hosts import SingleHost, torchrun_host
from offbeat.errors import ConfigError
from offbeat.log.log import Listener
from offbeat.model.checks import Trained, check_script_loss
from offbeat.model.table import Placement
from offbeat.rules.constraint import Constraint
from offbeat.rules.schedule import Schedule, Shown
from offbeat.rules.updater import Clip
from offbeat.split.layout import Layout
from offbeat.split.script_model import ScriptModel

Module = TypeVar("Module", bound=nn.Module)
ONE_LOOP = "pass epochs=3 to batches; run.epoch says which one it is"


class Defaults(TypedDict, total=False):
    """What `join` takes; what the command line of `offbeat run` says wins."""

    discipline: Discipline | Course | str
    seed: int
    out: str | Path | None
    resume: bool
    patience: float | None
    via: str
    codec: Codec | str | None
    pull_codec: Codec | str | None
    shards: int | Placement
    policies: Mapping[str, str]
    nonfinite: Literal["stop", "skip"]
    hash_every: int | None
    checkpoint_every: int | None
    listeners: Sequence[Listener]
    layout: Layout | str | None
    token: str | Path | None  # of ranks on several hosts: a file, or "$NAME", a variable


def join(**defaults: Unpack[Defaults]) -> "Member":
    """Take part in a run with a loop of one's own; alone under `python train.py`.

    Keywords are defaults (see `Defaults`): what the command line of `offbeat run` says wins.
    """
    check_join(defaults, Defaults.__annotations__)
    check_kinds(defaults)
    return Member(host.get() or torchrun_host() or SingleHost(), defaults)


# ---------------------------------------------------------------- what the script holds


class Member:
    """This participant of a run: the replica, the optimiser and the batches of its script."""

    def __init__(self, where: ScriptHost, defaults: Defaults):
        self._host, self._defaults = where, defaults
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._seat: Participant | None = None
        self._front: ScriptModel | None = None  # of a model that is split
        self._trained: Trained | None = None
        self._lease: Lease | None = None
        self._holds = False  # whether a batch is out whose step has not been made
        self._loss: float | None = None
        self._looked = False  # at what a loss is computed from
        self._epoch = 0
        self._stopping = False  # the run is to end for all after this step
        self._over = self._away = False  # no more batches, because it has ended, or was left

    # ------------------------------------------------------------ before the loop

    def replica(self, model: Module) -> Module:
        """The model to train, the same object; from the first batch on it follows the store."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"replica takes a torch.nn.Module, not {type(model).__name__}")
        if self._model is not None:
            raise ConfigError("replica is called once: put both models into one nn.ModuleList")
        if any(tensor.device.type != "cpu" for tensor in model.parameters()):
            raise ConfigError("the model must lie on the CPU when it is passed to replica")
        self._model = model
        return model

    def optimizer(
        self,
        factory: OptimizerFactory | None = None,
        *,
        schedule: Schedule | None = None,
        clip: Clip | None = None,
        groups: Callable[[nn.Module], Sequence[dict[str, Any]]] | None = None,
        constrain: Constraint | str | Sequence[Constraint | str] | None = None,
    ) -> "Optimizer":
        """Makes the steps; `factory` is like `partial(torch.optim.SGD, lr=0.1)`.

        Under a discipline that brings its own rule (asup, downpour) the factory is not used.
        """
        if self._optimizer is not None:
            raise ConfigError("optimizer is called once: give parts of the model groups of theirs")
        if isinstance(factory, torch.optim.Optimizer):
            kind = type(factory).__name__
            raise ConfigError(
                "the optimiser is made over the store's tensors: pass a factory such as "
                f"partial(torch.optim.{kind}, lr=0.1), not an optimiser"
            )
        self._optimizer = Optimizer(
            self,
            {
                "optimizer": factory,
                "schedule": schedule,
                "clip": clip,
                "groups": groups,
                "constrain": constrain,
            },
        )
        return self._optimizer

    def batches(
        self,
        dataset: Dataset[Any],
        batch_size: int = 32,
        *,
        epochs: int = 1,
        shuffle: bool = True,
        collate: Collate | None = None,
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """This worker's share of all batches of all epochs; each is followed by one step.

        With `drop_last` an epoch ends with its last whole batch.
        """
        if self._seat is not None:
            raise ConfigError(f"batches is called once, for all epochs: {ONE_LOOP}")
        if self._model is None:
            raise ConfigError("batches before replica: write model = run.replica(Net()) first")
        if self._optimizer is None:
            raise ConfigError(
                "batches before optimizer: write "
                "optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1)) first"
            )
        if isinstance(dataset, DataLoader):
            raise ConfigError(
                "batches takes the dataset and not a DataLoader: write "
                "run.batches(loader.dataset, batch_size=32), with collate= if you have one"
            )
        optimizer = self._optimizer
        self._trained = Trained(self._model)
        said: dict[str, Any] = {
            **self._defaults,
            "model": self._model,
            "data": dataset,
            "batch_size": batch_size,
            "epochs": epochs,
            "shuffle": shuffle,
            "collate": collate,
            "drop_last": drop_last,
            "origin": {"loop": Path(sys.argv[0]).name},
            **optimizer.said,
        }
        config = script_config(self._host.settle(said))
        self._seat = self._host.participant(config)
        if config.layout is not None:
            self._front = ScriptModel(self._model)
        return self._each(self._seat)

    # ------------------------------------------------------------ the loop

    def _each(self, participant: Participant) -> Iterator[Any]:
        self._lease = participant.next()
        while self._lease is not None:
            self._epoch = self._lease.epoch
            self._holds = True
            batch = participant.batch(self._lease)
            if self._front is not None:
                self._front.begin(participant.stages, self._lease)
            try:
                yield batch
            except GeneratorExit:  # a break, or an error in the loop
                self._leave()
                raise
            if self._stopping:
                self._leave()
            elif self._holds:
                raise ConfigError(
                    "a batch was not followed by optimizer.step(): make one step for each batch; "
                    "to accumulate gradients, use a larger batch_size"
                )
        self._close()

    def _step(self) -> None:
        if self._over:
            raise ConfigError("optimizer.step() after the loop: it belongs inside run.batches(...)")
        if self._seat is None or self._lease is None or not self._holds:
            raise ConfigError(
                "optimizer.step() without a new batch: make one step for each batch, inside "
                "for x, y in run.batches(dataset, batch_size=32)"
            )
        assert self._trained is not None
        self._trained.check()
        if self._front is not None:
            self._front.check()
        self._holds = False
        loss, self._loss = self._loss, None
        try:
            self._lease = self._seat.done(self._lease, loss, self._stopping)
        except BaseException:
            self._over = True  # whoever catches this is told nothing more
            raise
        if self._lease is None:
            self._close()

    def stop(self) -> None:
        """End the run for all workers, when this batch has had its step or at the next batch.

        A run with a folder saves a checkpoint, and can be resumed. Every worker leaves its loop,
        and its model holds the last version.
        """
        if self._seat is None:
            raise ConfigError("run.stop() before the loop: call it inside run.batches(...)")
        if self._away:
            raise ConfigError("run.stop() after this worker has left the run: call it before break")
        self._stopping = True

    def _leave(self) -> None:
        """The loop is left before the samples are done: for all, or for this worker alone."""
        if self._over or self._seat is None:
            return
        self._over, self._holds, self._lease = True, False, None
        if self._stopping:
            self._seat.stop()
        else:
            self._away = True
            self._seat.leave()
        self._close()

    def _close(self) -> None:
        """No stages any more: the model computes by itself."""
        self._over |= self._seat is not None
        if self._front is not None:
            self._front.close()

    def record(self, loss: Tensor | float) -> None:
        """Tell the log the loss of this batch; to be called before its step."""
        if not self._holds:
            raise ConfigError("record belongs to a batch: call run.record(loss) before its step")
        if isinstance(loss, Tensor) and not self._looked:
            self._looked = True
            if self._model is not None and self._front is None and self.workers > 1:
                check_script_loss(loss, self._model)
        self._loss = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)

    @property
    def rank(self) -> int:
        """This worker's number; 0 before the loop, where there is one process."""
        return self._host.rank if self._seat is None else self._seat.rank

    @property
    def workers(self) -> int:
        """How many take part."""
        return self._host.workers

    @property
    def version(self) -> int:
        """The store's version that the model holds."""
        return 0 if self._seat is None else self._seat.version

    @property
    def epoch(self) -> int:
        """The epoch of this batch, from 0."""
        return self._epoch

    # ------------------------------------------------------------ the with block

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._leave()  # a loop over batches that are still held
        self._close()
        if self._seat is not None:
            self._seat.left(error)


class Optimizer:
    """Makes the steps of a script's loop; the rule itself works at the store or the worker."""

    def __init__(self, member: Member, said: Mapping[str, Any]):
        self._member, self.said = member, said
        self._shown: Shown | None = None

    def step(self, closure: None = None) -> None:
        """Hand over the gradient of this batch; afterwards the model holds what was pulled."""
        if closure is not None:
            raise ConfigError("step takes no closure: compute the loss in the loop")
        self._member._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as PyTorch does it."""
        if self._member._model is not None:
            self._member._model.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters and settings, to be read; rates are those of the version the model holds."""
        model, participant = self._member._model, self._member._seat
        factory, groups = self.said["optimizer"], self.said["groups"]
        if model is None or factory is None:
            return []
        if self._shown is None:
            chosen: Any = groups(model) if groups else None
            if chosen is None:
                chosen = [p for p in model.parameters() if p.requires_grad]
            self._shown = Shown(partial(factory, chosen), self.said["schedule"])
        at = (0, 0) if participant is None else (participant.version, participant.epochs)
        return [Fixed(group) for group in self._shown.groups(*at)]


class Fixed(dict[str, Any]):
    """A group's settings, which only a schedule changes."""

    def __setitem__(self, key: str, value: Any) -> NoReturn:
        raise ConfigError(
            f"{key} cannot be set here, because the rule works elsewhere: pass "
            "schedule=ob.Schedule(...) or groups= to run.optimizer"
        )
