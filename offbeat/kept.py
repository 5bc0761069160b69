"""What a run keeps in its folder: opened, gone on with, and closed with the result."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from offbeat.discipline import Discipline, parse
from offbeat.errors import CheckpointError, ConfigError, RunError
from offbeat.job import Job, Numbers
from offbeat.log import Begun, Log, Relaid, read
from offbeat.report.split import layout_figures
from offbeat.report.summary import History, Summary, Tally
from offbeat.run import Run
from offbeat.setup import first_difference
from offbeat.store.checkpoint import RunFolder, model_tensors, save_tensors, write_json
from offbeat.store.core import Store
from offbeat.store.parameters import Parameters
from offbeat.store.table import under

Saved = tuple[dict[str, Tensor], dict[str, Any]]  # a checkpoint: tensors and the rest


@dataclass(frozen=True)
class Kept:
    """A run's folder, if it has one, and the checkpoint that it goes on from, if it does."""

    folder: RunFolder | None
    saved: Saved | None = None
    relaid: Relaid | None = None  # replicas are split in another way from here on

    @classmethod
    def open(cls, out: Any, resume: bool, config: Mapping[str, Any], job: Job) -> "Kept":
        """Begin a folder, or find the checkpoint to go on from."""
        if out is None:
            if resume:
                raise ConfigError("resuming needs a folder: name the one of the run to go on with")
            return cls(None)
        folder = RunFolder(out)
        if not resume or not folder.config_file.exists():
            assert isinstance(job.content, Numbers)
            folder.create(config, model_tensors(job.content.model), resume)
            return cls(folder)
        saved, before = folder.load(), folder.config()
        relaid = None
        if config["engine"] == "local" and saved is not None:
            before |= _in_force(folder, saved, before)
            if before["layout"] != config["layout"]:
                relaid = Relaid(saved[1]["time"], config["layout"], config["threads"])
        # A checkpoint does not say how it was sharded, nor how contributions met. Nor does it say
        # how replicas were split, but a replay has to know: the log will.
        free = ("origin", "shards", "via", *(("layout", "threads") if relaid else ()))
        here = {key: value for key, value in config.items() if key not in free}
        difference = first_difference(before, here)
        if difference is not None:
            raise CheckpointError(
                f"{folder.path} is another run: {difference}; use the same settings to resume it"
            )
        return cls(folder, saved, relaid)

    def log(self) -> Log:
        if self.folder is None:
            return Log()
        keep = None if self.saved is None else self.saved[1]["session"]["log"]
        return Log(self.folder.log_file, keep=keep)

    def recount(self, tally: Tally) -> None:
        """The figures of a run that goes on begin with what is already in its log."""
        if self.folder is not None and self.saved is not None:
            for record in read(self.folder.log_file, self.saved[1]["session"]["log"]):
                tally.see(record)

    def finish(self, job: Job, store: Store, tally: Tally, engine: str, worker: int) -> Run:
        """The result; `worker` is the most bytes that one holds."""
        assert store.parameters is not None
        summary = tally.summary(
            str(job.discipline),
            engine,
            store.leases.ledger.summary(),
            {"store": store.parameters.nbytes, "worker": worker},
            store.parameters.digest(),
        )
        assert isinstance(job.content, Numbers)
        summary.layout = layout_figures(job.content.cut, job.workers)
        model = job.export(store)
        assert model is not None
        return self.write(model, tally.history, summary)

    def write(self, model: nn.Module, history: History, summary: Summary) -> Run:
        """Leave model and summary in the folder, if there is one."""
        if self.folder is not None:
            try:
                save_tensors(self.folder.model_file, model_tensors(model))
                write_json(self.folder.summary_file, summary.to_dict())
            except OSError as error:
                raise RunError(
                    f"the run is over, but its model could not be written ({error.strerror}): "
                    f"make room and resume {self.folder.path}, which then only writes it"
                ) from error
        return Run(model, history, summary, self.folder.path if self.folder else None)

    def begin_with(self, store: Store, earlier: RunFolder) -> Begun:
        """Begin with an earlier run, and keep what was taken from it; says what was not."""
        assert store.parameters is not None
        begun = begin_with(store.parameters, earlier, store.discipline)
        if self.folder is not None:  # for replay, which may outlive the earlier run
            save_tensors(self.folder.start_file, store.parameters.state())
        if begun.left:
            warnings.warn(
                f"start={begun.folder!r}: parameters and buffers are taken over, but not what the "
                f"rule kept (momentum and the like), so it begins afresh: {begun.left}",
                RuntimeWarning,
                stacklevel=3,
            )
        return begun


def begin_with(parameters: Parameters, earlier: RunFolder, discipline: Discipline) -> Begun:
    """Take parameters, buffers and rule state from an earlier run, but not its epochs and clocks.

    What a rule keeps is taken only if it has the same role here, and is the same rule.
    """
    found = earlier.load()
    if found is None:
        raise CheckpointError(f"{earlier.path} has no checkpoint to begin with")
    tensors, meta = found
    why = _other_role(earlier, discipline)
    where = str(earlier.path)
    left = parameters.begin_with(under("store/", tensors), meta["parameters"], where, why)
    return Begun(0.0, where, left)


def _other_role(earlier: RunFolder, discipline: Discipline) -> str:
    """Why a rule's state means nothing under another discipline; nothing if it does."""
    text = str(earlier.config()["discipline"])
    try:
        before = parse(text)
    except ConfigError:
        return f"nobody knows what the rule of {text} was given"
    if before.pairs and not discipline.pairs:
        return f"under {text} every worker had a rule of its own"
    if before.descends != discipline.descends:
        return f"that rule was given {before.descends}, this one is given {discipline.descends}"
    return ""


def _in_force(folder: RunFolder, saved: Saved, config: Mapping[str, Any]) -> dict[str, Any]:
    """How replicas were split when the checkpoint was written, and their threads."""
    found = {"layout": config.get("layout"), "threads": config.get("threads")}
    for record in read(folder.log_file, saved[1]["session"]["log"]):
        if isinstance(record, Relaid):
            found = {"layout": record.layout, "threads": record.threads}
    return found
