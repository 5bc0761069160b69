"""A hand: a process that holds some shards of the store and does what the server says."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from offbeat.contribution import Contribution
from offbeat.link.memory import Shared
from offbeat.link.messages import Packets
from offbeat.log import Part
from offbeat.store.checkpoint import save_tensors
from offbeat.store.parameters import Parameters
from offbeat.store.weigh import Reads


class Piece(msgspec.Struct, array_like=True):
    """A contribution as far as it concerns a hand, which finds the numbers where they lie."""

    worker: int
    incarnation: int
    sequence: int
    samples: int
    weight: float
    place: int  # of the worker's outgoing buffers; -1 if the hand has kept it
    lacking: list[int] = []  # places of averaged local state that the worker does not have
    base: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        return self.worker, self.incarnation, self.sequence


class Word(msgspec.Struct, array_like=True, tag=True):
    """From the server to a hand."""


class Apply(Word):
    """Make one step of these contributions; answered with norms, if they are limited, or Done."""

    pieces: list[Piece]
    absent: list[str]  # of the hand's own parameters


class Shrink(Word):
    """Go on with the step, with every gradient multiplied by this; None leaves them alone."""

    scale: float | None
    dtype: str


class Keep(Word):
    """Own a contribution that waits for others; answered with Done."""

    piece: Piece


class Remember(Word):
    """Somebody reads the parameters now; copies of versions that are not needed may go."""

    version: int
    needed: list[int]


class Give(Word):
    """Copy the parameters into a worker's slot; answered with Done."""

    worker: int
    place: int


class Advance(Word):
    """Let the schedule catch up."""

    version: int
    epoch: int


class Hash(Word):
    """What do your tensors add to the hash of all? Answered with Told, in hexadecimal."""


class Check(Word):
    """Is every number finite? Answered with Told."""


class Weigh(Word):
    """How many bytes do you hold? Answered with Told."""


class Export(Word):
    """Put the parameters where they are tested; answered with Done."""


class Write(Word):
    """Write the state to this file; answered with Written."""

    path: str


class Answer(msgspec.Struct, array_like=True, tag=True):
    """From a hand to the server."""


class Done(Answer):
    """What was said is done; the first one says that the hand is ready."""


class Norms(Answer):
    """Of each gradient that is there, in the order of the hand's tables."""

    values: list[float]


class Told(Answer):
    """What was asked."""

    value: bool | int | str  # a hash is text: packets have no numbers of its size


class Written(Answer):
    """The checksum of the file; or why there is none, as `errno` has it."""

    checksum: str
    error: int = 0


Words = Apply | Shrink | Keep | Remember | Give | Advance | Hash | Check | Weigh | Export | Write
Answers = Done | Norms | Told | Written

encode = msgspec.msgpack.Encoder().encode
to_hand = msgspec.msgpack.Decoder(Words).decode
to_server = msgspec.msgpack.Decoder(Answers).decode


class Hand:
    """Holds the shards of `parameters`; everything else is the server's to decide."""

    def __init__(self, parameters: Parameters, shared: Shared, wire: socket.socket):
        self.parameters, self.shared, self.wire = parameters, shared, wire
        self.packets = Packets()
        parameters.reads = Reads()  # the server says what is compared with what
        self.kept: dict[tuple[int, int, int], Contribution] = {}
        averaged = shared.plan.updater
        self.updater = {i: e.name for i, e in enumerate(averaged) if parameters.holds(e.name)}
        self.handlers: dict[type[Word], Callable[..., Answer | None]] = {
            Apply: self._apply,
            Keep: self._keep,
            Remember: lambda word: parameters.copy(word.version, word.needed),
            Give: self._give,
            Advance: lambda word: parameters.advance(word.version, word.epoch),
            Hash: lambda word: Told(f"{parameters.digest_sum():x}"),
            Check: lambda word: Told(parameters.finite()),
            Weigh: lambda word: Told(parameters.nbytes),
            Export: self._export,
            Write: self._write,
        }

    def run(self) -> None:
        """Serve until the server closes its end."""
        self._say(Done())
        while (word := self._hear()) is not None:
            answer = self.handlers[type(word)](word)
            if answer is not None:
                self._say(answer)

    def _say(self, answer: Answer) -> None:
        self.wire.send(encode(answer))

    def _hear(self) -> Any:
        packet = self.packets.receive(self.wire)
        return to_hand(packet) if packet else None

    # ------------------------------------------------------------ the path of a gradient

    def _apply(self, word: Apply) -> Answer | None:
        parameters = self.parameters
        live = [self._found(piece) for piece in word.pieces]
        for one in live:  # what counts is what none of them has
            one.absent = frozenset(word.absent)
        step = parameters.prepare(live)
        if parameters.clip is not None and parameters.clip.norm is not None:
            self._say(Norms([norm.item() for norm in parameters.norms(step).values()]))
            shrink = self._hear()
            if shrink is None:  # the server is gone, and this process with it
                return None
            assert isinstance(shrink, Shrink)
            if shrink.scale is not None:
                scale = torch.tensor(shrink.scale, dtype=getattr(torch, shrink.dtype))
                parameters.multiply(step, scale)
        parameters.finish(step)
        return Done()

    def _found(self, piece: Piece) -> Contribution:
        if piece.place < 0:
            one = self.kept.pop(piece.key)
            one.part.base = piece.base
            return one
        slot = self.shared.slots[piece.worker]
        payload = [slot.outgoing[piece.place][shard] for shard in self.parameters.held]
        part = Part(*piece.key, piece.base, [], piece.samples, weight=piece.weight)
        there = {name for place, name in self.updater.items() if place not in piece.lacking}
        updater = {name: view for name, view in slot.updater.views.items() if name in there}
        return Contribution(part, payload, updater=updater)

    def _keep(self, word: Keep) -> Answer:
        one = self._found(word.piece)
        one.keep()
        self.kept[word.piece.key] = one
        return Done()

    def _give(self, word: Give) -> Answer:
        parameters = self.parameters
        slot = self.shared.slots[word.worker]
        slot.put(word.place, parameters.held, parameters.flats, parameters.updater_state)
        return Done()

    # ------------------------------------------------------------ around it

    def _export(self, word: Export) -> Answer:
        tested = [self.shared.tested[shard] for shard in self.parameters.held]
        self.parameters.export_to({n: v for flat in tested for n, v in flat.views.items()})
        for flat in tested:  # it is others who look at them
            self.shared.arena.let_go(flat.buffer)
        return Done()

    def _write(self, word: Write) -> Answer:
        tensors = {f"store/{name}": t for name, t in self.parameters.state().items()}
        try:
            return Written(save_tensors(Path(word.path), tensors))
        except OSError as error:
            return Written("", error.errno or 5)
