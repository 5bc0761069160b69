"""Everything one run is made of; engines make the store and the workers of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from offbeat.board import Cells
from offbeat.choices import Change
from offbeat.codec import Codec
from offbeat.data import Reader
from offbeat.discipline import Discipline
from offbeat.errors import ConfigError
from offbeat.layout.cut import Cut
from offbeat.lease import Leases
from offbeat.link.mesh import alone
from offbeat.log import Log
from offbeat.replica.objective import Loss
from offbeat.replica.open import OpenPart, OpenReplica
from offbeat.replica.part import ALL, Part, Seat
from offbeat.replica.shared import SharedModel
from offbeat.replica.split import PartReplica, parts_of
from offbeat.replica.turns import Turns
from offbeat.replica.whole import OwnReplica, Replica, SharedReplica
from offbeat.send import ChangeSender, Outs, Sender, make_sender
from offbeat.store.core import Store
from offbeat.store.parameters import Parameters
from offbeat.store.replicas import Replicas
from offbeat.store.table import BySize, Flat, Placement, parameter_entries, total_bytes
from offbeat.store.table import place as place_tables
from offbeat.store.updater import Recipe
from offbeat.store.weigh import Reads
from offbeat.worker import GhostWorker, NumberWorker, StreamWorker, Worker

# How numbers are made. A run folder says which of these holds in it, so that old ones are gone on
# with and replayed as they began.
BY_BASE = 2  # late gradients are compared with what they were computed on, not with the last pull
HALVES = 3  # it does not matter to the last bit where a tensor of bfloat16 or float16 lies
NUMERICS = HALVES


@dataclass(frozen=True)
class Place:
    """Where a worker's numbers lie, and who reads for it; None is its own process."""

    parameters: list[Flat] | None = None
    out: list[list[Flat]] | None = None
    reader: Reader | None = None
    model: nn.Module | None = None  # the script's own object, where a script computes
    alone: bool = False  # in a process that needs the job's model for nothing else
    buffers: Mapping[str, Tensor] | None = None  # what averaged ones begin with, if it is told


@dataclass(frozen=True)
class Ghost:
    """A model that is never computed: a cost-only run moves its bytes and nothing else."""

    nbytes: int
    samples: int


@dataclass(frozen=True)
class Numbers:
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

    # The same model for all who compute with it in one process.
    shared: SharedModel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", SharedModel(self.model))


@dataclass(frozen=True)
class Job:
    """One run: what is trained, under which discipline, by how many workers, for how long."""

    content: Numbers | Ghost
    discipline: Discipline
    workers: int
    batch_size: int
    epochs: int
    seed: int = 0
    codec: Codec | None = None
    nonfinite: Literal["stop", "skip"] = "stop"
    hash_every: int = 1
    drop_last: bool = False  # whether an epoch ends with its last whole batch
    numerics: int = NUMERICS

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers must be at least 1, not {self.workers}")
        if self.nonfinite not in ("stop", "skip"):
            raise ConfigError(f"nonfinite must be 'stop' or 'skip', not {self.nonfinite!r}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must lie between 0 and 2**63 - 1, not {self.seed}")
        if self.hash_every < 1:
            raise ConfigError(f"hash_every must be at least 1, not {self.hash_every}")

    def check(self) -> None:
        """Make everything once that may refuse to be made, before a run begins."""
        self.leases()
        store = self.make_store(Log())
        self.make_worker(store, 0, 1)

    def check_simulated(self) -> None:
        """Refuse what virtual time cannot show."""
        self.discipline.check_order()
        cut = None if isinstance(self.content, Ghost) else self.content.cut
        if cut is not None and cut.layout.asynchronous:
            raise ConfigError(
                f"schedule={cut.layout.schedule} has several batches of a worker under way, and a "
                "simulated worker does one thing at a time: use engine='local', or schedule=1f1b"
            )

    @property
    def skips(self) -> bool:
        """Whether contributions that are not finite are left out; fp16 finds its scale by them."""
        cut = None if isinstance(self.content, Ghost) else self.content.cut
        return self.nonfinite == "skip" or (cut is not None and cut.layout.precision == "fp16")

    @property
    def samples(self) -> int:
        """What is trained on in each epoch."""
        return self._there - self.left_out

    @property
    def left_out(self) -> int:
        """Samples of each epoch that make no whole batch; other ones each time, if shuffled."""
        few = self._there < self.batch_size  # which is refused
        return self._there % self.batch_size if self.drop_last and not few else 0

    @property
    def _there(self) -> int:
        return self.content.samples if isinstance(self.content, Ghost) else len(self.content.reader)

    def leases(self) -> Leases:
        return Leases(self.samples, self.batch_size, self.epochs, self.left_out)

    def make_store(
        self, log: Log, flats: Sequence[Flat] | None = None, cells: Cells | None = None
    ) -> Store:
        """The store, in this process's own memory or with parameters and board where they are."""
        parameters = self.make_parameters(flats)
        store = Store(
            self.discipline, self.workers, self.leases(), log, parameters, self.hash_every, cells
        )
        if isinstance(self.content, Ghost):
            store.pull_bytes = self.content.nbytes
        return store

    def make_parameters(
        self,
        flats: Sequence[Flat] | None = None,
        held: Sequence[int] | None = None,
        kind: type[Parameters] = Parameters,
    ) -> Parameters | None:
        """The store's numbers, or those of some of its shards."""
        if isinstance(self.content, Ghost):
            return None
        numbers = self.content
        kind = Replicas if self.discipline.pairs else kind
        made = kind(
            numbers.model,
            numbers.placement,
            numbers.store_rule,
            self.discipline.weigh,
            numbers.policies,
            flats,
            held,
        )
        if isinstance(made, Replicas):
            made.seed = self.seed
        made.reads = Reads(
            1 if numbers.cut is None else numbers.cut.layout.under_way, self.numerics >= BY_BASE
        )
        if self.numerics < HALVES:
            made.as_before()
        return made

    def make_worker(
        self, store: Store, number: int, incarnation: int, place: Place | None = None
    ) -> Worker:
        if isinstance(self.content, Ghost):
            return GhostWorker(number, incarnation, self.content.nbytes)
        numbers, parameters = self.content, store.parameters
        assert parameters is not None
        place = place or Place()
        reader = place.reader or numbers.reader
        if numbers.cut is not None:
            seat = Seat(numbers.cut, ALL, alone(), reader, numbers.loss, script=place.model)
            replica: Replica = self.make_part(seat, place.parameters)
        elif place.model is not None or place.alone:
            kind = Replica if place.model is None else OwnReplica
            replica = kind(
                numbers.model if place.model is None else place.model,
                parameters.tables,
                reader,
                numbers.loss,
                numbers.accumulate,
                place.parameters,
            )
        else:
            replica = SharedReplica(
                numbers.shared, parameters.tables, reader, numbers.loss, numbers.accumulate
            )
        # An earlier incarnation may have used the same model, and the others have gone on.
        replica.load_buffers(parameters.averages.begun_with() | dict(place.buffers or {}))
        return self.worker_of(store, number, incarnation, self.make_sender(replica, place.out))

    def make_part(self, seat: Seat, flats: Sequence[Flat] | None = None) -> PartReplica:
        """The part of a split replica that sits on `seat`; `flats` are its own."""
        assert isinstance(self.content, Numbers)
        numbers = self.content
        shards = seat.cut.shards
        together = shards is not None and seat.process == ALL
        tables = place_tables(parameter_entries(numbers.model), numbers.placement)
        made = Turns if together else Part if seat.script is None else OpenPart
        part = made(numbers.shared.enter(numbers.shared.users), seat)
        mine = [tables[number] for number in seat.cut.tables_of(part.numbers)]
        if shards is not None and not together:
            mine = parts_of(mine, shards)
        kind = OpenReplica if isinstance(part, OpenPart) else PartReplica
        return kind(part, mine, flats)

    def make_sender(self, replica: Replica, out: Outs = None) -> Sender:
        """What sends as the discipline asks, over a replica or a part of one."""
        assert isinstance(self.content, Numbers)
        filled = self.discipline.for_workers(self.workers)
        return make_sender(filled, replica, self.codec, self.content.local_rule, out)

    def worker_of(
        self, store: Store, number: int, incarnation: int, sender: Sender
    ) -> NumberWorker:
        """A worker around a sender."""
        assert store.parameters is not None
        assert isinstance(self.content, Numbers)
        cut = self.content.cut
        kind = StreamWorker if cut is not None and cut.layout.asynchronous else NumberWorker
        return kind(number, incarnation, sender, store.parameters.buffers, self.skips)

    def push_bytes(self, store: Store) -> int:
        """Bytes of one contribution without updater state, known before it is computed."""
        parameters = store.parameters
        if parameters is None:
            return store.pull_bytes
        entries = [entry for table in parameters.tables for entry in table]
        if self.codec is None:
            size = sum(entry.nbytes for entry in entries)
        else:
            size = sum(self.codec.nbytes(entry.shape, entry.dtype) for entry in entries)
        return size + sum(e.nbytes for e in parameters.buffers if e.policy == "averaged")

    def updater_bytes(self, store: Store) -> int:
        """Bytes of local optimiser state that travel both ways where the workers average it."""
        send = self.discipline.send
        if isinstance(self.content, Ghost) or not isinstance(send, Change):
            return 0
        if send.state != "average":
            return 0
        worker = self.make_worker(store, 0, 1)
        assert isinstance(worker, NumberWorker)
        assert isinstance(worker.sender, ChangeSender)
        return total_bytes(worker.sender.learn_state().values())

    def tested(self, store: Store) -> nn.Module:
        """The model with the store's parameters for a while: until a replica computes with it."""
        assert isinstance(self.content, Numbers)
        assert store.parameters is not None
        shared = self.content.shared
        own = {name: p.detach().clone() for name, p in shared.users.parameters.items()}
        held = shared.held(own)
        store.parameters.export_to(own | held.buffers)
        return shared.enter(held)

    def export(self, store: Store) -> nn.Module | None:
        """The user's model with the store's parameters, when nobody computes with it any more."""
        if isinstance(self.content, Ghost) or store.parameters is None:
            return None
        return store.parameters.export(self.content.shared.give_back())
