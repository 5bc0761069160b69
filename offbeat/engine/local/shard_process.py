"""A shard process: a process that holds some shards of the store and does what the server says."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.folder.tensors import save_tensors
from offbeat.log.records import Part, Settings
from offbeat.store.parameters import Parameters
from offbeat.store.staleness import Reads
from offbeat.transport.memory_link import Packets
from offbeat.worker.contribution import Contribution


class ShardPart(msgspec.Struct, array_like=True):
    """A contribution as a shard process sees it, which finds the numbers where they lie."""

    worker: int
    incarnation: int
    sequence: int
    samples: int
    weight: float
    place: int  # of the worker's outgoing buffers; -1 if the shard process has kept it
    lacking: list[int] = []  # places of averaged local state that the worker does not have
    base: int = 0
    settings: Settings | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        return self.worker, self.incarnation, self.sequence


class ShardMessage(msgspec.Struct, array_like=True, tag=True):
    """From the server to a shard process."""


class ApplyGroup(ShardMessage):
    """Make one step of these contributions; answered with norms if limited, or with ShardDone."""

    pieces: list[ShardPart]
    absent: list[str]  # of the shard process's own parameters


class ScaleGradients(ShardMessage):
    """Go on with the step, with every gradient multiplied by this; None leaves them alone."""

    scale: float | None
    dtype: str


class KeepContribution(ShardMessage):
    """Own a contribution that waits for others; answered with ShardDone."""

    piece: ShardPart


class RememberVersion(ShardMessage):
    """Somebody reads the parameters now; copies of versions that are not needed may go."""

    version: int
    needed: list[int]


class CopyToSlot(ShardMessage):
    """Copy the parameters into a worker's slot; answered with ShardDone."""

    worker: int
    place: int


class AdvanceSchedules(ShardMessage):
    """Let the schedule catch up."""

    version: int
    epoch: int
    progress: int


class AskHash(ShardMessage):
    """What do your tensors add to the hash of all? Answered with ShardValue, in hexadecimal."""


class AskFinite(ShardMessage):
    """Is every number finite? Answered with ShardValue."""


class AskBytes(ShardMessage):
    """How many bytes do you hold? Answered with ShardValue."""


class ExportParameters(ShardMessage):
    """Put the parameters where they are tested; answered with ShardDone."""


class WriteState(ShardMessage):
    """WriteState the state to this file; answered with StateWritten."""

    path: str


class ShardAnswer(msgspec.Struct, array_like=True, tag=True):
    """From a shard process to the server."""


class ShardDone(ShardAnswer):
    """What was said is done; the first one says that the shard process is ready."""


class GradientNorms(ShardAnswer):
    """Of each gradient that is there, in the order of the shard process's tables."""

    values: list[float]


class ShardValue(ShardAnswer):
    """What was asked."""

    value: bool | int | str  # a hash is text: packets have no numbers of its size


class StateWritten(ShardAnswer):
    """The checksum of the file; or why there is none, as `errno` has it."""

    checksum: str
    error: int = 0


ShardMessages = (
    ApplyGroup
    | ScaleGradients
    | KeepContribution
    | RememberVersion
    | CopyToSlot
    | AdvanceSchedules
    | AskHash
    | AskFinite
    | AskBytes
    | ExportParameters
    | WriteState
)
ShardAnswers = ShardDone | GradientNorms | ShardValue | StateWritten

encode = msgspec.msgpack.Encoder().encode
decode_for_shard = msgspec.msgpack.Decoder(ShardMessages).decode
decode_for_server = msgspec.msgpack.Decoder(ShardAnswers).decode


class ShardProcess:
    """Holds the shards of `parameters`; everything else is the server's to decide."""

    def __init__(self, parameters: Parameters, shared: SharedMemory, wire: socket.socket):
        self.parameters, self.shared, self.wire = parameters, shared, wire
        self.packets = Packets()
        parameters.reads = Reads()  # the server says what is compared with what
        self.kept: dict[tuple[int, int, int], Contribution] = {}
        averaged = shared.plan.updater
        self.updater = {i: e.name for i, e in enumerate(averaged) if parameters.holds(e.name)}
        self.handlers: dict[type[ShardMessage], Callable[..., ShardAnswer | None]] = {
            ApplyGroup: self._apply,
            KeepContribution: self._keep,
            RememberVersion: lambda word: parameters.copy(word.version, word.needed),
            CopyToSlot: self._give,
            AdvanceSchedules: lambda word: self._advance(word),
            AskHash: lambda word: ShardValue(f"{parameters.digest_sum():x}"),
            AskFinite: lambda word: ShardValue(parameters.finite()),
            AskBytes: lambda word: ShardValue(parameters.nbytes),
            ExportParameters: self._export,
            WriteState: self._write,
        }

    def run(self) -> None:
        """Serve until the server closes its end."""
        self._say(ShardDone())
        while (word := self._hear()) is not None:
            answer = self.handlers[type(word)](word)
            if answer is not None:
                self._say(answer)

    def _say(self, answer: ShardAnswer) -> None:
        self.wire.send(encode(answer))

    def _hear(self) -> Any:
        packet = self.packets.receive(self.wire)
        return decode_for_shard(packet) if packet else None

    # ------------------------------------------------------------ the path of a gradient

    def _apply(self, word: ApplyGroup) -> ShardAnswer | None:
        parameters = self.parameters
        live = [self._found(piece) for piece in word.pieces]
        for one in live:  # what counts is what none of them has
            one.absent = frozenset(word.absent)
        step = parameters.prepare(live)
        if parameters.clip is not None and parameters.clip.norm is not None:
            self._say(GradientNorms([norm.item() for norm in parameters.norms(step).values()]))
            shrink = self._hear()
            if shrink is None:  # the server is gone, and this process with it
                return None
            assert isinstance(shrink, ScaleGradients)
            if shrink.scale is not None:
                scale = torch.tensor(shrink.scale, dtype=getattr(torch, shrink.dtype))
                parameters.multiply(step, scale)
        parameters.finish(step)
        return ShardDone()

    def _found(self, piece: ShardPart) -> Contribution:
        if piece.place < 0:
            one = self.kept.pop(piece.key)
            one.part.base = piece.base
            return one
        slot = self.shared.slots[piece.worker]
        payload = [slot.outgoing[piece.place][shard] for shard in self.parameters.held]
        part = Part(*piece.key, piece.base, [], piece.samples, weight=piece.weight)
        part.settings = piece.settings
        there = {name for place, name in self.updater.items() if place not in piece.lacking}
        updater = {name: view for name, view in slot.updater.views.items() if name in there}
        return Contribution(part, payload, updater=updater)

    def _keep(self, word: KeepContribution) -> ShardAnswer:
        one = self._found(word.piece)
        one.keep()
        self.kept[word.piece.key] = one
        return ShardDone()

    def _give(self, word: CopyToSlot) -> ShardAnswer:
        parameters = self.parameters
        slot = self.shared.slots[word.worker]
        slot.put(word.place, parameters.held, parameters.flats, parameters.updater_state)
        return ShardDone()

    def _advance(self, word: AdvanceSchedules) -> None:
        self.parameters.advance(word.version, word.epoch, word.progress)

    # ------------------------------------------------------------ around it

    def _export(self, word: ExportParameters) -> ShardAnswer:
        tested = [self.shared.tested[shard] for shard in self.parameters.held]
        self.parameters.export_to({n: v for flat in tested for n, v in flat.views.items()})
        for flat in tested:  # it is others who look at them
            self.shared.arena.let_go(flat.buffer)
        return ShardDone()

    def _write(self, word: WriteState) -> ShardAnswer:
        tensors = {f"store/{name}": t for name, t in self.parameters.state().items()}
        try:
            return StateWritten(save_tensors(Path(word.path), tensors))
        except OSError as error:
            return StateWritten("", error.errno or 5)
