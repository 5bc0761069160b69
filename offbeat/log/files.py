"""The log on disk: the last part in `log.jsonl`, what came before in compressed parts beside it."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec
import xxhash

from offbeat.errors import CheckpointError, RunError
from offbeat.folder.disk import appended, fresh, readable, replace, sync, write_all

PART = 1 << 20  # bytes after which a part is closed and compressed
LEVEL = 3  # of compression: a tenth larger than the usual 6, in less than half the time
FORMAT = 1
TAIL = 1 << 16  # bytes at the end that tell when a log ends
LONGEST = 1 << 26  # bytes of a line; no honest record is longer


class Head(msgspec.Struct, tag="log", tag_field="kind"):
    """The first line of each part: whose it is, and which bytes of the whole log it begins with.

    A log of an earlier version, or one in memory, has none, and is never closed.
    """

    time: float
    run: str
    number: int
    start: int
    format: int = FORMAT


_decode_head = msgspec.json.Decoder(Head).decode
_encode = msgspec.json.Encoder().encode


class LogFile:
    """Appends to a log, and closes a part of it when that is long enough."""

    def __init__(self, path: Path, run: str = "", keep: int | None = None):
        """`keep` is how many bytes of an earlier log to go on from; None begins anew."""
        self.path, self.run = path, run
        self.number, self.start = 1, 0
        self.size = 0  # of the whole log
        self.sum = xxhash.xxh3_128()
        self.renamed = True  # whether files came or went since the log was last on disk
        try:
            if keep:
                self._cut(keep)
            else:
                self._begin_anew()
            self.file = appended(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error

    def append(self, lines: bytes) -> None:
        """Write whole lines; either all of them are there afterwards, or none."""
        if self.run and self.size - self.start >= PART:
            self._close_part()
        try:
            write_all(self.file, lines)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.file.fileno(), self.size - self.start)
            raise RunError(
                f"the log could not be written ({error.strerror}); the last checkpoint is intact: "
                "make room and resume"
            ) from error
        self.sum.update(lines)
        self.size += len(lines)

    def mark(self) -> tuple[int, str]:
        """Length and checksum of all that has been written, once it is on disk."""
        os.fsync(self.file.fileno())
        if self.renamed and self.run:
            sync(self.path.parent)
            self.renamed = False
        return self.size, self.sum.hexdigest()

    def close(self) -> None:
        self.file.close()

    # ------------------------------------------------------------ parts

    def _begin_anew(self) -> None:
        if not self.run:
            appended(self.path).close()  # so that a link is refused before anything is emptied
            fresh(self.path).close()
            return
        replace(self.path, self._head())
        self._remove_parts(1)
        self.sum.update(self._head())
        self.size = len(self._head())

    def _head(self) -> bytes:
        return _encode(Head(0.0, self.run, self.number, self.start)) + b"\n"

    def _close_part(self) -> None:
        """Compress what `log.jsonl` holds, then begin it again.

        A kill in between leaves the same part twice, and the number in its head tells so.
        """
        try:
            with readable(self.path) as file:
                content = file.read()
            replace(part(self.path, self.number), gzip.compress(content, LEVEL, mtime=0))
            self.number, self.start, self.renamed = self.number + 1, self.size, True
            replace(self.path, self._head())
        except OSError as error:
            raise RunError(
                f"a part of the log could not be closed ({error.strerror}); the last checkpoint is "
                "intact: make room and resume"
            ) from error
        self.file.close()
        self.file = appended(self.path)
        self.sum.update(self._head())
        self.size += len(self._head())

    def _cut(self, keep: int) -> None:
        """Let the log be its first `keep` bytes."""
        reader = LogReader(self.path, self.run)
        content: list[bytes] = []  # of the part that the last of these bytes is in
        for line in reader:
            if reader.begins:
                content.clear()
            content.append(line)
            self.sum.update(line)
            if reader.offset >= keep:
                break
        if reader.offset != keep:
            raise CheckpointError(f"{self.path} is shorter than its checkpoint says, or is damaged")
        self.number, self.start, self.size = max(1, reader.number), reader.start, keep
        if reader.closed:
            replace(self.path, b"".join(content))
            self._remove_parts(self.number)
        else:
            with appended(self.path) as file:
                os.ftruncate(file.fileno(), keep - self.start)

    def _remove_parts(self, first: int) -> None:
        """The last one first, so that a kill leaves no gap."""
        number = first
        while part(self.path, number).exists():
            number += 1
        for later in range(number - 1, first - 1, -1):
            part(self.path, later).unlink()


def part(path: Path, number: int) -> Path:
    """Where a part that has been closed lies."""
    return path.with_name(f"{path.stem}-{number:06d}{path.suffix}.gz")


class LogReader:
    """The lines of a log in order, heads among them, also while it is being written.

    After each line it says where that was. The last one may be half written.
    """

    def __init__(self, path: Path, run: str = ""):
        """`run` is whose log it must be, if that is known."""
        self.path, self.run = path, run
        self.number, self.start = 0, 0  # of the part, and the first of its bytes
        self.offset = 0  # where the line ends
        self.begins = False  # whether it is the first of its part
        self.closed = False  # whether its part has been closed

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self.number, self.start = self.number + 1, self.offset
            name = part(self.path, self.number)
            self.closed = name.exists()
            with self._opened(name) if self.closed else self._last() as file:
                first = self._line(file)
                head = _head(first)
                if not self.closed and head is not None and head.number != self.number:
                    if head.number < self.number:
                        return  # closed, and a kill came before it was begun again
                    if not name.exists():
                        raise CheckpointError(f"{name} is missing: the log has a gap")
                    self.number -= 1  # it was closed just now
                    continue
                self._check(head)
                line, self.begins = first, True
                while line:
                    self.offset += len(line)
                    yield line
                    line, self.begins = self._line(file), False
            if not self.closed:
                return

    @contextmanager
    def _opened(self, name: Path) -> Iterator[IO[bytes]]:
        with readable(name) as file, gzip.GzipFile(fileobj=file, mode="rb") as whole:
            yield whole  # type: ignore[misc]

    def _last(self) -> IO[bytes]:
        try:
            return readable(self.path)
        except FileNotFoundError:
            if self.number == 1:
                raise CheckpointError(
                    f"{self.path} does not exist: is this a run folder?"
                ) from None
            raise CheckpointError(f"{self.path} is missing: the log has no end") from None

    def _line(self, file: IO[bytes]) -> bytes:
        try:
            line = file.readline(LONGEST)
        except (OSError, EOFError, zlib.error) as error:
            where = part(self.path, self.number) if self.closed else self.path
            raise CheckpointError(f"{where} is damaged or cut short: {error}") from None
        if len(line) >= LONGEST:
            raise CheckpointError(f"{self.path} is not a log: it has a line without an end")
        return line

    def _check(self, head: Head | None) -> None:
        where = part(self.path, self.number) if self.closed else self.path
        if head is None:
            if self.number > 1 or self.run:
                raise CheckpointError(f"{where} does not say whose it is, or is damaged")
            return
        if head.format > FORMAT:
            raise CheckpointError(f"{where} was written by a later version of offbeat")
        if self.run and head.run != self.run:
            raise CheckpointError(f"{where} is of another run")
        self.run = head.run
        if (head.number, head.start) != (self.number, self.start):
            raise CheckpointError(f"{where} does not follow the part before it")


def _head(line: bytes) -> Head | None:
    if b'"log"' not in line[:30] or not line.endswith(b"\n"):
        return None
    try:
        return _decode_head(line)
    except msgspec.MsgspecError:
        return None


def is_head(line: bytes) -> bool:
    """Whether this line only says whose log it is."""
    return _head(line) is not None


def checksum(path: Path, length: int, run: str = "") -> str | None:
    """Of the first `length` bytes, or None if there are not so many, or no line ends there."""
    total, reader = xxhash.xxh3_128(), LogReader(path, run)
    if length > 0:
        for line in reader:
            total.update(line)
            if reader.offset >= length:
                break
    return total.hexdigest() if reader.offset == length else None


def measure(path: Path, run: str = "") -> tuple[int, str]:
    """Length and checksum of all whole lines."""
    total, length, reader = xxhash.xxh3_128(), 0, LogReader(path, run)
    for line in reader:
        if line.endswith(b"\n"):
            total.update(line)
            length = reader.offset
    return length, total.hexdigest()


def last_lines(path: Path) -> list[bytes]:
    """Whole lines from the end of a log, at least one if there is any, cheaply."""
    found: list[bytes] = []
    size = TAIL
    with suppress(FileNotFoundError), readable(path) as file:
        length = file.seek(0, io.SEEK_END)
        while True:
            file.seek(max(0, length - size))
            lines = file.read(size).split(b"\n")[:-1]
            # The first line is whole only if it is the file's first.
            found = lines if size >= length else lines[1:]
            if found or size >= length:
                break
            size *= 4  # a round of many workers is a long line
    if any(not is_head(line + b"\n") for line in found):
        return found
    number = 1
    while part(path, number).exists():
        number += 1
    if number > 1:
        # Whoever reads all of it says what is wrong with it.
        with suppress(OSError, EOFError, zlib.error), gzip.open(part(path, number - 1)) as whole:
            return list(whole)[-1000:]
    return found
