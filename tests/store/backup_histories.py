"""Histories in which the store itself dies: its protocol, its log and its backup in virtual time.

What is real: the store, its protocol, the log and when it is written, the words to a backup, what
that does with them, and how a new store goes on from both. What is made here: numbers that are one
hash, so that nothing is applied unseen; slots, which a worker writes while it computes; the wire to
the backup, which keeps its order, takes its time and outlives who has written to it; and a launcher
that notices deaths. A server dies between any two things that it does.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from offbeat.data.lease import Leases
from offbeat.discipline.discipline import Discipline
from offbeat.log.log import Log, decode
from offbeat.log.records import Entry, Part, Updated
from offbeat.model.table import Flat
from offbeat.protocol.messages import Go, Message, Push
from offbeat.protocol.server import ServerProtocol
from offbeat.store.averages import Averages
from offbeat.store.backup import Backup, BackupWord, FollowFrom
from offbeat.store.board import new_board
from offbeat.store.followed import FollowedParameters
from offbeat.store.parameters import Parameters
from offbeat.store.pulls import WholePulls
from offbeat.store.recovery import CrashState, beside, last_version, revive
from offbeat.store.staleness import Reads
from offbeat.store.store import Store
from offbeat.worker.contribution import Contribution
from tests.protocol.histories import PATIENCE, History, Worker

SOON = 0.5  # the longest that a process takes to notice, to start, or to do what it was told


def mixed(*what: Any) -> int:
    """A number of 62 bits that stands for all of this."""
    return xxh3_64_intdigest(repr(what).encode()) >> 2


# ---------------------------------------------------------------- numbers


class Numbers(Parameters):
    """A version is one hash: of the version before, and of whatever was applied in this order.

    A late contribution is weighed with the copy of what its worker has read.
    """

    def __init__(self) -> None:
        self.value = 1
        self.flats, self.updaters, self.names, self.updater_state = [], [], [], {}
        self.pull_bytes = 0
        self.averages, self.pulls = Averages([], nn.Module()), WholePulls()
        self.copies: dict[int, int] = {}
        self.weigher: Any = SimpleNamespace(needed=True)
        self.recipe: Any = SimpleNamespace(schedule=None)
        self.clip = None
        self.reads = Reads(under_way=2)

    def update(self, contributions: Sequence[Contribution]) -> float:
        self.reads.waiting.clear()
        self.value = version_of(
            self.value,
            [(one.part, payload_of(one), self.copies[one.part.base]) for one in contributions],
        )
        return 1.0

    def copy(self, version: int, needed: Collection[int]) -> None:
        self.copies = {old: value for old, value in self.copies.items() if old in needed}
        self.copies.setdefault(version, self.value)

    def keep(self, contribution: Contribution) -> None:
        contribution.payload = [own(payload_of(contribution))]
        contribution.place = -1

    def of(self, worker: int) -> list[Flat]:
        return []

    def advance(self, version: int, epoch: int, progress: int) -> None:
        return

    def digest(self) -> str:
        return f"{self.value:x}"

    def state(self) -> dict[str, Tensor]:
        copies = {f"weigh/backup/{v}": torch.tensor(value) for v, value in self.copies.items()}
        return {"value": torch.tensor(self.value), **copies}

    def meta(self) -> dict[str, Any]:
        return {"reads": self.reads.meta()}

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.value = int(tensors["value"])
        self.copies = {
            int(name.rpartition("/")[2]): int(tensor)
            for name, tensor in tensors.items()
            if name != "value"
        }
        self.reads.load(meta["reads"])


class FollowedNumbers(FollowedParameters, Numbers):
    """The store's: whatever changes them is said to the backup."""

    def _writes_where_they_lie(self, contributions: Sequence[Contribution]) -> bool:
        return False


class Buffer(list[int]):
    """A buffer with a number in it."""

    def clone(self) -> "Buffer":
        return Buffer(self)


def own(value: int) -> Any:
    return Buffer([value])


def payload_of(one: Contribution) -> int:
    """What lies in its buffer now."""
    assert one.payload is not None
    buffer: Any = one.payload[0]
    return int(buffer[0])


def version_of(before: int, group: Iterable[tuple[Part, int, int]]) -> int:
    each = [
        (part.worker, part.incarnation, part.sequence, payload, read)
        for part, payload, read in group
    ]
    return mixed(before, each)


def gradient_of(part: Part, read: int) -> int:
    """What a worker computes from what it has read."""
    return mixed(part.worker, part.incarnation, part.sequence, part.leases, read)


class SlotWorker(Worker):
    """A worker that writes its contribution where the store and the backup read it."""

    history: "BackupHistory"

    def _say(self, message: Message, contribution: Contribution | None = None) -> None:
        if isinstance(message, Push):
            slot = self.history.slots[self.number]
            message.place = self.sequence % len(slot)
            part = message.part
            slot[message.place][0] = gradient_of(part, self.history.shown[part.base])
            contribution = self.history.found(message)
        super()._say(message, contribution)


# ---------------------------------------------------------------- the backup, and the way to it


class Died(Exception):
    """The server is no more."""


class BackupProcess:
    """It does what lies on the wire now and then, or when somebody waits for it."""

    def __init__(self, history: "BackupHistory"):
        self.history = history
        self.wire: deque[BackupWord] = deque()
        self.laid_down: tuple[Mapping[str, Tensor], Mapping[str, Any]] = ({}, {})
        self.backup = Backup(Numbers(), history.found, lambda: self.laid_down)
        self.answers = 0
        self.alive, self.frozen = True, False

    def follow(self) -> bool:
        """Do the next thing; False if there is none, or if it stands still."""
        if not self.wire or not self.alive or self.frozen:
            return False
        self.answers += sum(1 for _ in self.backup.follow(self.wire.popleft()))
        return True


class Channel:
    """The server's end of the wire; it is a witness of the store too, which dies there at times."""

    def __init__(self, history: "BackupHistory"):
        self.history = history
        self.process: BackupProcess | None = None

    @property
    def follows(self) -> bool:
        return self.process is not None

    def begin(self, process: BackupProcess, store: Store) -> None:
        process.laid_down = dict(store.parameters.state()), store.parameters.meta()
        self.process = process
        self.say(FollowFrom(store.version))

    def say(self, word: BackupWord) -> None:
        self.history.may_die()
        if self.process is not None:
            self.process.wire.append(word)
            self.history.soon(self.process.follow, self.history.lag)
        self.history.may_die()

    def wait(self) -> None:
        """One that stands still is killed after patience, and what it would have done is not."""
        process = self.process
        if process is None:
            return
        if process.frozen and process.alive:
            self.history.wait_in_vain(process)
        before = process.answers
        while process.answers == before and process.follow():
            continue
        if process.answers == before:
            self.process = None
        self.history.may_die()

    def before(self) -> None:
        self.history.may_die()

    def write(self, version: int) -> None:
        self.history.may_die()


# ---------------------------------------------------------------- a history


class BackupHistory(History):
    """Beside what happens to workers, server and backup die and stand still.

    Never both at once: that is not promised, and ends at the last checkpoint.
    """

    kind = SlotWorker
    numbers: type[FollowedNumbers] = FollowedNumbers
    authority: type[Store] = Store

    def __init__(self, discipline: Discipline, seed: int, least: int = 1, faults: int = 4):
        self.slots: list[list[Any]] = []
        self.disk: list[Entry] = []
        self.shown: dict[int, int] = {}  # what anybody has been shown, by version
        self.strikes = 0  # things that the server still does before it dies; 0 is for ever
        self.crash: CrashState | None = None
        self.down = False  # from the death of one server to the beginning of the next
        self.deaths = 0
        self.story: list[str] = []
        super().__init__(discipline, seed, least, faults)
        places = 2 if self.overlap else 1
        self.slots = [[own(0) for _ in range(places)] for _ in range(self.count)]
        self.lag = self.draw.choice([SOON, 10 * SOON])  # of the backup, if nobody waits for it
        self._go_down()
        self.spare: BackupProcess | None = None  # one that has nothing to follow from yet
        self.last: BackupProcess = self._new_backup()
        for _ in range(self.draw.randint(0, 3)):
            self._at(self.draw.uniform(0.5, 60.0), self._strike_server)
        for _ in range(self.draw.randint(0, 2)):
            self._at(self.draw.uniform(0.5, 60.0), self._strike_backup)

    # ------------------------------------------------------------ parts that mutants change

    def _channel(self) -> Channel:
        return Channel(self)

    def _log(self) -> Log:
        return Log(relay=self._write)

    def _write(self, lines: bytes) -> None:
        self.disk.extend(decode(lines))
        self.may_die()

    def record(self) -> None:
        """Before anybody is told of anything."""
        self.store.log.flush()

    def fits(self, found: CrashState) -> CrashState | None:
        records = list(self.disk)
        return beside(found, records, 0, last_version(records, 0))

    def drain(self, process: BackupProcess) -> None:
        """What was said counts, whoever is gone by now."""
        while process.follow():
            continue

    def revive(self, crash: CrashState) -> None:
        revive(self.store, crash, self.now)

    def flush_first(self) -> None:
        """Whoever is shown a version does not know what the log says of it."""
        self.store.log.flush()

    def may_show(self) -> bool:
        return not self.store.keeps_waiting

    # ------------------------------------------------------------ the store

    def found(self, push: Push) -> Contribution:
        """What lies beside a push."""
        assert push.part is not None
        if push.place < 0:
            return Contribution(push.part)
        slot = self.slots[push.part.worker]
        return Contribution(push.part, [slot[push.place]], place=push.place)

    def _begin_store(self) -> None:
        parameters = self.numbers()
        parameters.followed_through(self.channel, [])
        leases = Leases(self.samples, 4, self.epochs)
        cells = new_board(self.count)
        log = self._log()
        self.store = self.authority(
            self.discipline, self.count, leases, log, parameters, 1, cells, self.channel
        )
        settings = self.protocol.settings
        self.protocol = ServerProtocol(self.store, self.count, settings)

    def may_die(self) -> None:
        """A server may be killed between any two things that it does."""
        if self.strikes:
            self.strikes -= 1
            if not self.strikes:
                raise Died

    def wait_in_vain(self, process: BackupProcess) -> None:
        """Whoever stands still is killed after patience; nobody is heard meanwhile."""
        self.now += PATIENCE
        self.busy_until = max(self.busy_until, self.now)
        self._at(self.busy_until, self._hear)
        self._kill(process)

    def _kill(self, process: BackupProcess) -> None:
        if process.alive:
            process.alive = False
            self.story.append(f"{self.now:.2f}: the backup dies")
            self.soon(self._new_backup)

    def _new_backup(self) -> BackupProcess:
        self.spare = self.last = BackupProcess(self)
        if self.busy_until <= self.now:
            self._show()
        return self.last

    def soon(self, what: Callable[[], Any], longest: float = SOON) -> None:
        self._at(self.now + self.draw.uniform(0.0, longest), what)

    # ------------------------------------------------------------ what a server does

    def _guarded(self, what: Callable[[], Any]) -> Any:
        try:
            return what()
        except Died:
            self._server_died()

    def step(self) -> bool:
        self._guarded(lambda: History.step(self))
        if self.store.finished:
            self.strikes = 0
        return True

    def _show(self) -> None:
        if self.spare is not None and not self.down and self.may_show():
            process, self.spare = self.spare, None
            self.flush_first()
            self.channel.begin(process, self.store)
            self.crash = None

    def _deliver(self) -> None:
        self._show()
        while self.protocol.proceed(self.now):
            continue
        values: Any = self.store.parameters
        said = [(*one, values.value) for one in self.protocol.take()]
        if said:
            self.record()
        for number, message, _, value in said:
            self.may_die()
            if number not in self.protocol.connected:
                continue
            if isinstance(message, Go):
                assert self.shown.setdefault(message.version, value) == value, "two histories"
            worker, life = self.workers.get(number), self.lives[number]
            if worker is not None:
                way = self.ways[number, life][1]
                self._bring(worker, message, way.arrival(self.now, self.draw.uniform(0.0, 1.5)))
        for number in self.protocol.take_silent():
            self.replaced.add(number)
            self._at(self.now, lambda number=number: self._replace(number))

    # ------------------------------------------------------------ who dies, and what follows

    def _fault(self) -> None:
        if self.busy_until <= self.now:  # else the server waits for its backup, or there is none
            super()._fault()

    def _strike_server(self) -> None:
        """It dies within the next things that it does."""
        if self.promised() and not self.store.finished:
            self.strikes = self.draw.randint(1, 12)

    def promised(self) -> bool:
        """Whether nothing is lost if the server dies."""
        follows = self.channel.process is self.last
        return follows and self.last.alive and not self.last.frozen

    def _strike_backup(self) -> None:
        if not self.channel.follows or self.strikes:
            return
        if self.draw.random() < 0.5:
            self._kill(self.last)
        else:
            self.story.append(f"{self.now:.2f}: the backup stands still")
            self.last.frozen = True

    def _server_died(self) -> None:
        """Its launcher notices, asks the backup, ends everybody, and starts anew."""
        self.strikes = 0
        self.deaths += 1
        self.story.append(f"{self.now:.2f}: the server dies at version {self.store.version}")
        self.busy_until = self.now + self.draw.uniform(0.0, SOON)
        for number in range(self.count):
            self.heard[number].clear()
        self.down = True
        self._go_down()
        self._at(self.busy_until, self._take_over)

    def _go_down(self) -> None:
        """What it knew is gone; nobody is there who hears anything."""
        self.channel = self._channel()
        self._begin_store()

    def _take_over(self) -> None:
        handed = self._handed()
        for worker in list(self.workers.values()):
            self.end(worker, seen=True)
        if handed is None:
            raise AssertionError("acknowledged updates are lost")
        self.crash = handed
        self.left.clear()
        for number in range(self.count):
            self.lives[number] += 1
        run_time = self.protocol.run_time
        begun = max([run_time.start, *(record.time for record in self.disk)])
        self._go_down()
        self.down = False
        self.protocol.run_time.start = begun
        self.revive(self.crash)
        values: Any = self.store.parameters
        self.story.append(f"{self.now:.2f}: another goes on from version {self.store.version}")
        expected = self.shown.get(self.store.version, values.value)
        assert expected == values.value, "two histories"
        self._new_backup()
        if self.draw.random() < 0.2:
            self.strikes = self.draw.randint(1, 6)
        self._deliver()
        for number in range(self.count):
            self.soon(lambda number=number: self._back(number))

    def _handed(self) -> CrashState | None:
        process, found = self.last, self.crash
        if process.alive and not process.frozen:
            self.drain(process)
            backup = process.backup
            if backup.version is not None:
                tensors, meta = backup.state()
                found = CrashState(backup.version, [], 0, dict(tensors), meta)
                if backup.last is not None:
                    parts, rate = backup.last
                    last = Updated(0.0, backup.version, parts, rate)
                    found = CrashState(backup.version, [], 0, dict(tensors), meta, last)
        if found is None:
            first = Numbers()
            found = CrashState(0, [], 0, first.state(), first.meta())
        return self.fits(found)

    # ------------------------------------------------------------ what must hold

    def check_end(self) -> None:
        """What is on record is what was shown, and gives the same numbers once more."""
        self.record()
        self.records.all = list(self.disk)
        super().check_end()
        chain = {0: 1}
        for record in self.disk:
            if isinstance(record, Updated):
                assert record.version == len(chain)
                group = [(p, gradient_of(p, chain[p.base]), chain[p.base]) for p in record.parts]
                chain[record.version] = version_of(chain[record.version - 1], group)
                assert record.hash in ("", f"{chain[record.version]:x}"), record.version
        values: Any = self.store.parameters
        assert chain[len(chain) - 1] == values.value
        assert all(chain[version] == value for version, value in self.shown.items())

    def check_joins(self, joined: int) -> None:
        return  # what a dead server had heard counts for nothing
