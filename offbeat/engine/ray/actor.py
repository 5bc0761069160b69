"""A worker as a Ray actor: what runs in the process that Ray has started on some host."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.utils.data import DataLoader, Dataset

from offbeat.config.job import Job
from offbeat.config.run_config import OnRay, RunConfig
from offbeat.config.setup import make_job
from offbeat.engine.hosts.admission import plain
from offbeat.engine.hosts.sketch import difference, versions
from offbeat.engine.hosts.worker import Entering, HostWorker
from offbeat.engine.local.process import last_words
from offbeat.engine.ray.cluster import needed
from offbeat.engine.ray.task import Read, Task
from offbeat.engine.session import fixed_arithmetic
from offbeat.engine.spawn import LastWords
from offbeat.errors import ConfigError
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.handshake import Refused, TooLate
from offbeat.transport.link import StoreGone
from offbeat.transport.tcp_link import DialedStore


@dataclass(frozen=True)
class Assignment:
    """Which worker an actor is to be, and how it reaches the store."""

    number: int
    instead: bool  # of one that is gone
    threads: int
    address: Address
    encrypts: bool
    token: bytes = field(repr=False)

    def dialer(self) -> Dialer:
        return Dialer(self.address, self.token, self.encrypts)

    def entering(self, sketch: Mapping[str, object]) -> Entering:
        return Entering(self.dialer(), sketch, self.number, self.instead, insists=True)


class RayActor:
    """One worker of a run; it works in the one thread that Ray gives it.

    Devices that Ray has given to this process are all that it sees: `device="auto"` is on them.
    """

    again: ClassVar[bool] = False  # whether one that has failed is as good as a new one

    def __init__(self, task: Any, engine: OnRay):
        self.task, self.engine = task, engine
        self.fresh = False  # whether it is ready, and has not worked since

    def ready(self) -> LastWords | None:
        """What it lacks, if it lacks something."""
        try:
            check_versions(self.task.versions)
            self.prepare()
        except Exception as error:
            return last_words(error)
        self.fresh = True
        return None

    def prepare(self) -> None:
        """Make of what was sent all that can be made without a store."""

    def node(self) -> str:
        """On which host it is, as Ray names hosts."""
        node: str = needed().get_runtime_context().get_node_id()
        return node

    def work(self, assignment: Assignment) -> LastWords | None:
        """Work until the run is over; what it has failed of, if it has."""
        lacks = None if self.fresh else self.ready()
        if lacks is not None:
            return lacks
        self.fresh = False
        try:
            return self.take_part(assignment)
        except TooLate:
            return None
        except (Refused, StoreGone) as error:  # its place is another's, or nobody answers
            return LastWords(f"it has lost its store ({error})")
        except Exception as error:
            return last_words(error)

    def take_part(self, assignment: Assignment) -> LastWords | None:
        raise NotImplementedError


class WorkerActor(RayActor):
    """A worker of `ob.train`."""

    again = True

    def prepare(self) -> None:
        self.job = job_of(self.task, self.engine)

    def take_part(self, assignment: Assignment) -> None:
        request = assignment.entering({}).request()
        maker = DialedStore(assignment.dialer(), request, self.engine.patience)
        with fixed_arithmetic(assignment.threads):
            HostWorker(self.job, self.engine, maker, None).run()


def check_versions(launchers: Mapping[str, Any]) -> None:
    words = difference(launchers, plain(versions()))
    if words:
        raise ConfigError(
            f"{platform.node()} does not fit the host of this run, because {words}: install the "
            "same on every host of the cluster"
        )


def job_of(task: Task, engine: OnRay) -> Job:
    """The same job as the launcher's, of what was sent from there."""
    given = dict(task.given)
    if task.read is not None:
        given["data"] = read(task.read)
    return make_job(RunConfig(**given, engine=engine))


def read(data: Read) -> Dataset[Any]:
    """What a user's function opens here."""
    try:
        found = data()
        # What a loader says beside its dataset has come with the task.
        return found.dataset if isinstance(found, DataLoader) else found
    except Exception as error:
        raise ConfigError(
            f"the data cannot be read on {platform.node()} ({type(error).__name__}: {error}): "
            "put it at the same place on every host, or pass a dataset, which is sent there"
        ) from error
