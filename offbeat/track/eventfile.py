"""TensorBoard's event files, written directly: records with a checksum, in protobuf's encoding."""

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import IO


def _table() -> tuple[int, ...]:
    values = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        values.append(value)
    return tuple(values)


_CRC = _table()


def masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecord files have it: turned, and moved by a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # negative ones as protobuf has them
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(wall: float, step: int, *fields: bytes) -> bytes:
    """An `Event` message: wall_time = 1, step = 2, and what it is about."""
    return b"\x09" + struct.pack("<d", wall) + b"\x10" + varint(step) + b"".join(fields)


def scalars(values: Mapping[str, float]) -> bytes:
    """The `summary` of an event: each value has a tag = 1 and a simple_value = 2."""
    each = (
        _bytes_field(1, name.encode()) + b"\x15" + struct.pack("<f", value)
        for name, value in values.items()
    )
    return _bytes_field(5, b"".join(_bytes_field(1, value) for value in each))


class EventFile:
    """One event file, open for writing.

    Each record is one unbuffered write in the caller's thread. So there is no thread and no lock
    that a fork could copy in a bad moment, and a kill leaves whole records behind.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = self._new(folder)
        # The first record names the version of the format.
        self._write(event(time(), 0, _bytes_field(3, b"brain.Event:2")))

    def _new(self, folder: Path) -> IO[bytes]:
        for number in range(1000):
            name = f"events.out.tfevents.{int(time()):010d}.offbeat.{os.getpid()}.{number}"
            try:
                return open(folder / name, "xb", buffering=0)
            except FileExistsError:
                continue  # another run of this process in the same second
        raise FileExistsError(17, "it is full of event files", str(folder))

    def add(self, values: Mapping[str, float], wall: float, step: int) -> None:
        """Named numbers at a step."""
        self._write(event(wall, step, scalars(values)))

    def restart(self, wall: float, step: int) -> None:
        """A run goes on from `step`: a reader forgets what came behind it before."""
        self._write(event(wall, step, _bytes_field(7, b"\x08\x01")))  # session_log: status START

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", masked_crc(piece)) for piece in (length, data)]
        self.file.write(length + checks[0] + data + checks[1])

    def close(self) -> None:
        self.file.close()
