"""The launcher of a run on Ray: the store is here, its workers are actors on any host."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from offbeat.config.job import Job
from offbeat.config.run_config import OnRay, RunConfig
from offbeat.engine.bring_up import bring_up
from offbeat.engine.hosts.admission import Entrance
from offbeat.engine.hosts.listener import Security, listen
from offbeat.engine.hosts.store import DialingLauncher, HostsRoles
from offbeat.engine.local.launcher import run_local
from offbeat.engine.local.launcher_messages import RunDone, ServerReports, WorkerGone, send_order
from offbeat.engine.local.plan import check
from offbeat.engine.ray.actor import Assignment, RayActor, WorkerActor
from offbeat.engine.ray.cluster import Draining, RayCluster, connected, last_line
from offbeat.engine.ray.handle import ActorHandle
from offbeat.engine.ray.task import Read, Task
from offbeat.engine.result import Run
from offbeat.engine.spawn import ProcessFailed, where
from offbeat.errors import ConfigError
from offbeat.transport.dial import Address
from offbeat.transport.tls import store_context

STRATEGIES = {"spread": "SPREAD", "pack": "DEFAULT"}


class Actors:
    """The workers of a run as actors: some are ready before it begins, others come later.

    One for which Ray has no room waits, and is there as soon as a host is added.
    """

    def __init__(self, cluster: RayCluster, engine: OnRay, told: "Told"):
        self.ray, self.engine = cluster.ray, engine
        need = dict(engine.resources)
        self.kind = self.ray.remote(told.kind).options(
            num_cpus=need.pop("CPU"),
            num_gpus=need.pop("GPU", 0),
            resources=need,
            scheduling_strategy=STRATEGIES[engine.placement],
        )
        self.task = told.send(self.ray)
        self.again = told.kind.again
        self.spare: list[Any] = []

    def get_ready(self, workers: int) -> None:
        """Wait until so many are; what one of them lacks is told, and nothing has begun yet."""
        self.spare += [self._new() for _ in range(workers)]
        left = [actor.ready.remote() for actor in self.spare]
        while left:
            done, left = self.ray.wait(left)
            try:
                words = self.ray.get(done[0])
            except self.ray.exceptions.RayError as error:
                raise ConfigError(
                    f"Ray could not start a worker ({last_line(error)}): every host needs the "
                    "same Python, Ray and offbeat as this one, and memory for its workers"
                ) from error
            if words is not None:
                raise ConfigError(f"{where(words.trace, '{}: ')}{words.message}")

    def start(self, assignment: Assignment) -> ActorHandle:
        """An actor that works; one that is ready, if there is any."""
        actor = self.spare.pop() if self.spare else self._new()
        spare = self.spare if self.again else None
        return ActorHandle(self.ray, actor, assignment, spare)

    def _new(self) -> Any:
        return self.kind.remote(self.task, self.engine)

    def close(self) -> None:
        for actor in self.spare:
            self.ray.kill(actor)
        self.spare.clear()


class RayLauncher(DialingLauncher):
    """Has Ray start workers, and start others where those are gone.

    Ray's word that one is gone is a hint: it may live and be cut off. Who has its place is for the
    store to say, which lets in one link for each worker.
    """

    def __init__(
        self,
        actors: Actors,
        draining: Draining,
        assign: Callable[[int, bool], Assignment],
        *what: Any,
    ):
        super().__init__(*what)
        self.actors, self.draining, self.assign = actors, draining, assign

    def _turn(self) -> bool:
        """Whoever is on a host that is about to go leaves before that, and comes back elsewhere."""
        for child in self.children.values():
            if isinstance(child, ActorHandle) and child.node in self.draining.nodes:
                child.kill()
        return super()._turn()

    def _dial(self, number: int, instead: bool) -> None:
        self._watch(number, self.actors.start(self.assign(number, instead)))

    def _hear(self, report: ServerReports) -> None:
        super()._hear(report)
        if isinstance(report, RunDone):  # whoever has not said goodbye by now takes no part
            for number, child in self.children.items():
                if number >= 0 and number not in report.words:
                    child.kill()

    def _gone(self, number: int) -> bool:
        child = self.children[number]
        if number >= 0 and self.done is None and self.orders is not None:
            with suppress(OSError):  # the server has died too, and another one knows nobody
                send_order(self.orders, WorkerGone(number))
        try:
            return super()._gone(number)
        except ProcessFailed as error:
            if isinstance(child, ActorHandle) and child.why:
                raise ProcessFailed(f"{error}. Ray says: {child.why}") from error
            raise


class ScriptLauncher(RayLauncher):
    """The same where workers are scripts, which may go on behind their loops."""

    scripted = True

    def __init__(self, *what: Any):
        super().__init__(*what)
        self.through = 0  # scripts that have left before the end of the run

    def _gone(self, number: int) -> bool:
        child = self.children[number]
        lives = super()._gone(number)
        self.through += child.well
        return lives

    def _left_alone(self) -> bool:
        """Nor does one wait, when the others are through, for those that Ray has no room for."""
        actors = [child for child in self.children.values() if isinstance(child, ActorHandle)]
        return self.through > 0 and not any(actor.node for actor in actors)

    def _patience_left(self) -> float | None:
        return None if self.mistake is None else super()._patience_left()


@dataclass(frozen=True)
class Told:
    """What the workers of a run are told: by Ray at first, and then by the store.

    `kind` is the actor and `task` what it is made of; a store says how its scripts are to go on
    (`settings`) and compares what they come to (`sketch`).
    """

    kind: type[RayActor]
    task: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    sketch: Mapping[str, Any] = field(default_factory=dict)
    scripted: bool = False

    def send(self, ray: Any) -> Any:
        """Put it where each host fetches it once, however many workers it has."""
        try:
            return ray.put(self.task)
        except Exception as error:
            what, why = blame(ray, self.task, error)
            raise ConfigError(
                f"{what} cannot be sent to other hosts ({why}): make what it needs on the host "
                "where it is used, as in data=a_function that opens the dataset"
            ) from error


def blame(ray: Any, task: Any, error: Exception) -> tuple[str, Exception]:
    """The first part of a task that cannot be pickled, and why."""
    for name, value in getattr(task, "parts", {}).items():
        try:
            ray.cloudpickle.dumps(value)
        except Exception as found:
            return name, found
    return "the run", error


def run_on_ray(config: RunConfig, job: Job, read: Read | None) -> Run:
    """Train with workers that Ray places; with `read` each host reads the data for itself."""
    return run_with(config, job, Told(WorkerActor, Task.of(config, read)))


def run_with(config: RunConfig, job: Job, told: Told) -> Run:
    """The same, whatever the actors are."""
    engine = config.engine
    assert isinstance(engine, OnRay)
    check(job, engine)
    begin = engine.begin or config.workers
    with connected(engine, config.workers) as cluster:
        cluster.has_room(engine, begin)
        actors = Actors(cluster, engine, told)
        try:
            actors.get_ready(begin)
            return _run(config, job, actors, cluster.home, told)
        finally:
            actors.close()


def _run(config: RunConfig, job: Job, actors: Actors, home: str, told: Told) -> Run:
    engine = actors.engine
    with bring_up(config, job) as run, listen(Address(home, 0)) as listening:
        address = Address(home, listening.getsockname()[1])
        encrypts = not address.stays_here if engine.tls is None else engine.tls
        token = secrets.token_bytes(32)
        security = Security(token, *store_context(None)) if encrypts else Security(token)
        entrance = Entrance(listening, security, told.settings, told.sketch)
        roles = run.roles(partial(HostsRoles, entrance))

        def assign(number: int, instead: bool) -> Assignment:
            threads = roles.threads(number)
            return Assignment(number, instead, threads, address, encrypts, token)

        draining = Draining(actors.ray)
        kind = ScriptLauncher if told.scripted else RayLauncher
        make = partial(kind, actors, draining, assign)
        with draining.followed():
            return run_local(roles, run.kept, run.tally, config.listeners, make)
