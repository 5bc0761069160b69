"""What a run keeps in its folder: opened, gone on with, and closed with the result."""

import json
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
import xxhash
from torch import Tensor, nn

from offbeat.config.describe import first_difference
from offbeat.config.job import Job
from offbeat.discipline.course import as_course
from offbeat.discipline.discipline import Discipline
from offbeat.engine.result import Run, interrupted
from offbeat.engine.signals import heard
from offbeat.errors import CheckpointError, ConfigError, RunError
from offbeat.folder.checkpoint import RunFolder, model_tensors
from offbeat.folder.disk import write_json
from offbeat.folder.lock import Lock
from offbeat.folder.tensors import raw, replace_tensors
from offbeat.log.files import checksum, measure
from offbeat.log.log import Log
from offbeat.log.records import Begun, Relaid
from offbeat.model.table import under
from offbeat.report.split import layout_figures
from offbeat.report.summary import History, Summary, Tally
from offbeat.store.parameters import Parameters
from offbeat.store.store import Store


def undisturbed(write: Callable[[], Run]) -> Run:
    """What `write` returns; the first Ctrl-C or SIGTERM waits for that, and then raises.

    The next one stops at once. What is written meanwhile is there whole or not at all, so that the
    run can be resumed.
    """
    asked: list[int] = []
    with heard(asked.append):
        run = write()
    if asked:
        raise interrupted(run, asked[0])
    return run


Saved = tuple[dict[str, Tensor], dict[str, Any]]  # a checkpoint: tensors and the rest


# What may be another when a run goes on. A checkpoint does not say how it was sharded, nor how
# contributions met.
FREE = ("origin", "shards", "via", "device")
REAL = ("local", "hosts", "ray")  # engines whose checkpoints are the same


@dataclass(frozen=True)
class RunSession:
    """A run's folder, if it has one, and the checkpoint that it goes on from, if it does.

    The folder is locked until the end of a `with` block.
    """

    folder: RunFolder | None
    saved: Saved | None = None
    relaid: Relaid | None = None  # replicas are split in another way from here on
    lock: Lock | None = None

    @classmethod
    def open(cls, out: Any, resume: bool, config: Mapping[str, Any], job: Job) -> "RunSession":
        """Begin a folder, or find the checkpoint to go on from."""
        if out is None:
            return cls(None)
        folder = RunFolder(out)
        if not (resume and folder.config_file.exists()):
            folder.check_new(resume)  # before anything is written there
        lock = folder.lock()
        try:
            return cls._opened(folder, resume, config, job, lock)
        except OSError as error:
            lock.release()
            raise CheckpointError(
                f"{error.filename or folder.path} cannot be used: {error.strerror}"
            ) from error
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _opened(
        cls, folder: RunFolder, resume: bool, config: Mapping[str, Any], job: Job, lock: Lock
    ) -> "RunSession":
        if not resume or not folder.config_file.exists():
            initial = model_tensors(job.content.model)
            folder.create(config, initial, resume, _name(config, initial))
            return cls(folder, lock=lock)
        before = folder.config()
        found = folder.newest(_Fits(folder))
        saved = None if found is None else (found.tensors, found.meta)
        relaid = None
        if config["engine"] in REAL and saved is not None:
            before |= _in_force(folder, saved, before)
            if before["layout"] != config["layout"]:
                relaid = Relaid(saved[1]["time"], config["layout"], config["threads"])
        # Nor does a checkpoint say how replicas were split, but a replay has to know: the log will.
        free = (*FREE, *(("layout", "threads") if relaid else ()))
        if before["engine"] in REAL and config["engine"] in REAL:
            free = (*free, "engine")
        here = {key: value for key, value in config.items() if key not in free}
        difference = first_difference(before, here)
        if difference is not None:
            raise CheckpointError(
                f"{folder.path} is another run: {difference}; use the same settings to resume it"
            )
        folder.reopen()
        if found is not None:
            folder.forget_after(found.name)
        return cls(folder, saved, relaid, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let others use the folder."""
        if self.lock is not None:
            self.lock.release()

    def passed_on(self) -> Any:
        """The child that is forked inside holds the folder from then on, and this process not."""
        return nullcontext() if self.lock is None else self.lock.passed_on()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """What is wrong with a checkpoint that is whole: another version wrote it, or nobody."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            assert self.folder is not None
            self.release()
            raise CheckpointError(
                f"the checkpoint in {self.folder.path} does not fit this run "
                f"({type(error).__name__}: {error}): start the run again in a new folder"
            ) from error

    def log(self) -> Log:
        if self.folder is None:
            return Log()
        keep = None if self.saved is None else self.saved[1]["session"]["log"]
        return Log(self.folder.log_file, keep, self.folder.run)

    def recount(self, tally: Tally) -> None:
        """The figures of a run that goes on begin with what is already in its log."""
        if self.folder is not None and self.saved is not None:
            for record in self.folder.records(self.saved[1]["session"]["log"]):
                tally.see(record)

    def finish(self, job: Job, store: Store, tally: Tally, engine: str, worker: int) -> Run:
        """The result; `worker` is the most bytes that one holds. A Ctrl-C waits for it."""
        return undisturbed(lambda: self._finished(job, store, tally, engine, worker))

    def _finished(self, job: Job, store: Store, tally: Tally, engine: str, worker: int) -> Run:
        summary = tally.summary(
            str(job.course),
            engine,
            store.leases.ledger.summary(),
            {"store": store.parameters.nbytes, "worker": worker},
            store.parameters.digest(),
        )
        summary.layout = layout_figures(job.content.cut, job.workers)
        summary.shares = job.shares.told
        model = job.export(store)
        assert model is not None
        return self.write(model, tally.history, summary)

    def write(self, model: nn.Module, history: History, summary: Summary) -> Run:
        """Leave model and summary in the folder, if there is one."""
        folder = self.folder
        if folder is not None:
            try:
                replace_tensors(folder.model_file, model_tensors(model))
                write_json(folder.summary_file, summary.to_dict())
                length, total = measure(folder.log_file, folder.run)
                told = {"length": length, "checksum": total}
                folder.note(folder.model_file, folder.summary_file, log=told)
            except OSError as error:
                raise RunError(
                    f"the run is over, but its model could not be written ({error.strerror}): "
                    f"make room and resume {folder.path}, which then only writes it"
                ) from error
        return Run(model, history, summary, folder.path if folder else None)

    def begin_with(self, store: Store, earlier: RunFolder) -> Begun:
        """Begin with an earlier run, and keep what was taken from it; says what was not."""
        begun = begin_with(store.parameters, earlier, store.discipline)
        if self.folder is not None:  # for replay, which may outlive the earlier run
            replace_tensors(self.folder.start_file, store.parameters.state())
            self.folder.note(self.folder.start_file)
        if begun.left:
            warnings.warn(
                f"start={begun.folder!r}: parameters and buffers are taken over, but not what the "
                f"rule kept (momentum and the like), so it begins afresh: {begun.left}",
                RuntimeWarning,
                stacklevel=_users_level(),
            )
        return begun


def _users_level() -> int:
    """How far up the caller of offbeat is, to whom a warning in the caller of this belongs."""
    level, frame = 1, sys._getframe(1)
    ours = ("offbeat", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


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
    text = str(earlier.config().get("discipline"))
    try:
        before = as_course(text).first
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
    for record in folder.records(saved[1]["session"]["log"]):
        if isinstance(record, Relaid):
            found = {"layout": record.layout, "threads": record.threads}
    return found


def _name(config: Mapping[str, Any], initial: Mapping[str, Tensor]) -> str:
    """What the run is called in its files.

    By chance if real processes make it. A simulation is the same whenever it is made, its log to
    the byte, so what it is called follows from what it is.
    """
    if config["engine"] != "sim":
        return secrets.token_hex(16)
    plain = {key: value for key, value in config.items() if key not in FREE}
    total = xxhash.xxh3_128(json.dumps(plain, sort_keys=True, default=str).encode())
    for name, tensor in initial.items():
        total.update(name.encode())
        total.update(raw(tensor.detach().cpu().contiguous()))
    return total.hexdigest()


class _Session(msgspec.Struct):
    """What a checkpoint says of its log."""

    log: Annotated[int, msgspec.Meta(ge=0)]
    checksum: str | None = None  # since format 2


class _Fits:
    """Whether the log has all that a checkpoint counts on, and is the same log."""

    def __init__(self, folder: RunFolder):
        self.folder = folder

    def __call__(self, meta: Mapping[str, Any]) -> None:
        path = self.folder.log_file
        try:
            told = msgspec.convert(meta.get("session"), _Session)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"a checkpoint in {self.folder.path} does not fit its log: {error}"
            ) from None
        found = checksum(path, told.log, self.folder.run)
        if found is None:
            raise CheckpointError(
                f"{path} is shorter than its checkpoint says: the log has been cut"
            )
        if told.checksum is not None and told.checksum != found:
            raise CheckpointError(f"{path} is not the log that its checkpoint was written with")
