"""The ordered record of a run, one JSON line each: report, replay and calibration all read this."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import CheckpointError
from offbeat.lease import Lease
from offbeat.logfile import LogFile, Reader, is_head


# Not searched for garbage, as everything that is made anew for every step: none can hold itself.
class Record(msgspec.Struct, tag_field="kind", omit_defaults=True, gc=False):
    """Something that happened at `time` (seconds since the run began, virtual in a simulation)."""

    time: float


class Begun(Record, tag="begin"):
    """The run begins with what an earlier one had come to."""

    folder: str
    left: str = ""  # why what the earlier rule kept was left behind, if it was


class Joined(Record, tag="join"):
    """A worker entered, for the first time or again."""

    worker: int
    incarnation: int
    clock: int
    averaged: bool = False  # whether its buffers begin as the mean of all, and not as at first


class Pulled(Record, tag="pull"):
    """A worker took the parameters of `version`, after computing `leases` since its last push."""

    worker: int
    version: int
    leases: list[Lease] = []
    steps: int = 1  # local steps until its next push
    bytes: int = 0


class Part(msgspec.Struct, omit_defaults=True, gc=False):
    """One contribution: who sent it, from which version, of which samples, and what it cost."""

    worker: int
    incarnation: int
    sequence: int
    base: int
    leases: list[Lease]
    samples: int
    staleness: int = 0
    weight: float = 1.0
    bytes: int = 0
    compute: float = 0.0
    wait: float = 0.0
    communication: float = 0.0
    loss: float | None = 0.0  # None where it is not a number
    skipped: bool = False
    partner: int | None = None  # whom it took the mean with before its step, where pairs meet


class Admitted(Record, tag="push"):
    """A contribution was taken in and waits for others before it is applied."""

    worker: int
    incarnation: int
    sequence: int
    leases: list[Lease]


class Updated(Record, tag="update"):
    """The store applied `parts` and is now at `version`."""

    version: int
    parts: list[Part]
    rate: float = 1.0  # what the staleness weights made of the learning rate
    hash: str = ""


class Dropped(Record, tag="drop"):
    """A contribution came too late for its round and was not applied."""

    version: int
    part: Part


class Refused(Record, tag="refuse"):
    """A contribution of a worker that had been given up; it must join again."""

    worker: int
    incarnation: int
    sequence: int


class Lost(Record, tag="lost"):
    """A worker was silent for longer than patience; its leases are issued again."""

    worker: int
    incarnation: int
    leases: list[Lease]
    why: str = ""  # who waited for whom in a replica of several processes


class Left(Record, tag="left"):
    """A script left its loop in one worker; its leases are issued again, and the others go on."""

    worker: int
    incarnation: int
    leases: list[Lease]


class Ended(Record, tag="end"):
    """The script of `worker` ended the run for all, before every sample had been dealt with."""

    worker: int
    version: int


class Relaid(Record, tag="relaid"):
    """A run goes on with replicas that are split in another way, and so sum in another order."""

    layout: str | None
    threads: int


class Rested(Record, tag="rest"):
    """A worker has nothing to do now; its time since its last contribution is told here."""

    worker: int
    wait: float = 0.0
    communication: float = 0.0


class EpochDone(Record, tag="epoch"):
    """Every sample of `epoch` has been dealt with."""

    epoch: int
    version: int


class Evaluated(Record, tag="test"):
    """The store's parameters on the test set."""

    version: int
    samples: int
    loss: float | None  # None where it is not a number
    accuracy: float | None = None
    metric: float | None = None  # the user's own, whose name run.json has


Entry = (
    Begun | Joined | Pulled | Admitted | Updated | Dropped | Refused | Lost | Left | Ended | Relaid
    | Rested
    | EpochDone | Evaluated
)  # fmt: skip

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


class Log:
    """Where the records of a run go: a file if there is a folder, and whoever listens."""

    def __init__(self, path: Path | None = None, keep: int | None = None, run: str = ""):
        """`keep` is the length of the file to go on from; what lies behind it is cut off.

        `run` is whose log it is; without that it stays one file.
        """
        self.listeners: list[Listener] = []
        self.relay: Callable[[bytes], None] | None = None  # gets whole lines, one for each record
        self.gathers = False  # whether records wait for `flush`, which comes before they are told
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
    reader = Reader(path)
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
    reader = Reader(path, run)
    for number, line in enumerate(reader, 1):
        if not line.endswith(b"\n") or (length is not None and reader.offset > length):
            return
        if reader.begins and is_head(line):
            continue
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CheckpointError(f"{path} line {number} is not a log record: {error}") from None
