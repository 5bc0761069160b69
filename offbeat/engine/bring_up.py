"""Bring a run up, whoever runs it: check, describe, open its folder, count again, tell listeners.

What comes after that is the engine's: in this process it takes `session`, with others `roles`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from offbeat.config.describe import describe
from offbeat.config.devices import devices_of
from offbeat.config.job import Job
from offbeat.config.run_config import Hosts, Local, RunConfig, Simulated
from offbeat.config.setup import try_step
from offbeat.config.task import metrics_of
from offbeat.config.trial import apart
from offbeat.engine.intervals import Intervals
from offbeat.engine.local.plan import check
from offbeat.engine.local.roles import Beginning, Roles
from offbeat.engine.local.verify import StepDifference, verify
from offbeat.engine.result import Run
from offbeat.engine.run_session import RunSession, begin_with
from offbeat.engine.session import Session
from offbeat.errors import ConfigError
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.log import Log
from offbeat.log.records import Begun
from offbeat.model.evaluation import Evaluator
from offbeat.report.score import Judged
from offbeat.report.summary import Tally
from offbeat.store.store import Store


@dataclass(frozen=True)
class ReadyRun:
    """A run that is about to begin; its folder is locked until the end of a `with` block."""

    config: RunConfig
    job: Job
    kept: RunSession
    tally: Tally
    evaluator: Evaluator | None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kept.release()

    @property
    def intervals(self) -> Intervals:
        """How often to test, if there is something to test with, and how often to save."""
        tests = self.config.evaluate_every or self.job.samples
        return Intervals(tests if self.evaluator else None, self.config.checkpoint_every)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """For an engine in this process: a store that is followed, with what happens around it."""
        job, log = self.job, self.kept.log()
        try:
            store = job.make_store(log)
            begun = self._begun(store)
        except BaseException:
            log.close()
            raise
        session = Session(job, store, self.kept.folder, self.evaluator, self.intervals)
        log.listeners += [self.tally, *self.config.listeners]
        with log.followed(store, job.samples * job.epochs):
            if begun is not None:
                log.write(begun)
            yield session

    def roles(self, make: Callable[..., Roles] = Roles) -> Roles:
        """For an engine with processes of its own: what each of them does."""
        assert isinstance(self.config.engine, Local)
        beginning = Beginning(relaid=self.kept.relaid)
        # Now, to find what does not fit; the server then does it again for itself.
        if self.config.start is not None and self._begun(self.job.make_store(Log())) is not None:
            earlier = RunFolder(self.config.start)
            kind = self.job.discipline.for_workers(self.job.workers)
            beginning = Beginning(partial(begin_with, earlier=earlier, discipline=kind))
        engine, folder = self.config.engine, self.kept.folder
        return make(self.job, engine, folder, self.evaluator, self.intervals, beginning)

    def _begun(self, store: Store) -> Begun | None:
        """Begin with an earlier run, unless there is nothing to begin any more."""
        if self.config.start is None or self.kept.saved is not None:
            return None
        return self.kept.begin_with(store, RunFolder(self.config.start))

    def finish(self, store: Store, engine: str, held: int) -> Run:
        """The result, in the folder too; `held` are the most bytes of one worker."""
        return self.kept.finish(self.job, store, self.tally, engine, held)


def bring_up(config: RunConfig, job: Job) -> ReadyRun:
    """Everything up to the first step; what cannot work is refused before anything is written."""
    metrics, evaluator = metrics_of(config.metric), None
    if config.test is not None:
        assert config.loss is not None
        device = devices_of(config.test_device, 1).of(0)
        evaluator = Evaluator(
            config.test, config.loss, config.collate, metrics=metrics, device=device
        )
    _check(config, job)
    described = describe(config, job)
    kept = RunSession.open(config.out, config.resume, described, job)
    try:
        tally = Tally(job.workers, metric=Judged(**metrics[0].described()) if metrics else None)
        kept.recount(tally)
        for listener in config.listeners:
            listener.describe(described, tally.samples)
    except BaseException:
        kept.release()
        raise
    return ReadyRun(config, job, kept, tally, evaluator)


def _check(config: RunConfig, job: Job) -> None:
    engine = config.engine
    if isinstance(engine, Local):
        check(job, engine)
    elif isinstance(engine, Simulated):
        job.check_simulated()
    if config.loss is not None:
        try_step(job, here=not isinstance(engine, Hosts))
    if config.verify:
        if not isinstance(engine, Local) or job.content.cut is None:
            raise ConfigError(
                "verify=True compares the processes of a layout with one process: pass "
                "layout='pp=2' with engine='local', or leave verify out"
            )
        apart(partial(verify, job, engine.threads_for(job)), list[StepDifference])
