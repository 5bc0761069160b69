"""The process of a backup on one machine: it reads the same slots, so that a signal is enough."""

import selectors
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from torch import Tensor

from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.engine.local.state_files import StateFiles
from offbeat.engine.local.watchdog import FILES, IDLE, WORKING
from offbeat.folder.checkpoint import Others
from offbeat.log.records import Part
from offbeat.model.table import under
from offbeat.store.backup import Backup, BackupDone, BackupWord, BackupWords, FollowFrom
from offbeat.store.parameters import Parameters
from offbeat.transport.memory_link import Packets
from offbeat.transport.slots import contribution_in


class HandedOver(msgspec.Struct, array_like=True):
    """From a backup to the launcher: the state of this version has been laid down.

    None is no version: it had nothing to follow from. The others are of its last update.
    """

    version: int | None
    parts: list[Part] = []
    rate: float = 1.0


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BackupWords).decode
_handed_over = msgspec.msgpack.Decoder(HandedOver).decode


PIECE = 1 << 17  # bytes of a word that go in one packet; the system takes few more
_WHOLE, _MORE = b".", b"+"


def pieces(word: bytes) -> Iterator[bytes]:
    """A round of many leases makes a word that is too large for one packet."""
    for start in range(0, len(word), PIECE):
        stop = start + PIECE
        yield word[start:stop] + (_MORE if stop < len(word) else _WHOLE)


class WordInPieces:
    """Puts a word together; one whose end never comes was not said."""

    def __init__(self) -> None:
        self.begun = bytearray()

    def take(self, piece: memoryview | bytes) -> bytes | None:
        """The word, if this was its last piece."""
        self.begun += piece[:-1]
        if piece[-1:] == _MORE:
            return None
        word = bytes(self.begun)
        self.begun.clear()
        return word


class BackupFiles:
    """Where a store lays down its state for a new backup, and a backup for a new store."""

    def __init__(self, processes: int):
        """`processes` is how many hold the store."""
        self.store, self.backup = StateFiles(processes), StateFiles()

    def close(self) -> None:
        self.store.close()
        self.backup.close()


class BackupWire:
    """The server's end of the way to its backup; the server goes on alone when that is gone.

    It is a witness of the store as well: no update is made before the one before is in the log,
    so that a backup is never ahead of that by more than one.
    """

    def __init__(self, files: StateFiles, shared: SharedMemory):
        self.files = files
        # While the server waits for its backup, that one is to be watched.
        self.mine, self.its = shared.server, shared.backup
        self.wire: socket.socket | None = None
        self.packets = Packets()

    @property
    def follows(self) -> bool:
        return self.wire is not None

    def begin(
        self,
        wire: socket.socket,
        version: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        others: Others,
    ) -> None:
        """A new backup: it gets all there is, and what is done from now on waits for it."""
        self._gone()
        self.files.save(tensors, meta, others)
        self.wire = wire
        self.say(FollowFrom(version))

    def say(self, word: BackupWord) -> None:
        if self.wire is not None:
            self.its.about = WORKING
            try:
                for piece in pieces(encode(word)):
                    self.wire.send(piece)
            except ConnectionError:
                self._gone()

    def wait(self) -> None:
        if self.wire is None:
            return
        with self.mine.at(FILES):
            gone = not self.packets.receive(self.wire)
        if gone:
            self._gone()

    def _gone(self) -> None:
        """The launcher notices too, and sends another."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def before(self) -> None:
        return

    def write(self, version: int) -> None:
        return


class BackupProcess:
    """Follows a server until the launcher wants to have what it has."""

    def __init__(
        self,
        parameters: Parameters,
        shared: SharedMemory,
        files: BackupFiles,
        wire: socket.socket,
        launcher: socket.socket,
    ):
        """`wire` leads to the server."""

        def laid_down() -> tuple[dict[str, Tensor], dict[str, Any]]:
            tensors, meta = files.store.load()
            return under("store/", tensors), meta

        self.backup = Backup(
            parameters,
            lambda push: contribution_in(shared.slots[push.part.worker], push),
            laid_down,
        )
        self.files, self.wire, self.launcher = files, wire, launcher
        self.sign = shared.backup
        self.packets, self.word = Packets(), WordInPieces()
        self.asked = False
        self.selector = selectors.DefaultSelector()  # of callables
        self.selector.register(wire, selectors.EVENT_READ, self._hear)
        self.selector.register(launcher, selectors.EVENT_READ, self._hand_over)

    def run(self) -> None:
        while not self.asked:
            self.sign.about = IDLE
            found = self.selector.select()
            self.sign.about = WORKING
            for key, _ in found:
                key.data()
                self.sign.turn()

    def _hear(self) -> None:
        """Follow what the server says; it may be gone, and what it has said counts all the same."""
        packet = self.packets.receive(self.wire)
        if packet:
            self._follow(packet)
        else:
            self.selector.unregister(self.wire)

    def _follow(self, packet: memoryview) -> None:
        whole = self.word.take(packet)
        if whole is None:
            return
        word = _decode(whole)
        for done in self.backup.follow(word):
            self._say(done)
        if isinstance(word, FollowFrom):
            self.files.store.clear()

    def _say(self, done: BackupDone) -> None:
        try:
            self.wire.send(encode(done))
        except ConnectionError:
            return  # that it is gone shows when its wire is read

    def _hand_over(self) -> None:
        """The server is gone: do what it has said last, and lay down what has come of it."""
        if not self.launcher.recv(1):
            raise SystemExit  # the launcher is gone too, and with it the purpose
        while packet := self._next():
            self._follow(packet)
        self.asked = True
        backup = self.backup
        handed = HandedOver(backup.version)
        if backup.version is not None:
            self.files.backup.save(*backup.state())
            if backup.last is not None:
                handed.parts, handed.rate = backup.last
        for piece in pieces(encode(handed)):
            self.launcher.send(piece)

    def _next(self) -> memoryview | None:
        try:
            return self.packets.receive_now(self.wire)
        except BlockingIOError:
            return None


def hand_over(launcher: socket.socket, still: Callable[[], bool]) -> HandedOver | None:
    """As the launcher, when the server is gone: what its backup has laid down, if it lives.

    `still` waits until there is something to read, and says whether there will be.
    """
    word = WordInPieces()
    try:
        launcher.send(b"!")
        while still() and (packet := launcher.recv(Packets.LARGEST)):
            if whole := word.take(packet):
                return _handed_over(whole)
    except ConnectionError:
        return None
    return None
