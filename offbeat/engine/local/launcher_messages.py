"""What launcher and server say to each other, beside the wires of the workers."""

import socket
from collections.abc import Iterator
from typing import Any

import msgspec

LARGEST = 1 << 12


class LauncherOrder(msgspec.Struct, array_like=True, tag=True):
    """From the launcher to the server."""


class WorkerConnected(LauncherOrder):
    """A worker (or the tester, or a backup) is there; its end of the wire comes along."""

    number: int


class WorkerGone(LauncherOrder):
    """The process of this worker has ended, as far as the launcher knows; nobody has to wait."""

    number: int


class Halt(LauncherOrder):
    """Save, and stop before the end."""


class ServerReport(msgspec.Struct, array_like=True, tag=True):
    """From the server to the launcher."""


class LogLines(ServerReport):
    """Records of the log."""

    lines: bytes


class CheckpointBegun(ServerReport):
    """What was told so far belongs to the checkpoint of `version`, which is about to be written."""

    version: int


class CheckpointSaved(ServerReport):
    """A checkpoint has been written; what was told so far will never be taken back."""


class WorkerFrozen(ServerReport):
    """A worker has been silent for very long: replace it."""

    number: int


class BackupFollows(ServerReport):
    """A backup has been given all that there is, and from now on hears of every update."""


class RunDone(ServerReport):
    """The run is over, or has been stopped; the final parameters lie where tests are made."""

    finished: bool
    version: int
    ledger: list[dict[str, int]]
    memory: list[int]  # bytes that each process of the store holds
    hash: str
    words: dict[int, dict[str, float]]
    refused: int = 0  # connections that were not let in
    backup: int = 0  # bytes that the backup holds


class TestResult(msgspec.Struct, array_like=True):
    """From the tester to the server; a loss that is not a number is None."""

    loss: float | None
    accuracy: float | None
    metric: float | None = None
    metrics: dict[str, float | None] = {}


LauncherOrders = WorkerConnected | WorkerGone | Halt
ServerReports = (
    LogLines | CheckpointBegun | CheckpointSaved | WorkerFrozen | BackupFollows | RunDone
)

encode = msgspec.msgpack.Encoder().encode
_orders = msgspec.msgpack.Decoder(LauncherOrders).decode
tested = msgspec.msgpack.Decoder(TestResult).decode
_reports = msgspec.msgpack.Decoder(ServerReports).decode


def send_order(
    wire: socket.socket, order: LauncherOrder, handed: socket.socket | None = None
) -> None:
    socket.send_fds(wire, [encode(order)], [] if handed is None else [handed.fileno()])


def receive_order(wire: socket.socket) -> tuple[Any, socket.socket | None]:
    """The next order and the socket that came with it; None when the launcher is gone."""
    packet, handles, _, _ = socket.recv_fds(wire, LARGEST, 1)
    handed = socket.socket(fileno=handles[0]) if handles else None
    return (_orders(packet) if packet else None), handed


class ReportOutbox:
    """The server's reports, kept until the launcher has room for them."""

    def __init__(self, wire: socket.socket):
        self.wire = wire
        self.backlog = bytearray()
        wire.setblocking(False)

    def put(self, report: ServerReport) -> None:
        packet = encode(report)
        self.backlog += len(packet).to_bytes(4, "big") + packet
        self.flush()

    def flush(self) -> None:
        try:
            while self.backlog:
                del self.backlog[: self.wire.send(self.backlog[:65536])]
        except BlockingIOError:
            return

    def finish(self) -> None:
        """Get everything out."""
        self.wire.setblocking(True)
        self.wire.sendall(self.backlog)
        self.backlog.clear()
        self.wire.setblocking(False)


class ReportInbox:
    """The launcher's end."""

    def __init__(self, wire: socket.socket):
        self.wire = wire
        self.buffer = bytearray()
        self.ended = False

    def take(self) -> Iterator[ServerReports]:
        """What has come; call it when the wire can be read."""
        try:
            came = self.wire.recv(1 << 20)
        except ConnectionError:
            came = b""
        self.ended = not came
        self.buffer += came
        while len(self.buffer) >= 4:
            length = int.from_bytes(self.buffer[:4], "big")
            if len(self.buffer) < 4 + length:
                return
            packet = bytes(self.buffer[4 : 4 + length])
            del self.buffer[: 4 + length]
            yield _reports(packet)
