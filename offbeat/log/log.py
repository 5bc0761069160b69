"""The ordered record of a run, one JSON line each: report, replay and calibration all read this."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import CheckpointError
from offbeat.log.files import LogFile, LogReader, is_head
from offbeat.log.records import Entry

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


class Log:
    """Where the records of a run go: a file if there is a folder, and whoever listens."""

    def __init__(
        self,
        path: Path | None = None,
        keep: int | None = None,
        run: str = "",
        relay: Callable[[bytes], None] | None = None,
    ):
        """`keep` is the length of the file to go on from; what lies behind it is cut off.

        `run` is whose log it is; without that it stays one file. `relay` gets whole lines, one for
        each record; records then wait for `flush`, which comes before anybody is told of them.
        """
        self.listeners: list[Listener] = []
        self.relay, self.gathers = relay, relay is not None
        self.waiting: list[Entry] = []
        # Unbuffered, so that others can follow the run and a kill takes no record with it.
        self.file = None if path is None else LogFile(path, run, keep)

    @property
    def size(self) -> int:
        """Bytes on file, known without asking the system."""
        return 0 if self.file is None else self.file.size

    def write(self, record: Entry) -> None:
        if self.file is not None or self.relay is not None:
            self.waiting.append(record)
            if not self.gathers:
                self.flush()
        for listener in self.listeners:
            listener.see(record)

    def flush(self) -> None:
        """Write what waits, in one go."""
        if self.waiting:
            lines = _encoder.encode_lines(self.waiting)
            self.waiting.clear()
            if self.file is not None:
                self.file.append(lines)
            if self.relay is not None:
                self.relay(lines)

    def switch(self, path: Path) -> None:
        """Go on in another file, from its beginning."""
        self.close()
        self.file = LogFile(path)

    @contextmanager
    def followed(self, store: Any, samples: int) -> Iterator[None]:
        """Tell the listeners of a run: its beginning and, however that comes, its end."""
        for listener in self.listeners:
            listener.begin(store, samples)
        try:
            yield
        finally:
            self.close()
            for listener in self.listeners:
                listener.end()

    def length(self) -> int:
        """Bytes of everything that has been recorded."""
        self.flush()
        return self.size

    def mark(self) -> dict[str, Any]:
        """How long the log is and a checksum of it, for a checkpoint; all of it is on disk."""
        self.flush()
        length, checksum = (0, "") if self.file is None else self.file.mark()
        return {"log": length, "checksum": checksum}

    def close(self) -> None:
        if self.file is not None:
            try:
                self.flush()
            finally:
                self.file.close()
                self.file = None


class Listener:
    """Sees every record as it is written; a progress display is one."""

    def describe(self, settings: Mapping[str, Any], applied: int | None) -> None:
        """Before it begins: what run.json says of the run, and the samples it has behind it."""

    def begin(self, store: Any, samples: int) -> None:
        """A run over `samples` begins.

        `store` has `cells` (the board), `applied` and `given_up` (samples), to be read at any time.
        """

    def see(self, record: Entry) -> None:
        """Something happened."""

    def idle(self) -> None:
        """Nothing has happened for a while: perhaps everybody waits for somebody."""

    def end(self) -> None:
        """The run is over, or has been stopped."""


def decode(lines: bytes) -> list[Entry]:
    """The records in whole lines."""
    return _decoder.decode_lines(lines)


def tail(path: Path, start: int) -> tuple[list[Entry], int]:
    """The records from byte `start` on, and where the last whole one ends."""
    found, end = [], start
    reader = LogReader(path)
    for line in reader:
        if reader.offset > start and line.endswith(b"\n"):
            end = reader.offset
            if not (reader.begins and is_head(line)):
                found.append(_decoder.decode(line))
    return found, end


def read(path: Path, length: int | None = None, run: str = "") -> Iterator[Entry]:
    """The records of a log file, or of its first `length` bytes, parts that were closed included.

    A last line that is still being written is left out. `run` is whose log it must be.
    """
    reader = LogReader(path, run)
    for number, line in enumerate(reader, 1):
        if not line.endswith(b"\n") or (length is not None and reader.offset > length):
            return
        if reader.begins and is_head(line):
            continue
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CheckpointError(f"{path} line {number} is not a log record: {error}") from None
