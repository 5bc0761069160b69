"""A script under virtual time: a thread for each worker, of which exactly one runs at a time."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, Self

import torch

from offbeat.chance import Chance
from offbeat.cluster import Cluster
from offbeat.data import mix
from offbeat.engine.player import Player
from offbeat.engine.sim import Simulation
from offbeat.engine.sim_state import drive, restore
from offbeat.errors import ConfigError
from offbeat.job import Job, Place
from offbeat.kept import Kept
from offbeat.lease import Lease
from offbeat.log import Ended, Listener
from offbeat.replay import Replay, follow, settings_of
from offbeat.report.summary import Tally
from offbeat.run import Run
from offbeat.script import (
    Script,
    Wanted,
    reseed,
    script_worker,
)
from offbeat.session import Session, fixed_arithmetic
from offbeat.setup import first_difference
from offbeat.store.checkpoint import RunFolder
from offbeat.store.core import Store
from offbeat.worker import LeftLoop, NumberWorker, Unfinished, Worker


class ScriptWorker(NumberWorker):
    """A worker of which a script computes the gradients, one lease at a turn."""

    def __init__(self, made: NumberWorker, compute: Callable[[Lease], float | None]):
        super().__init__(
            made.number, made.incarnation, made.sender, made.buffers, made.skip_nonfinite
        )
        self.compute = compute
        self.restored = False

    def catch_up(self) -> list[Lease]:
        computed: list[Lease] = []
        while self.todo:
            self.sender.begin()
            if self.restored:  # a script begins without gradients
                for parameter in self.sender.replica.parameters.values():
                    parameter.grad = None
                self.restored = False
            self.finish(self.todo[0], self.compute(self.todo[0]))
            computed.append(self.todo.pop(0))
        return computed

    def load(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        super().load(tensors, meta)
        self.restored = True


# ---------------------------------------------------------------- all of them


class Stage:
    """The threads of one run; whoever is on it has the random numbers and `__main__`."""

    def __init__(self, script: Script, workers: int, asked: Mapping[str, Any]):
        self.script, self.workers, self.asked = script, workers, asked
        self.players: dict[int, Player] = {}
        self.on: Player | None = None  # who ran last
        self.first: Player | None = None
        self.described: dict[str, Any] = {}
        self.stopped: int | None = None  # whose script has ended the run
        self.away: set[int] = set()  # whose script has left its loop
        self.around = ExitStack()

    def __enter__(self) -> Self:
        self.around.enter_context(fixed_arithmetic())
        self.around.enter_context(self.script.as_program())
        reseed(mix(self.asked.get("seed", 0), 4), Lease(0, 0, 0))
        self.start = Chance()
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

    def open(self) -> tuple[Wanted, "StagedJob"]:
        """Let the first thread run up to its first batch: there everything is known."""
        self.first = self._begin(0)
        assert self.first.wanted is not None
        wanted = self.first.wanted
        job = wanted.job()
        job.discipline.check_order()
        self.described = wanted.described(job)
        return wanted, StagedJob.of(job, self)

    def _begin(self, number: int) -> Player:
        """A new thread, as far as its first batch; every worker begins with the same numbers."""
        if self.on is not None:
            self.on.chance = Chance()
            self.on = None
        if number in self.players:
            self.players[number].end()
        self.start.recall()
        player = self.players[number] = Player(self.script, number, self.workers, self.asked)
        self._turn(player)
        if player.wanted is None:
            raise ConfigError(
                f"{self.script.path} ended without a loop: write "
                "for x, y in run.batches(dataset, batch_size=32) inside with ob.join() as run"
            )
        return player

    def _turn(self, player: Player, lease: Lease | None = None) -> None:
        if self.on is not player:
            if self.on is not None:
                self.on.chance = Chance()
            player.chance.recall()
            sys.modules["__main__"] = player.module
            self.on = player
        player.turn(lease)

    def make_worker(self, job: Job, store: Store, number: int, incarnation: int) -> ScriptWorker:
        """A worker with a thread that has just begun."""
        player = self.first if number == 0 and self.first is not None else self._begin(number)
        self.first = None if number == 0 else self.first
        assert player.wanted is not None
        self._compare(number, player.wanted)
        place = Place(reader=player.reader, model=player.wanted.model)
        made = script_worker(job, store, number, incarnation, place)

        def compute(lease: Lease) -> float | None:
            player.made = False
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
            if not player.made:
                raise Unfinished(f"worker {number} ended the run at version {player.version}")
            return player.loss

        player.worker = worker = ScriptWorker(made, compute)
        return worker

    def _compare(self, number: int, wanted: Wanted) -> None:
        """Every thread has to make the same model and settings."""
        difference = first_difference(self.described, wanted.sketch())
        if difference is not None:
            raise ConfigError(
                f"the script is not the same for worker {number}: {difference}; before the loop "
                "nothing may depend on run.rank or on chance"
            )

    @property
    def ended(self) -> bool:
        """Whether a script has ended the run for all, or all have left their loops."""
        return self.stopped is not None or len(self.away) == self.workers

    def finish(self, store: Store, there: Sequence[int]) -> None:
        """One after the other, whoever is there leaves the loop with the final parameters."""
        assert store.parameters is not None
        for number in there:
            player = self.players[number]
            assert player.wanted is not None
            store.parameters.export(player.wanted.model)
            if player.worker is not None:
                player.worker.base = store.version
            try:
                self._turn(player)
            except SystemExit as leaving:
                if leaving.code not in (None, 0):
                    raise


@dataclass(frozen=True)
class StagedJob(Job):
    """A job whose workers are threads on a stage."""

    stage: Stage | None = None

    @classmethod
    def of(cls, job: Job, stage: Stage) -> "StagedJob":
        return cls(**{field.name: getattr(job, field.name) for field in fields(job)}, stage=stage)

    def make_worker(
        self, store: Store, number: int, incarnation: int, place: Place | None = None
    ) -> Worker:
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
    """Run `script` on a simulated cluster; `asked` are settings that win over the script's."""
    with Stage(script, len(cluster), asked) as stage:
        wanted, job = stage.open()
        config = stage.described | {
            "engine": "sim",
            "cluster": cluster.to_toml(),
            "origin": {"loop": script.path.name},
        }
        settings = wanted.settings
        kept = stage.around.enter_context(Kept.open(settings.out, settings.resume, config, job))
        store = job.make_store(kept.log())
        tally = Tally(job.workers)
        every = settings.checkpoint_every
        session = Session(job, store, kept.folder, None, job.samples, every)
        followers = (*listeners, *settings.listeners)
        for listener in followers:
            listener.describe(config, None)  # the store itself will say
        store.log.listeners += [tally, *followers]
        with store.log.followed(store, job.samples * job.epochs):
            sim = Simulation(job, cluster, store)
            if kept.saved is None:
                sim.start()
            else:
                with kept.restoring():
                    restore(sim, *kept.saved)
                    session.restore(kept.saved[1])
                kept.recount(tally)
            drive(sim, session, lambda: stage.ended)
            if stage.stopped is not None and not store.finished:
                store.log.write(Ended(sim.now, stage.stopped, store.version))
            stage.finish(store, [n for n, agent in enumerate(sim.agents) if agent.alive])
        most = max((worker.nbytes for worker in sim.workers.values()), default=0)
        return kept.finish(job, store, tally, "sim", most)


def replay_script(script: Script, folder: RunFolder, every: int = 1) -> Replay:
    """Run the log of a script's run again, with the script computing what the log says."""
    config = settings_of(folder)
    named = ("discipline", "seed", "codec", "nonfinite", "hash_every", "shards", "policies")
    asked = {key: getattr(config, key) for key in named} | {"out": None, "resume": False}
    asked["layout"] = config.layout
    with Stage(script, config.workers, asked) as stage:
        torch.set_num_threads(config.threads)  # as many as each worker had
        _, job = stage.open()
        described = stage.described | {"numerics": config.numerics}
        return follow(folder, replace(job, numerics=config.numerics), described, every)
