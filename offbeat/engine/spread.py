"""The store's numbers over several processes: the server's own shards, and a hand for the rest."""

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

from offbeat.choices import InPlace
from offbeat.contribution import Contribution
from offbeat.engine.blame import failed, hand_number, name_of, startable, who
from offbeat.engine.hand import (
    Advance,
    Answer,
    Apply,
    Check,
    Done,
    Export,
    Give,
    Hash,
    Keep,
    Norms,
    Piece,
    Remember,
    Shrink,
    Told,
    Weigh,
    Word,
    Write,
    Written,
    encode,
    to_server,
)
from offbeat.engine.process import Child, fork
from offbeat.job import Job, Numbers
from offbeat.link.memory import Shared
from offbeat.link.messages import Packets
from offbeat.store.digest import hexadecimal
from offbeat.store.parameters import Parameters, Step
from offbeat.store.table import Table, count, dealt, under

A = TypeVar("A", bound=Answer)


def held_by(tables: Sequence[Table], job: Job) -> list[list[int]]:
    """Which tables each process holds, the server's first."""
    assert isinstance(job.content, Numbers)
    # In place the workers write, and there is no rule; pairs meet in one process.
    if isinstance(job.discipline.send, InPlace) or job.discipline.pairs:
        return dealt(tables, 1)
    return dealt(tables, count(job.content.placement))


class Held:
    """The server's end of a hand."""

    def __init__(self, number: int, child: Child, wire: socket.socket):
        self.number, self.child, self.wire = number, child, wire
        self.packets = Packets()

    def say(self, word: Word) -> None:
        try:
            self.wire.send(encode(word))
        except ConnectionError:
            self.gone()

    def hear(self, kind: type[A]) -> A:
        packet = self.packets.receive(self.wire)
        if not packet:
            self.gone()
        answer = to_server(packet)
        assert isinstance(answer, kind), answer
        return answer

    def gone(self) -> NoReturn:
        """Without it there is no whole version any more: the server ends as its hand has ended."""
        words = self.child.reap()
        if words is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise failed(hand_number(self.number), words)


def hire(count: int, main: Callable[[int, socket.socket], None], threads: int) -> list[Held]:
    """Fork hands 1 to `count`; each runs `main` with its number and its end of the wire."""
    hands: list[Held] = []
    for number in range(1, count + 1):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def begin(number: int = number, mine: Any = mine, theirs: Any = theirs) -> None:
            for end in (mine, *(other.wire for other in hands)):
                end.close()  # so that everyone hears when the server is gone
            main(number, theirs)

        with theirs, startable(who(hand_number(number))):
            child = fork(name_of(hand_number(number)), begin, threads)
        hands.append(Held(number, child, mine))
    return hands


class Spread(Parameters):
    """Parameters of which this process holds some shards, and hands hold the others.

    All do the same step at the same time, and no call returns before everyone is done: there is
    one version, and whoever pulls sees it whole.
    """

    shared: Shared
    hands: list[Held]

    def over(self, shared: Shared, hands: list[Held], held: Sequence[Sequence[int]]) -> "Spread":
        """With these hands, each of which holds `held` shards."""
        self.shared, self.hands = shared, hands
        self._names = [
            [entry.name for shard in shards for entry in self.tables[shard]] for shards in held
        ]
        self._dtypes = {entry.name: entry.dtype for table in self.tables for entry in table}
        self._updater = {entry.name for entry in shared.plan.updater if self.holds(entry.name)}
        self._learnt: set[str] = set()  # averaged local state, wherever it is held
        return self

    def ready(self) -> None:
        """Wait until every hand has its numbers."""
        self._hear(Done)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """The end of a hand is heard of although nobody is speaking to it."""
        for hand in self.hands:
            selector.register(hand.child.handle, selectors.EVENT_READ, hand.gone)

    def close(self) -> None:
        """Send the hands home."""
        for hand in self.hands:
            hand.wire.close()
            hand.child.reap()

    def _tell(self, word: Word) -> None:
        for hand in self.hands:
            hand.say(word)

    def _hear(self, kind: type[A]) -> list[A]:
        return [hand.hear(kind) for hand in self.hands]

    # ------------------------------------------------------------ the path of a gradient

    def update(self, contributions: Sequence[Contribution]) -> float:
        live = self.live(contributions)
        if not live:
            return 1.0
        pieces = [self._piece(one) for one in live]
        absent = frozenset.intersection(*(one.absent for one in live))
        for hand, names in zip(self.hands, self._names, strict=True):
            hand.say(Apply(pieces, [name for name in names if name in absent] if absent else []))
        step = self.prepare([self._own(one) for one in live])
        if self.clip is not None and self.clip.norm is not None:
            self._shrink_all(step)
        self.finish(step)
        self._hear(Done)
        learnt = {name for one in live for name in one.updater}
        self._learnt = learnt or self._learnt
        return step.rate

    def _own(self, one: Contribution) -> Contribution:
        """The part of a contribution that concerns the shards held here."""
        assert one.payload is not None
        updater = {name: tensor for name, tensor in one.updater.items() if name in self._updater}
        payload = [one.payload[shard] for shard in self.held]
        return msgspec.structs.replace(one, payload=payload, updater=updater)

    def _shrink_all(self, step: Step) -> None:
        """The norm is that of the whole gradient, so everyone's part of it has to be known."""
        norms = self.norms(step)
        for names, told in zip(self._names, self._hear(Norms), strict=True):
            there = [name for name in names if name not in step.absent]
            for name, value in zip(there, told.values, strict=True):
                norms[name] = torch.tensor(value, dtype=self._dtypes[name])
        scale = self.shrink(step, norms)
        if scale is None:
            self._tell(Shrink(None, ""))
        else:
            self._tell(Shrink(scale.item(), str(scale.dtype).removeprefix("torch.")))

    def _piece(self, one: Contribution) -> Piece:
        part = one.part
        who = (part.worker, part.incarnation, part.sequence)
        table = self.shared.plan.updater
        lacking = [place for place, e in enumerate(table) if e.name not in one.updater]
        base = self.reads.compared(part.worker, part.base)
        return Piece(*who, part.samples, part.weight, one.place, lacking, base)

    def keep(self, contribution: Contribution) -> None:
        part, payload = contribution.part, contribution.payload
        if payload is None or contribution.place < 0 or part.skipped or not part.samples:
            return  # nothing that will be looked at, or kept before
        self._tell(Keep(self._piece(contribution)))
        contribution.payload = [
            flat.clone() if shard in self.held else flat for shard, flat in enumerate(payload)
        ]
        contribution.updater = {
            name: tensor.clone() if name in self._updater else tensor
            for name, tensor in contribution.updater.items()
        }
        contribution.place = -1
        self._hear(Done)

    def copy(self, version: int, needed: Collection[int]) -> None:
        self._tell(Remember(version, list(needed)))
        super().copy(version, needed)

    def give(self, worker: int, place: int) -> None:
        """Everyone copies its shards into the worker's slot."""
        self._tell(Give(worker, place))
        self.shared.slots[worker].put(place, self.held, self.flats, self.updater_state)
        self._hear(Done)

    def advance(self, version: int, epoch: int) -> None:
        if self.updaters[0].scheduler is not None:
            self._tell(Advance(version, epoch))
        super().advance(version, epoch)

    # ------------------------------------------------------------ around it

    def _asked(self, word: Word, mine: Callable[[], Any]) -> list[Any]:
        """Everyone's answer; the hands find theirs while the server finds its own."""
        self._tell(word)
        own = mine()
        return [own, *(told.value for told in self._hear(Told))]

    def digest(self) -> str:
        own, *others = self._asked(Hash(), self.digest_sum)
        return hexadecimal(own + sum(int(value, 16) for value in others))

    def finite(self) -> bool:
        return all(self._asked(Check(), super().finite))

    def nbytes_each(self) -> list[int]:
        return self._asked(Weigh(), lambda: self.nbytes)

    def export_to(self, into: Mapping[str, Tensor]) -> None:
        """To where tests are made, and nowhere else: that is where the hands put theirs."""
        self._tell(Export())
        super().export_to(into)
        for shard in self.held:
            self.shared.arena.let_go(self.shared.tested[shard].buffer)
        self._hear(Done)

    def write(self, file: Callable[[int], Path]) -> Callable[[], list[str]]:
        """Have every hand write its part of a checkpoint."""
        for hand in self.hands:
            hand.say(Write(str(file(hand.number))))

        def wait() -> list[str]:
            written = self._hear(Written)
            for one in written:
                if one.error:
                    raise OSError(one.error, os.strerror(one.error))
            return [one.checksum for one in written]

        return wait

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """The hands do the same by themselves before they are ready."""
        super().load(tensors, meta)
        self._learnt = set(under("updater/", tensors))

    def unlearnt(self, names: Iterable[str]) -> list[int]:
        return [place for place, name in enumerate(names) if name not in self._learnt]

    @property
    def updater_bytes(self) -> int:
        table = self.shared.plan.updater
        return sum(entry.nbytes for entry in table if entry.name in self._learnt)
