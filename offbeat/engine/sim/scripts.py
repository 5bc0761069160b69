"""A script under virtual time: a thread for each worker, of which exactly one runs at a time."""

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from types import MappingProxyType, TracebackType
from typing import Any, Self

import msgspec
import torch

from offbeat.config.describe import describe_job, first_difference, settings_of, sketch
from offbeat.config.job import Job, WorkerMemory
from offbeat.config.run_config import RunConfig
from offbeat.data.lease import Lease
from offbeat.data.random_state import RandomState
from offbeat.data.reader import mix
from offbeat.engine.bring_up import bring_up
from offbeat.engine.result import Run
from offbeat.engine.script import Script, reseed, script_job, script_worker
from offbeat.engine.session import fixed_arithmetic
from offbeat.engine.sim.cluster import Cluster
from offbeat.engine.sim.script_thread import ScriptThread
from offbeat.engine.sim.simulation import Simulation
from offbeat.engine.sim.state import simulate
from offbeat.errors import ConfigError
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.log import Listener
from offbeat.log.records import Dropped, Ended, Settings, Updated
from offbeat.replay import Replay, follow
from offbeat.store.store import Store
from offbeat.worker.worker import LeftLoop, NumberWorker, ScriptStep, Unfinished

# The steps of an incarnation in their order, with the settings that the script had at each.
Steps = deque[tuple[Lease, Settings | None]]


class ScriptWorker(NumberWorker):
    """A worker of which a script computes the gradients, one lease at a turn."""

    def __init__(self, made: NumberWorker, compute: Callable[[Lease], ScriptStep], told: Steps):
        """`told` is what a log says of its steps, if one is followed."""
        super().__init__(
            made.number, made.incarnation, made.sender, made.buffers, made.skip_nonfinite
        )
        self.compute, self.told = compute, told
        self.restored = False

    def catch_up(self) -> list[Lease]:
        computed: list[Lease] = []
        while self.todo:
            self.sender.begin()
            if self.restored:  # a script begins without gradients
                for parameter in self.sender.replica.parameters.values():
                    parameter.grad = None
                self.restored = False
            step = self.compute(self.todo[0])
            if self.told and self.told[0][0] == self.todo[0]:
                step = msgspec.structs.replace(step, settings=self.told.popleft()[1])
            self.finish(self.todo[0], step)
            computed.append(self.todo.pop(0))
        return computed

    def load(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        super().load(tensors, meta)
        self.restored = True


# ---------------------------------------------------------------- all of them


class ScriptThreads:
    """The threads of one run; whoever is on it has the random numbers and `__main__`."""

    def __init__(
        self,
        script: Script,
        cluster: Cluster,
        asked: Mapping[str, Any],
        told: Mapping[tuple[int, int], Steps] = MappingProxyType({}),
    ):
        """`told` has the steps of each incarnation of a worker, where a log is followed."""
        self.script, self.cluster, self.asked, self.told = script, cluster, asked, told
        self.players: dict[int, ScriptThread] = {}
        self.on: ScriptThread | None = None  # who ran last
        self.first: ScriptThread | None = None
        self.sketch: dict[str, Any] = {}  # what all threads have to say alike
        self.stopped: int | None = None  # whose script has ended the run
        self.away: set[int] = set()  # whose script has left its loop
        self.around = ExitStack()

    def __enter__(self) -> Self:
        self.around.enter_context(fixed_arithmetic())
        self.around.enter_context(self.script.as_program())
        reseed(mix(self.asked.get("seed", 0), 4), Lease(0, 0, 0))
        self.start = RandomState()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for player in self.players.values():
            player.end()
        self.around.close()

    def open(self) -> tuple[RunConfig, "ScriptJob"]:
        """Let the first thread run up to its first batch: there everything is known."""
        self.first = self._begin(0)
        assert self.first.config is not None
        config = self.first.config
        self.sketch = sketch(config)
        return config, ScriptJob.of(script_job(config), self)

    def _begin(self, number: int) -> ScriptThread:
        """A new thread, as far as its first batch; every worker begins with the same numbers."""
        if self.on is not None:
            self.on.chance = RandomState()
            self.on = None
        if number in self.players:
            self.players[number].end()
        self.start.recall()
        player = self.players[number] = ScriptThread(self.script, number, self.cluster, self.asked)
        self._turn(player)
        if player.config is None:
            raise ConfigError(
                f"{self.script.path} ended without a loop: write "
                "for x, y in run.batches(dataset, batch_size=32) inside with ob.join() as run"
            )
        return player

    def _turn(self, player: ScriptThread, lease: Lease | None = None) -> None:
        if self.on is not player:
            if self.on is not None:
                self.on.chance = RandomState()
            player.chance.recall()
            sys.modules["__main__"] = player.module
            self.on = player
        player.turn(lease)

    def make_worker(self, job: Job, store: Store, number: int, incarnation: int) -> ScriptWorker:
        """A worker with a thread that has just begun."""
        player = self.first if number == 0 and self.first is not None else self._begin(number)
        self.first = None if number == 0 else self.first
        assert player.config is not None
        self._compare(number, player.config)
        device = job.content.devices.single
        place = WorkerMemory(reader=player.reader, model=player.config.model, device=device)
        made = script_worker(job, store, number, incarnation, place)

        def compute(lease: Lease) -> ScriptStep:
            player.made = None
            try:
                self._turn(player, lease)
            except SystemExit as leaving:
                if leaving.code not in (None, 0):
                    raise
            if player.stopping and self.stopped is None:
                self.stopped = number
            if player.finished:
                self.away.add(number)
                raise LeftLoop(f"worker {number} left its loop at version {player.version}")
            if player.made is None:
                raise Unfinished(f"worker {number} ended the run at version {player.version}")
            return player.made

        told = self.told.get((number, incarnation), deque())
        player.worker = worker = ScriptWorker(made, compute, told)
        return worker

    def _compare(self, number: int, config: RunConfig) -> None:
        """Every thread has to make the same model and settings."""
        difference = first_difference(self.sketch, sketch(config))
        if difference is not None:
            raise ConfigError(
                f"the script is not the same for worker {number}: {difference}; before the loop "
                "nothing may depend on run.rank or on chance"
            )

    @property
    def ended(self) -> bool:
        """Whether a script has ended the run for all, or all have left their loops."""
        return self.stopped is not None or len(self.away) == len(self.cluster)

    def finish(self, store: Store, there: Sequence[int]) -> None:
        """One after the other, whoever is there leaves the loop with the final parameters."""
        for number in there:
            player = self.players[number]
            assert player.config is not None
            store.parameters.export(player.config.model)
            if player.worker is not None:
                player.worker.base = store.version
            try:
                self._turn(player)
            except SystemExit as leaving:
                if leaving.code not in (None, 0):
                    raise


@dataclass(frozen=True)
class ScriptJob(Job):
    """A job whose workers are threads on a stage."""

    stage: ScriptThreads | None = None

    @classmethod
    def of(cls, job: Job, stage: ScriptThreads) -> "ScriptJob":
        return cls(**{field.name: getattr(job, field.name) for field in fields(job)}, stage=stage)

    def make_worker(
        self, store: Store, number: int, incarnation: int, place: WorkerMemory | None = None
    ) -> ScriptWorker:
        assert self.stage is not None
        return self.stage.make_worker(self, store, number, incarnation)

    def updater_bytes(self, store: Store) -> int:
        """Learnt from a worker that is thrown away, and so needs no thread."""
        plain = Job(**{field.name: getattr(self, field.name) for field in fields(Job)})
        return plain.updater_bytes(store)


# ---------------------------------------------------------------- a whole run


def simulate_script(
    script: Script,
    cluster: Cluster,
    asked: Mapping[str, Any],
    listeners: Sequence[Listener] = (),
) -> Run:
    """Run `script` on a simulated cluster; `asked` are options that win over the script's."""
    with ScriptThreads(script, cluster, asked) as stage:
        config, job = stage.open()
        config = replace(config, listeners=(*listeners, *config.listeners))
        run = stage.around.enter_context(bring_up(config, job))

        def after(sim: Simulation) -> None:
            store = sim.store
            if stage.stopped is not None and not store.finished:
                store.log.write(Ended(sim.now, stage.stopped, store.version))
            stage.finish(store, [n for n, agent in enumerate(sim.agents) if agent.alive])

        return simulate(run, lambda: stage.ended, after)


def steps_in(folder: RunFolder) -> dict[tuple[int, int], Steps]:
    """The steps of each incarnation of each worker that were contributed.

    A script's rates may depend on what it has counted. One that was given up and joins again goes
    on counting, steps that were lost among them, so the log is asked and not the script.
    """
    found: defaultdict[tuple[int, int], dict[int, Steps]] = defaultdict(dict)
    for record in folder.records():
        parts = record.parts if isinstance(record, Updated) else []
        for part in [record.part] if isinstance(record, Dropped) else parts:
            each = part.each or [part.settings] * len(part.leases)
            steps = deque(zip(part.leases, each, strict=False))
            found[part.worker, part.incarnation][part.sequence] = steps
    return {
        who: deque(step for number in sorted(sent) for step in sent[number])
        for who, sent in found.items()
    }


def replay_script(script: Script, folder: RunFolder, every: int = 1) -> Replay:
    """Run the log of a script's run again, with the script computing what the log says."""
    told = settings_of(folder)
    named = ("discipline", "seed", "codec", "pull_codec", "nonfinite", "shares")
    asked = {key: getattr(told, key) for key in (*named, *("hash_every", "shards", "policies"))}
    asked["layout"] = told.layout
    asked |= {"out": None, "resume": False, "device": None}
    with ScriptThreads(script, Cluster.equal(told.workers), asked, steps_in(folder)) as stage:
        torch.set_num_threads(told.threads)  # as many as each worker had
        config, job = stage.open()
        job = replace(job, numerics=told.numerics)
        return follow(folder, job, describe_job(config, job), every)
