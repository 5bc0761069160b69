"""The store's numbers over several processes: the server has some shards, others the rest."""

import os
import selectors
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
from torch import Tensor

from offbeat.config.job import Job
from offbeat.engine.local.process import ForkSpawner
from offbeat.engine.local.shard_process import (
    AdvanceSchedules,
    ApplyGroup,
    AskBytes,
    AskFinite,
    AskHash,
    CopyToSlot,
    ExportParameters,
    GradientNorms,
    KeepContribution,
    RememberVersion,
    ScaleGradients,
    ShardAnswer,
    ShardDone,
    ShardMessage,
    ShardPart,
    ShardValue,
    StateWritten,
    WriteState,
    decode_for_server,
    encode,
)
from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.engine.spawn import Handle, Role, failed
from offbeat.model.table import Table, count, dealt, under
from offbeat.store.digest import hexadecimal
from offbeat.store.followed import FollowedParameters
from offbeat.store.parameters import Parameters, PreparedStep
from offbeat.store.slot import Slot
from offbeat.transport.memory_link import Packets
from offbeat.worker.contribution import Contribution

A = TypeVar("A", bound=ShardAnswer)


def shards_of_processes(tables: Sequence[Table], job: Job) -> list[list[int]]:
    """Which tables each process holds, the server's first."""
    # In place the workers write, and there is no rule; pairs meet in one process.
    if job.discipline.send.in_place or job.discipline.pairs:
        return dealt(tables, 1)
    return dealt(tables, count(job.content.placement))


class ShardHandle:
    """The server's end of a shard process."""

    def __init__(self, number: int, role: Role, child: Handle, wire: socket.socket):
        self.number, self.role, self.child, self.wire = number, role, child, wire
        self.packets = Packets()

    def say(self, word: ShardMessage) -> None:
        try:
            self.wire.send(encode(word))
        except ConnectionError:
            self.gone()

    def hear(self, kind: type[A]) -> A:
        packet = self.packets.receive(self.wire)
        if not packet:
            self.gone()
        answer = decode_for_server(packet)
        assert isinstance(answer, kind), answer
        return answer

    def gone(self) -> NoReturn:
        """Without it there is no whole version any more: the server ends as it has ended."""
        words = self.child.reap()
        if words is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise failed(self.role, words)


def start_shards(
    count: int, main: Callable[[int, socket.socket], None], threads: int
) -> list[ShardHandle]:
    """Fork processes 1 to `count`; each runs `main` with its number and its end of the wire."""
    shard_processes: list[ShardHandle] = []
    for number in range(1, count + 1):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def begin(number: int = number, mine: Any = mine, theirs: Any = theirs) -> None:
            for end in (mine, *(other.wire for other in shard_processes)):
                end.close()  # so that everyone hears when the server is gone
            main(number, theirs)

        role = Role.shard(number, threads)
        with theirs:
            child = ForkSpawner().start(role, begin)
        shard_processes.append(ShardHandle(number, role, child, mine))
    return shard_processes


class ShardedParameters(Parameters):
    """Parameters of which this process holds some shards, and shard processes hold the others.

    All do the same step at the same time, and no call returns before everyone is done: there is
    one version, and whoever pulls sees it whole.
    """

    shared: SharedMemory
    shard_processes: list[ShardHandle]

    def over(
        self,
        shared: SharedMemory,
        shard_processes: list[ShardHandle],
        held: Sequence[Sequence[int]],
    ) -> "ShardedParameters":
        """With these shard processes, each of which holds `held` shards."""
        self.shared, self.shard_processes = shared, shard_processes
        self._names = [
            [entry.name for shard in shards for entry in self.tables[shard]] for shards in held
        ]
        self._dtypes = {entry.name: entry.dtype for table in self.tables for entry in table}
        self._updater = {entry.name for entry in shared.plan.updater if self.holds(entry.name)}
        self._learnt: set[str] = set()  # averaged local state, wherever it is held
        return self

    def ready(self) -> None:
        """Wait until every shard process has its numbers."""
        self._hear(ShardDone)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """The end of a shard process is heard of although nobody is speaking to it."""
        for shard_process in self.shard_processes:
            selector.register(shard_process.child.handle, selectors.EVENT_READ, shard_process.gone)

    def close(self) -> None:
        """Let the shard processes end."""
        for shard_process in self.shard_processes:
            shard_process.wire.close()
            shard_process.child.reap()

    def _tell(self, word: ShardMessage) -> None:
        for shard_process in self.shard_processes:
            shard_process.say(word)

    def _hear(self, kind: type[A]) -> list[A]:
        return [shard_process.hear(kind) for shard_process in self.shard_processes]

    # ------------------------------------------------------------ the path of a gradient

    def update(self, contributions: Sequence[Contribution]) -> float:
        live = self.live(contributions)
        if not live:
            return 1.0
        pieces = [self._piece(one) for one in live]
        absent = frozenset.intersection(*(one.absent for one in live))
        for shard_process, names in zip(self.shard_processes, self._names, strict=True):
            shard_process.say(
                ApplyGroup(pieces, [name for name in names if name in absent] if absent else [])
            )
        step = self.prepare([self._own(one) for one in live])
        if self.clip is not None and self.clip.norm is not None:
            self._shrink_all(step)
        self.finish(step)
        self._hear(ShardDone)
        learnt = {name for one in live for name in one.updater}
        self._learnt = learnt or self._learnt
        return step.rate

    def _own(self, one: Contribution) -> Contribution:
        """The part of a contribution that concerns the shards held here."""
        assert one.payload is not None
        updater = {name: tensor for name, tensor in one.updater.items() if name in self._updater}
        payload = [one.payload[shard] for shard in self.held]
        return msgspec.structs.replace(one, payload=payload, updater=updater)

    def _shrink_all(self, step: PreparedStep) -> None:
        """The norm is that of the whole gradient, so everyone's part of it has to be known."""
        norms = self.norms(step)
        for names, told in zip(self._names, self._hear(GradientNorms), strict=True):
            there = [name for name in names if name not in step.absent]
            for name, value in zip(there, told.values, strict=True):
                norms[name] = torch.tensor(value, dtype=self._dtypes[name])
        scale = self.shrink(step, norms)
        if scale is None:
            self._tell(ScaleGradients(None, ""))
        else:
            self._tell(ScaleGradients(scale.item(), str(scale.dtype).removeprefix("torch.")))

    def _piece(self, one: Contribution) -> ShardPart:
        part = one.part
        who = (part.worker, part.incarnation, part.sequence)
        table = self.shared.plan.updater
        lacking = [place for place, e in enumerate(table) if e.name not in one.updater]
        base = self.reads.compared(part.worker, part.base)
        made = ShardPart(*who, part.samples, part.weight, one.place, lacking, base)
        made.settings = part.settings
        return made

    def keep(self, contribution: Contribution) -> None:
        part, payload = contribution.part, contribution.payload
        if payload is None or contribution.place < 0 or part.skipped or not part.samples:
            return  # nothing that will be looked at, or kept before
        self._tell(KeepContribution(self._piece(contribution)))
        contribution.payload = [
            flat.clone() if shard in self.held else flat for shard, flat in enumerate(payload)
        ]
        contribution.updater = {
            name: tensor.clone() if name in self._updater else tensor
            for name, tensor in contribution.updater.items()
        }
        contribution.place = -1
        self._hear(ShardDone)

    def copy(self, version: int, needed: Collection[int]) -> None:
        self._tell(RememberVersion(version, list(needed)))
        super().copy(version, needed)

    def give(self, worker: int, slot: Slot, place: int) -> None:
        """Everyone copies its shards into the worker's slot."""
        self._tell(CopyToSlot(worker, place))
        slot.put(place, self.held, self.flats, self.updater_state)
        self._hear(ShardDone)

    def advance(self, version: int, epoch: int, progress: int) -> None:
        if self.updaters[0].scheduler is not None:
            self._tell(AdvanceSchedules(version, epoch, progress))
        super().advance(version, epoch, progress)

    # ------------------------------------------------------------ around it

    def _asked(self, word: ShardMessage, mine: Callable[[], Any]) -> list[Any]:
        """Everyone's answer; the shard processes find theirs while the server finds its own."""
        self._tell(word)
        own = mine()
        return [own, *(told.value for told in self._hear(ShardValue))]

    def digest(self) -> str:
        own, *others = self._asked(AskHash(), self.digest_sum)
        return hexadecimal(own + sum(int(value, 16) for value in others))

    def finite(self) -> bool:
        return all(self._asked(AskFinite(), super().finite))

    def nbytes_each(self) -> list[int]:
        return self._asked(AskBytes(), lambda: self.nbytes)

    def export_to(self, into: Mapping[str, Tensor]) -> None:
        """To where tests are made, and nowhere else: that is where the others put theirs."""
        self._tell(ExportParameters())
        super().export_to(into)
        for shard in self.held:
            self.shared.arena.let_go(self.shared.tested[shard].buffer)
        self._hear(ShardDone)

    def write(self, file: Callable[[int], Path]) -> Callable[[], list[str]]:
        """Have every shard process write its part of a checkpoint."""
        for shard_process in self.shard_processes:
            shard_process.say(WriteState(str(file(shard_process.number))))

        def wait() -> list[str]:
            written = self._hear(StateWritten)
            for one in written:
                if one.error:
                    raise OSError(one.error, os.strerror(one.error))
            return [one.checksum for one in written]

        return wait

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """The shard processes do the same by themselves before they are ready."""
        super().load(tensors, meta)
        self._learnt = set(under("updater/", tensors))

    def unlearnt(self, names: Iterable[str]) -> list[int]:
        return [place for place, name in enumerate(names) if name not in self._learnt]

    @property
    def updater_bytes(self) -> int:
        table = self.shared.plan.updater
        return sum(entry.nbytes for entry in table if entry.name in self._learnt)


class FollowedShards(FollowedParameters, ShardedParameters):
    """The same with a backup, which holds all shards: what it is told is told at once."""
