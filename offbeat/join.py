"""The front door for scripts: `with ob.join() as run`, and the loop is the user's own."""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from offbeat.codec import Codec
from offbeat.config.devices import expected
from offbeat.config.keywords import check_join, check_kinds
from offbeat.config.run_config import Hosts
from offbeat.config.setup import expected_updates
from offbeat.config.task import OptimizerFactory
from offbeat.data.lease import Lease
from offbeat.data.reader import Collate
from offbeat.data.shares import Shares
from offbeat.discipline.course import Course, as_course
from offbeat.discipline.discipline import Discipline
from offbeat.engine.script import Participant, ScriptHost, host, script_config
from offbeat.engine.script_hosts import SingleHost, torchrun_host
from offbeat.errors import ConfigError
from offbeat.folder.checkpoint import RunFolder
from offbeat.folder.script_state import Kept, ScriptStates, check_kept
from offbeat.log.log import Listener
from offbeat.log.records import Settings
from offbeat.loop import Batches, per_epoch
from offbeat.model.checks import Trained, check_script_loss
from offbeat.model.table import Placement
from offbeat.rules.constraint import Constraint
from offbeat.rules.schedule import Schedule
from offbeat.rules.script_optimizer import ScriptOptimizer, SharedScheduler, taken_apart
from offbeat.rules.updater import Clip
from offbeat.split.layout import Layout
from offbeat.split.script_model import ScriptModel
from offbeat.worker.worker import ScriptStep

Module = TypeVar("Module", bound=nn.Module)
ONE_LOOP = "pass epochs=3 to batches; run.epoch says which one it is"


class Defaults(TypedDict, total=False):
    """What `join` takes; what the command line of `offbeat run` says wins."""

    discipline: Discipline | Course | str
    seed: int
    out: str | Path | None
    resume: bool
    patience: float | None
    backup: Literal["auto", False]
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
    device: str | Sequence[str] | None
    shares: Shares | str | Sequence[float] | None
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
        self._optimizer: ScriptOptimizer | None = None
        self._rule: dict[str, Any] = {}  # what was said of it
        self._schedulers: list[SharedScheduler] = []
        self._kept: dict[bool, dict[str, Kept]] = {False: {}, True: {}}  # by whether it is for all
        self._states: ScriptStates | None = None  # where that is kept, in a run with a folder
        self._seat: Participant | None = None
        self._front: ScriptModel | None = None  # of a model that is split
        self._trained: Trained | None = None
        self._lease: Lease | None = None
        self.holds = False  # whether a batch is out whose step has not been made
        self._loss: float | None = None
        self._expected = 0  # updates of the whole run
        self._begun = False  # whether the first samples have been asked for
        self._looked = False  # at what a loss is computed from
        self._epoch = self._made = 0  # the epoch of this batch; steps of this worker
        self._own = True  # whether the rule is the script's
        self.stopping = False  # the run is to end for all after this step
        self._over = self._away = False  # no more batches, because it has ended, or was left

    # ------------------------------------------------------------ before the loop

    def replica(self, model: Module) -> Module:
        """The model to train, the same object; from the first batch on it follows the store."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"replica takes a torch.nn.Module, not {type(model).__name__}")
        if self._model is not None:
            raise ConfigError("replica is called once: put both models into one nn.ModuleList")
        place = next((p.device for p in model.parameters() if p.device.type != "cpu"), None)
        if place is not None:
            raise ConfigError(
                f"the model lies on {place} and must be on the CPU when it is passed to replica: "
                f"say device='{place}', and from the first batch on it is there"
            )
        self._model = model
        return model

    def optimizer(
        self,
        rule: torch.optim.Optimizer | OptimizerFactory | None = None,
        *,
        schedule: Schedule | None = None,
        clip: Clip | None = None,
        groups: Callable[[nn.Module], Sequence[dict[str, Any]]] | None = None,
        constrain: Constraint | str | Sequence[Constraint | str] | None = None,
    ) -> ScriptOptimizer:
        """Makes the steps: a `torch.optim.Optimizer` that hands them over.

        `rule` is an optimiser over the replica's parameters, as a plain loop has it, or a factory
        such as `partial(torch.optim.SGD, lr=0.1)`. Under a discipline that brings its own rule
        (asup, downpour) it is not used.
        """
        if self._model is None:
            raise ConfigError("optimizer before replica: write model = run.replica(Net()) first")
        if self._optimizer is not None:
            raise ConfigError("optimizer is called once: give parts of the model groups of theirs")
        factory: OptimizerFactory | None
        if isinstance(rule, torch.optim.Optimizer):
            if groups is not None:
                raise ConfigError("groups= is for a factory: this optimiser has its groups already")
            factory, groups = taken_apart(rule, self._model)
        else:
            factory = rule
        self._rule = {
            "optimizer": factory,
            "schedule": schedule,
            "clip": clip,
            "groups": groups,
            "constrain": constrain,
        }
        self._optimizer = ScriptOptimizer(self._model, factory, groups, schedule, self._step)
        return self._optimizer

    def scheduler(
        self, scheduler: LRScheduler, per: Literal["batch", "epoch"] = "batch"
    ) -> SharedScheduler:
        """Let a scheduler of PyTorch's follow what all workers have done together.

        It is made for a plain loop over all batches and stepped in the loop as there; `per` says
        how often that is.
        """
        if self._optimizer is None or getattr(scheduler, "optimizer", None) is not self._optimizer:
            raise ConfigError(
                "run.scheduler takes a scheduler of what run.optimizer returned: write "
                "run.scheduler(StepLR(optimizer, 30))"
            )
        if self._seat is not None:
            raise ConfigError("scheduler after batches: call run.scheduler before the loop")
        where = self._progress if per == "batch" else self._epoch_now
        self._schedulers.append(SharedScheduler(scheduler, per, where))
        return self._schedulers[-1]

    def state(self, *, shared: bool = False, **objects: Kept) -> None:
        """Keep objects of the script in checkpoints, and give them back their state.

        Each is a dict, or has `state_dict` and `load_state_dict`; they hold tensors, numbers, text,
        lists and dicts. They are kept in the run's folder for each worker, or with `shared` as
        worker 0 has them, for all. A run that is resumed, and a worker that comes back, has them as
        they were kept last by the time that the loop begins.
        """
        if self._seat is not None:
            raise ConfigError("state after batches: call run.state before run.batches")
        for name, kept in objects.items():
            if name in self._kept[False] or name in self._kept[True]:
                raise ConfigError(f"run.state has {name} already: give it another name")
            check_kept(name, kept)
            self._kept[shared][name] = kept

    def save_state(self) -> None:
        """Keep what `run.state` was given now, and not only when checkpoints are due."""
        if self._states is None or self._seat is None:
            raise ConfigError(
                "run.save_state has nothing to keep, or nowhere: call run.state(ema=ema) before "
                "the loop, and pass out= to join"
            )
        self._states.save(self._seat.version)

    def _progress(self) -> int:
        return 0 if self._seat is None else self._seat.progress

    def _epoch_now(self) -> int:
        """That of the next batch; after the last one of all of them."""
        if self._lease is None:
            return self._epoch + self._over
        return self._lease.epoch

    def batches(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        epochs: int = 1,
        shuffle: bool | None = None,
        collate: Collate | None = None,
        drop_last: bool | None = None,
    ) -> Batches:
        """This worker's share of all batches of all epochs; each is followed by one step.

        A single loop over them is all epochs; `for epoch in batches.epochs()` makes it one loop
        for each. A `DataLoader` says the rest itself; of a dataset, samples are shuffled
        (`shuffle`) and batches have 32 (`batch_size`). With `drop_last` an epoch ends with its
        last whole batch.
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
            **self._rule,
        }
        config = script_config(self._host.settle(said))
        self._own = config.optimizer is not None
        self._settings()
        keeps = any(self._kept.values())
        if keeps and isinstance(config.engine, Hosts):
            raise ConfigError(
                "run.state keeps objects in the run's folder, and with workers on several hosts "
                "that is the store's: leave run.state out, and save them in the loop"
            )
        self._seat = self._host.participant(config)
        if keeps and config.out is not None:
            every = config.checkpoint_every
            self._states = ScriptStates(RunFolder(config.out), self._seat.rank, self._kept, every)
        if config.layout is not None:
            self._front = ScriptModel(self._model)
        each = per_epoch(len(config.reader()), config.batch_size, config.drop_last)
        all_of_them = each * config.epochs
        self._expected = expected_updates(as_course(config.discipline), config.workers, all_of_them)
        return Batches(self, self._each(self._seat), each)

    # ------------------------------------------------------------ the loop

    def _each(self, participant: Participant) -> Generator[Any, None, None]:
        self.coming()
        while self._lease is not None:
            self._epoch = self._lease.epoch
            self._follow()
            if self._states is not None:  # here, so that all of the last batch is in it
                self._states.save_if_due(participant.version, participant.epochs)
            self.holds = True
            batch = participant.batch(self._lease)
            if self._front is not None:
                self._front.begin(participant.stages, self._lease)
            try:
                yield batch
            except GeneratorExit:  # a break, or an error in the loop
                self._leave()
                raise
            if self.stopping:
                self._leave()
            elif self.holds:
                raise ConfigError(
                    "a batch was not followed by optimizer.step(): make one step for each batch; "
                    "to accumulate gradients, use a larger batch_size"
                )
        self._close()

    def coming(self) -> Lease | None:
        """The samples of the next batch, if there are any."""
        assert self._seat is not None
        if not self._begun:
            self._begun = True
            self._lease = self._seat.next()
            if self._states is not None:
                self._states.restore(self._seat.version, self._seat.epochs)
        return self._lease

    def _follow(self) -> None:
        """The rates of this batch, wherever the script has stepped its schedulers."""
        for scheduler in self._schedulers:
            if self._made == 1 and scheduler.per == "batch" and not scheduler.called:
                raise ConfigError(
                    "run.scheduler(...) was not stepped after a batch: call scheduler.step() after "
                    "optimizer.step(), or pass per='epoch' if the loop steps it once an epoch"
                )
            scheduler.follow()

    def _settings(self) -> Settings | None:
        """What the script has set of its optimiser, if that is used."""
        assert self._optimizer is not None
        found = self._optimizer.settings()
        if found is not None and not self._own:
            raise ConfigError(
                "the discipline brings its own rule, and the rate that was set in the script would "
                "not be used: leave out what sets it, or use asp to apply your optimiser"
            )
        return found

    def _step(self, closed: Any = None) -> None:
        if self._over:
            raise ConfigError("optimizer.step() after the loop: it belongs inside run.batches(...)")
        if self._seat is None or self._lease is None or not self.holds:
            raise ConfigError(
                "optimizer.step() without a new batch: make one step for each batch, inside "
                "for x, y in run.batches(dataset, batch_size=32)"
            )
        assert self._trained is not None
        self._trained.check()
        if self._front is not None:
            self._front.check()
        settings = self._settings()
        if self._loss is None and closed is not None:
            self.record(closed)
        self.holds = False
        loss, self._loss = self._loss, None
        try:
            step = ScriptStep(loss, settings)
            self._lease = self._seat.done(self._lease, step, self.stopping)
        except BaseException:
            self._over = True  # whoever catches this is told nothing more
            raise
        self._made += 1
        assert self._optimizer is not None
        self._optimizer.show(self._seat.version, self._seat.epochs, self._seat.progress)
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
        self.stopping = True

    def _leave(self) -> None:
        """The loop is left before the samples are done: for all, or for this worker alone."""
        if self._over or self._seat is None:
            return
        self._over, self.holds, self._lease = True, False, None
        if self.stopping:
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
        if not self.holds:
            raise ConfigError("record belongs to a batch: call run.record(loss) before its step")
        if isinstance(loss, Tensor) and not self._looked:
            self._looked = True
            if self._model is not None and self._front is None and self.workers > 1:
                check_script_loss(loss, self._model)
        self._loss = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)

    @property
    def device(self) -> torch.device:
        """Where this worker computes: in the loop the batches and the model are there."""
        if self._seat is not None:
            return self._seat.device
        return expected(self._host.settle(self._defaults).get("device"))

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
    def expected_updates(self) -> int:
        """About how many versions the whole run makes, if nobody is lost; 0 before `batches`."""
        return self._expected

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
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            if self._states is not None and self._begun and (error is None or stopped):
                self._states.save(self._seat.version)
            self._seat.left(error)
