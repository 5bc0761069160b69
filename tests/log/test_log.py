"""Records go out as one JSON line each, and come back as they were."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.data.lease import Lease
from offbeat.errors import CheckpointError, RunError
from offbeat.log import log
from offbeat.log.log import Listener, Log
from offbeat.log.records import (
    Admitted,
    Dropped,
    Entry,
    EpochDone,
    Evaluated,
    Joined,
    Lost,
    Part,
    Pulled,
    Refused,
    Rested,
    Updated,
)

PART = Part(
    1, 2, 3, 4, [Lease(0, 0, 8)], 8,
    staleness=2, weight=0.5, bytes=100, compute=0.25, wait=0.125, communication=1.5, loss=2.25,
)  # fmt: skip
RECORDS: list[Entry] = [
    Joined(0.0, 1, 1, 0),
    Pulled(0.1, 1, 0),
    Pulled(0.1, 1, 5, [Lease(0, 0, 8)], 16, 400),
    Admitted(0.2, 1, 1, 0, [Lease(0, 0, 8)]),
    Updated(0.3, 5, [PART], 0.5, "abc"),
    Updated(0.3, 6, []),
    Dropped(0.4, 6, PART),
    Refused(0.5, 1, 1, 7),
    Lost(0.6, 1, 1, [Lease(1, 4, 8)]),
    Rested(0.7, 1),
    EpochDone(0.8, 0, 6),
    Evaluated(0.9, 6, 100, 0.1 + 0.2, 0.875),
    Evaluated(1.0, 6, 100, 0.25),
]


def written(path: Path, records: list[Entry]) -> Path:
    out = Log(path)
    for record in records:
        out.write(record)
    out.close()
    return path


def test_every_record_reads_back_exactly(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", RECORDS)
    assert list(log.read(path)) == RECORDS
    assert len(path.read_text().splitlines()) == len(RECORDS)


def test_the_loss_of_a_skipped_contribution_may_be_no_number(tmp_path: Path) -> None:
    part = Part(0, 1, 0, 0, [Lease(0, 0, 8)], 8, loss=None, skipped=True)
    path = written(tmp_path / "log.jsonl", [Updated(0.5, 1, [part])])
    (back,) = log.read(path)
    assert isinstance(back, Updated)
    assert back.parts[0].skipped
    assert back.parts[0].loss is None


def test_a_line_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", RECORDS)
    path.write_bytes(path.read_bytes()[:-3])
    assert list(log.read(path)) == RECORDS[:-1]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", RECORDS[:2])
    path.write_bytes(path.read_bytes() + b'{"kind":"what"}\n')
    with pytest.raises(CheckpointError, match=r"log\.jsonl line 3 is not a log record"):
        list(log.read(path))


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist: is this a run folder"):
        list(log.read(tmp_path / "log.jsonl"))


def test_a_log_without_a_file_still_tells_its_listeners() -> None:
    seen: list[Entry] = []

    class Watch(Listener):
        def see(self, record: Entry) -> None:
            seen.append(record)

    quiet = Log()
    quiet.listeners.append(Watch())
    quiet.write(RECORDS[0])
    assert seen == [RECORDS[0]]
    assert quiet.length() == 0
    quiet.close()


def test_records_that_are_gathered_go_out_together(tmp_path: Path) -> None:
    path, lines = tmp_path / "log.jsonl", []
    out = Log(path, relay=lines.append)
    for record in RECORDS[:3]:
        out.write(record)
    assert lines == []
    assert path.read_bytes() == b""
    out.flush()
    assert len(lines) == 1
    assert log.decode(lines[0]) == RECORDS[:3]
    assert path.read_bytes() == lines[0]
    assert out.length() == len(lines[0])
    out.write(RECORDS[3])
    assert out.length() == len(b"".join(lines)) > len(lines[0])  # what waited is written first
    out.switch(tmp_path / "next.jsonl")
    assert list(log.read(path)) == RECORDS[:4]
    assert out.length() == 0
    out.write(RECORDS[4])
    out.close()
    assert list(log.read(tmp_path / "next.jsonl")) == [RECORDS[4]]


class Disk:
    """A file on a disk that takes `room` bytes, at most `most` at a time, and then is full."""

    def __init__(self, real: Any, room: int, most: int = 1 << 20):
        self.real, self.room, self.most = real, room, most

    def write(self, lines: Any) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        count = min(len(lines), self.room, self.most)
        self.room -= count
        return int(self.real.write(lines[:count]))

    def fileno(self) -> int:
        return int(self.real.fileno())

    def close(self) -> None:
        self.real.close()


def test_what_could_not_be_written_is_not_tried_again(tmp_path: Path) -> None:
    out = Log(tmp_path / "log.jsonl")
    assert out.file is not None
    out.file.file = Disk(out.file.file, 0)  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"No space.*make room and resume"):
        out.write(RECORDS[0])
    out.close()


def test_a_disk_that_takes_little_at_a_time_gets_all_of_it(tmp_path: Path) -> None:
    out = Log(tmp_path / "log.jsonl")
    assert out.file is not None
    out.file.file = Disk(out.file.file, 10_000, most=7)  # type: ignore[assignment]
    for record in RECORDS:
        out.write(record)
    assert out.length() == (tmp_path / "log.jsonl").stat().st_size
    out.close()
    assert list(log.read(tmp_path / "log.jsonl")) == RECORDS


def test_a_disk_that_is_full_for_a_moment_leaves_no_half_record(tmp_path: Path) -> None:
    """Half a record fits, then nothing does, then there is room again."""
    path = tmp_path / "log.jsonl"
    out = Log(path)
    out.write(RECORDS[0])
    assert out.file is not None
    disk = out.file.file = Disk(out.file.file, 9)  # type: ignore[assignment]
    with pytest.raises(RunError, match="No space"):
        out.write(RECORDS[1])
    disk.room = 10_000
    out.write(RECORDS[2])
    out.close()
    assert list(log.read(path)) == [RECORDS[0], RECORDS[2]]


def test_a_listener_may_leave_everything_out() -> None:
    listener = Listener()
    listener.begin(None, 0)
    listener.see(RECORDS[0])
    listener.end()


def test_going_on_cuts_off_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = Log(path)
    first.write(RECORDS[0])
    kept = first.length()
    assert kept == path.stat().st_size
    first.write(RECORDS[1])
    first.close()
    second = Log(path, keep=kept)
    second.write(RECORDS[2])
    assert second.length() == path.stat().st_size
    second.close()
    assert list(log.read(path)) == [RECORDS[0], RECORDS[2]]


def test_a_new_log_does_not_go_on_with_an_old_file(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", RECORDS)
    assert list(log.read(written(path, RECORDS[:1]))) == RECORDS[:1]


def test_a_log_shorter_than_its_checkpoint_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", RECORDS[:1])
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="shorter than its checkpoint says"):
        Log(path, keep=10_000)
    assert path.read_bytes() == before
