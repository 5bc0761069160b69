"""Everything one run is made of; engines make the store and the workers of it.

`Job` is one that trains, `CostJob` one that only moves bytes, and `AnyJob` what both have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from offbeat.codec import Codec
from offbeat.config.devices import Devices
from offbeat.config.units import LeastTime
from offbeat.data.lease import Leases
from offbeat.data.reader import Reader
from offbeat.data.shares import EQUAL, Shares
from offbeat.discipline.course import Course
from offbeat.discipline.discipline import Discipline
from offbeat.errors import ConfigError
from offbeat.log.log import Log
from offbeat.model.checks import sparse_parameters
from offbeat.model.device import CPU, Device
from offbeat.model.objective import Loss
from offbeat.model.replica import OwnReplica, Replica, SharedReplica
from offbeat.model.shared_model import SharedModel
from offbeat.model.table import BySize, Flat, Placement, parameter_entries, total_bytes
from offbeat.model.table import place as place_tables
from offbeat.rules.updater import Recipe
from offbeat.split.channel import alone
from offbeat.split.one_process import PartsInOneProcess
from offbeat.split.part import ALL, Part, PartSpec
from offbeat.split.plan.cut import Cut
from offbeat.split.replica import PartReplica, parts_of
from offbeat.split.script_replica import ScriptPart, ScriptReplica
from offbeat.store.board import Cells
from offbeat.store.cost_only import CostOnlyParameters
from offbeat.store.gossip import GossipParameters
from offbeat.store.parameters import Parameters
from offbeat.store.pulls import PackedPulls, WholePulls
from offbeat.store.staleness import Reads
from offbeat.store.store import Store
from offbeat.worker.send import Outs, Sender, make_sender
from offbeat.worker.worker import CostOnlyWorker, NumberWorker, StreamWorker, Worker

# How numbers are made. A run folder says which of these holds in it, so that old ones are gone on
# with and replayed as they began.
BY_BASE = 2  # late gradients are compared with what they were computed on, not with the last pull
HALVES = 3  # it does not matter to the last bit where a tensor of bfloat16 or float16 lies
NUMERICS = HALVES


@dataclass(frozen=True)
class WorkerMemory:
    """Where a worker's numbers lie, and who reads for it; None is its own process."""

    parameters: list[Flat] | None = None
    out: list[list[Flat]] | None = None
    reader: Reader | None = None
    model: nn.Module | None = None  # the script's own object, where a script computes
    alone: bool = False  # in a process that needs the job's model for nothing else
    buffers: Mapping[str, Tensor] | None = None  # what averaged ones begin with, if it is told
    device: Device = CPU  # where it computes


@dataclass(frozen=True)
class CostOnly:
    """A model that is never computed: a cost-only run moves its bytes and nothing else."""

    nbytes: int
    samples: int


@dataclass(frozen=True)
class Training:
    """A model that is really trained: how a replica computes and how the store applies."""

    model: nn.Module
    reader: Reader
    loss: Loss
    store_rule: Recipe
    local_rule: Recipe | None = None
    placement: Placement = field(default_factory=BySize)
    policies: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    cut: Cut | None = None  # how each replica is split, if it is
    devices: Devices = field(default_factory=Devices)  # where each worker computes

    # The same model for all who compute with it in one process.
    shared: SharedModel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", SharedModel(self.model))

    @property
    def samples(self) -> int:
        return len(self.reader)


@dataclass(frozen=True)
class AnyJob:
    """One run: what is trained, under which discipline, by how many workers, for how long."""

    content: Training | CostOnly
    course: Course
    workers: int
    batch_size: int
    epochs: int
    seed: int = 0
    codec: Codec | None = None
    pull_codec: Codec | None = None  # of the change that a worker pulls
    nonfinite: Literal["stop", "skip"] = "stop"
    hash_every: int = 1
    drop_last: bool = False  # whether an epoch ends with its last whole batch
    numerics: int = NUMERICS
    shares: Shares = EQUAL  # of a round's samples

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers must be at least 1, not {self.workers}")
        if self.nonfinite not in ("stop", "skip"):
            raise ConfigError(f"nonfinite must be 'stop' or 'skip', not {self.nonfinite!r}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must lie between 0 and 2**63 - 1, not {self.seed}")
        if self.hash_every < 1:
            raise ConfigError(f"hash_every must be at least 1, not {self.hash_every}")

    @property
    def discipline(self) -> Discipline:
        """What it begins with; what is sent and applied stays the same throughout its course."""
        return self.course.first

    def check_simulated(self) -> None:
        """Refuse what virtual time cannot show."""
        self.discipline.check_order()

    @property
    def samples(self) -> int:
        """What is trained on in each epoch."""
        return self.content.samples - self.left_out

    @property
    def left_out(self) -> int:
        """Samples of each epoch that make no whole batch; other ones each time, if shuffled."""
        there = self.content.samples
        few = there < self.batch_size  # which is refused
        return there % self.batch_size if self.drop_last and not few else 0

    def leases(self) -> Leases:
        sizes = self.shares.sizes(self.batch_size, self.workers, self.unit)
        return Leases(self.samples, self.batch_size, self.epochs, self.left_out, sizes)

    @property
    def unit(self) -> int:
        """Sizes of leases are multiples of this."""
        return 1

    @property
    def lease_range(self) -> tuple[int, int]:
        """The fewest and the most samples of a lease, but for the end of an epoch."""
        return self.shares.range(self.batch_size, self.workers, self.unit)

    def least_time(self, seconds: float) -> LeastTime:
        """Of a worker whose steps take so long, if they are emulated."""
        return LeastTime(seconds, self.batch_size if self.shares.uneven else 0)

    def make_store(
        self, log: Log, flats: Sequence[Flat] | None = None, cells: Cells | None = None
    ) -> Store:
        """The store, in this process's own memory or with parameters and board where they are."""
        parameters = self.make_parameters(flats)
        return Store(
            self.course, self.workers, self.leases(), log, parameters, self.hash_every, cells
        )

    def make_parameters(self, flats: Sequence[Flat] | None = None) -> Parameters:
        """The store's numbers."""
        raise NotImplementedError

    def make_worker(self, store: Store, number: int, incarnation: int) -> Worker:
        """A participant, without what it pulls."""
        raise NotImplementedError

    def make_worker_here(self, store: Store, number: int, incarnation: int) -> Worker:
        """One that computes in this process."""
        return self.make_worker(store, number, incarnation)

    def push_bytes(self, store: Store) -> int:
        """Bytes of one contribution without updater state, known before it is computed."""
        raise NotImplementedError

    def pull_bytes(self, store: Store) -> int:
        """Bytes of one pull, likewise."""
        raise NotImplementedError

    def updater_bytes(self, store: Store) -> int:
        """Bytes of local optimiser state that travel both ways where the workers average it."""
        raise NotImplementedError


@dataclass(frozen=True)
class CostJob(AnyJob):
    """A run in which nothing is computed."""

    content: CostOnly

    def make_parameters(self, flats: Sequence[Flat] | None = None) -> CostOnlyParameters:
        return CostOnlyParameters(self.content.nbytes)

    def make_worker(self, store: Store, number: int, incarnation: int) -> CostOnlyWorker:
        return CostOnlyWorker(number, incarnation, self.content.nbytes)

    def push_bytes(self, store: Store) -> int:
        return self.content.nbytes

    def pull_bytes(self, store: Store) -> int:
        return self.content.nbytes

    def updater_bytes(self, store: Store) -> int:
        return 0


@dataclass(frozen=True)
class Job(AnyJob):
    """A run in which a model is trained."""

    content: Training

    def check(self) -> None:
        """Make everything once that may refuse to be made, before a run begins."""
        self.leases()
        store = self.make_store(Log())
        self.make_worker(store, 0, 1)

    def check_here(self) -> None:
        """Refuse what cannot be where all workers compute in one process."""
        device, cut = self.content.devices.single, self.content.cut
        if not device.shares and cut is not None and cut.shards is not None:
            raise ConfigError(
                f"the parts of {cut.layout} wait for each other in backward passes, and PyTorch "
                "makes those of one process one after the other on a device: leave device out"
            )

    def check_simulated(self) -> None:
        super().check_simulated()
        self.check_here()
        cut = self.content.cut
        if cut is not None and cut.layout.asynchronous:
            raise ConfigError(
                f"schedule={cut.layout.schedule} has several batches of a worker under way, and a "
                "simulated worker does one thing at a time: use engine='local', or schedule=1f1b"
            )

    @property
    def unit(self) -> int:
        """A lease is computed in this many pieces, of which none is to be empty."""
        cut = self.content.cut
        return self.content.accumulate if cut is None else cut.layout.pieces

    @property
    def skips(self) -> bool:
        """Whether contributions that are not finite are left out; fp16 finds its scale by them."""
        cut = self.content.cut
        return self.nonfinite == "skip" or (cut is not None and cut.layout.precision == "fp16")

    def make_parameters(
        self,
        flats: Sequence[Flat] | None = None,
        held: Sequence[int] | None = None,
        kind: type[Parameters] = Parameters,
    ) -> Parameters:
        """The store's numbers, or those of some of its shards."""
        numbers = self.content
        if self.discipline.pairs and not issubclass(kind, GossipParameters):
            kind = GossipParameters
        made = kind(
            numbers.model,
            numbers.placement,
            numbers.store_rule,
            self.discipline.weigh,
            numbers.policies,
            flats,
            held,
            WholePulls() if self.pull_codec is None else PackedPulls(self.pull_codec, self.seed),
        )
        if isinstance(made, GossipParameters):
            made.seed = self.seed
        made.reads = Reads(
            1 if numbers.cut is None else numbers.cut.layout.under_way, self.numerics >= BY_BASE
        )
        if self.numerics < HALVES:
            made.as_before()
        return made

    def make_worker(
        self, store: Store, number: int, incarnation: int, place: WorkerMemory | None = None
    ) -> NumberWorker:
        numbers, parameters = self.content, store.parameters
        place = place or WorkerMemory()
        reader = place.reader or numbers.reader
        if numbers.cut is not None:
            spec = PartSpec(
                numbers.cut,
                ALL,
                alone(),
                reader,
                numbers.loss,
                script=place.model,
                device=place.device,
            )
            replica: Replica = self.make_part(spec, place.parameters)
        elif place.model is not None or place.alone:
            kind = Replica if place.model is None else OwnReplica
            replica = kind(
                numbers.model if place.model is None else place.model,
                parameters.tables,
                reader,
                numbers.loss,
                numbers.accumulate,
                place.parameters,
                place.device,
            )
        else:
            replica = SharedReplica(
                numbers.shared,
                parameters.tables,
                reader,
                numbers.loss,
                numbers.accumulate,
                place.device,
            )
        # An earlier incarnation may have used the same model, and the others have gone on.
        replica.load_buffers(parameters.averages.begun_with() | dict(place.buffers or {}))
        return self.worker_of(store, number, incarnation, self.make_sender(replica, place.out))

    def make_worker_here(self, store: Store, number: int, incarnation: int) -> Worker:
        place = WorkerMemory(device=self.content.devices.single)
        return self.make_worker(store, number, incarnation, place)

    def make_part(self, spec: PartSpec, flats: Sequence[Flat] | None = None) -> PartReplica:
        """The part of a split replica that `spec` describes; `flats` are its own."""
        numbers = self.content
        shards = spec.cut.shards
        together = shards is not None and spec.process == ALL
        tables = place_tables(parameter_entries(numbers.model), numbers.placement)
        made = PartsInOneProcess if together else Part if spec.script is None else ScriptPart
        part = made(numbers.shared.enter(numbers.shared.users), spec)
        mine = [tables[number] for number in spec.cut.tables_of(part.numbers)]
        if shards is not None and not together:
            mine = parts_of(mine, shards)
        kind = ScriptReplica if isinstance(part, ScriptPart) else PartReplica
        return kind(part, mine, flats)

    def make_sender(self, replica: Replica, out: Outs = None) -> Sender:
        """What sends as the discipline asks, over a replica or a part of one."""
        filled = self.discipline.for_workers(self.workers)
        return make_sender(filled, replica, self.codec, self.content.local_rule, out)

    def worker_of(
        self, store: Store, number: int, incarnation: int, sender: Sender
    ) -> NumberWorker:
        """A worker around a sender."""
        cut = self.content.cut
        kind = StreamWorker if cut is not None and cut.layout.asynchronous else NumberWorker
        return kind(number, incarnation, sender, store.parameters.buffers, self.skips)

    def push_bytes(self, store: Store) -> int:
        parameters = store.parameters
        entries = [entry for table in parameters.tables for entry in table]
        if self.codec is None:
            size = sum(entry.nbytes for entry in entries)
        else:
            size = sum(self.codec.nbytes(entry.shape, entry.dtype) for entry in entries)
        return size + sum(e.nbytes for e in parameters.buffers if e.policy == "averaged")

    @property
    def sparse(self) -> tuple[str, ...]:
        """Parameters of whose gradients only some rows are sent, if they are a gradient's."""
        each = self.discipline.send.each_gradient
        return sparse_parameters(self.content.model) if each else ()

    def pull_bytes(self, store: Store) -> int:
        """Bytes of the parameters that a worker pulls, after its first pull."""
        if self.pull_codec is None:
            return store.pull_bytes
        entries = [entry for table in store.parameters.tables for entry in table]
        return sum(self.pull_codec.nbytes(entry.shape, entry.dtype) for entry in entries)

    def updater_bytes(self, store: Store) -> int:
        if not self.discipline.send.averages_state:
            return 0
        worker = self.make_worker(store, 0, 1)
        return total_bytes(worker.sender.learn_state().values())

    def tested(self, store: Store, device: Device = CPU) -> nn.Module:
        """The model with the store's parameters for a while: until a replica computes with it."""
        shared = self.content.shared
        own = {
            name: p.detach().to(device.place, copy=True)
            for name, p in shared.users.parameters.items()
        }
        held = shared.held(own, device)
        store.parameters.export_to(own | held.buffers)
        return shared.enter(held)

    def export(self, store: Store) -> nn.Module:
        """The user's model with the store's parameters, when nobody computes with it any more."""
        return store.parameters.export(self.content.shared.give_back())
