"""A long log is one log, although it lies in several files, most of them compressed."""

import gzip
import json
from pathlib import Path

import pytest

from offbeat.data.lease import Lease
from offbeat.errors import CheckpointError
from offbeat.log import files as logfile
from offbeat.log.files import checksum, last_lines, measure, part
from offbeat.log.log import Log, read, tail
from offbeat.log.records import Entry, Part, Updated


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(logfile, "PART", 1000)
    return tmp_path / "log.jsonl"


def updates(count: int, first: int = 1) -> list[Entry]:
    versions = range(first, first + count)
    sent = [Part(0, 1, v, v - 1, [Lease(0, v, v + 1)], 1, loss=1 / v) for v in versions]
    return [Updated(v / 7, v, [p], hash="a" * 32) for v, p in zip(versions, sent, strict=True)]


def written(path: Path, records: list[Entry], run: str = "this", keep: int | None = None) -> Log:
    log = Log(path, keep, run)
    for record in records:
        log.write(record)
    log.close()
    return log


def parts(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


def test_parts_are_closed_and_read_as_one(path: Path) -> None:
    log = Log(path, run="this")
    for index, record in enumerate(updates(30), 1):
        log.write(record)
        assert list(read(path)) == updates(index)  # at every moment
    length, total = log.mark()["log"], log.mark()["checksum"]
    log.close()
    names = parts(path)
    assert names[:2] == ["log-000001.jsonl.gz", "log-000002.jsonl.gz"]
    assert names[-1] == "log.jsonl"
    assert path.stat().st_size < 1000 + 400
    assert measure(path, "this") == (length, total)
    assert checksum(path, length, "this") == total
    for number in range(1, len(names)):
        with gzip.open(part(path, number)) as file:
            assert json.loads(file.readline())["number"] == number
    assert b'"version":30' in last_lines(path)[-1]


def test_a_log_is_cut_anywhere_to_what_it_was(path: Path) -> None:
    log, marks = Log(path, run="this"), [(0, "")]
    for record in updates(20):
        log.write(record)
        told = log.mark()
        marks.append((told["log"], told["checksum"]))
    log.close()
    whole = {name: (path.parent / name).read_bytes() for name in parts(path)}
    for count in range(20, 0, -1):
        length, total = marks[count]
        again = Log(path, length, "this")
        assert (again.size, again.mark()["checksum"]) == (length, total)
        assert list(read(path)) == updates(count)
        again.close()
    # And it grows again to the same bytes.
    written(path, updates(19, 2), keep=marks[1][0])
    assert {name: (path.parent / name).read_bytes() for name in parts(path)} == whole
    written(path, updates(1))
    assert parts(path) == ["log.jsonl"]
    assert list(read(path)) == updates(1)


def test_a_kill_while_a_part_is_closed(path: Path) -> None:
    written(path, updates(4))
    while not part(path, 1).exists():
        before, length = path.read_bytes(), measure(path)[0]
        written(path, updates(1, 9), keep=length)
    path.write_bytes(before)  # the same part twice: compressed, and as it was
    found = list(read(path))
    assert measure(path)[0] == length
    written(path, updates(1, 50), keep=length)
    assert list(read(path)) == [*found, *updates(1, 50)]


def test_records_since_a_byte(path: Path) -> None:
    log = Log(path, run="this")
    for record in updates(5):
        log.write(record)
    start = log.length()
    for record in updates(15, 6):
        log.write(record)
    end = log.length()
    log.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"upd')
    assert tail(path, start) == (updates(15, 6), end)


def test_a_part_that_closes_under_a_readers_eyes(path: Path) -> None:
    log = Log(path, run="this")
    for record in updates(3):
        log.write(record)
    seen = read(path)
    first = next(seen)
    for record in updates(10, 4):
        log.write(record)
    found = [first, *seen]
    assert found == updates(len(found))
    log.close()
    assert list(read(path)) == updates(13)


@pytest.mark.parametrize("which", ["part", "last"])
def test_what_does_not_belong_together_is_named(path: Path, which: str) -> None:
    written(path, updates(20))
    (path.parent / "other").mkdir()
    other = path.parent / "other" / "log.jsonl"
    written(other, updates(20), run="other")
    mine, theirs = (part(path, 2), part(other, 2)) if which == "part" else (path, other)
    mine.write_bytes(theirs.read_bytes())
    with pytest.raises(CheckpointError, match="is of another run"):
        list(read(path))
    with pytest.raises(CheckpointError, match="is of another run"):
        list(read(other, run="this"))


def test_a_part_that_is_missing_or_damaged_is_named(path: Path) -> None:
    written(path, updates(20))
    content = part(path, 2).read_bytes()
    part(path, 2).write_bytes(content[:-12])
    with pytest.raises(CheckpointError, match=r"log-000002\.jsonl\.gz is damaged or cut short"):
        list(read(path))
    part(path, 2).write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])
    with pytest.raises(CheckpointError, match=r"log-000002\.jsonl\.gz"):
        list(read(path))
    part(path, 2).unlink()
    with pytest.raises(CheckpointError, match=r"log-000002\.jsonl\.gz is missing"):
        list(read(path))
    part(path, 2).write_bytes(content)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"log\.jsonl is missing"):
        list(read(path))


def test_a_line_without_an_end_is_not_read_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logfile, "LONGEST", 1 << 12)
    path.write_bytes(b"\0" * (1 << 14))
    with pytest.raises(CheckpointError, match="a line without an end"):
        list(read(path))


def test_a_log_of_a_later_version_is_not_guessed_at(path: Path) -> None:
    path.write_text('{"kind":"log","time":0.0,"run":"this","number":1,"start":0,"format":9}\n')
    with pytest.raises(CheckpointError, match="a later version of offbeat"):
        list(read(path))


def test_a_log_of_the_version_before_is_read_and_gone_on_with(path: Path) -> None:
    """It does not say whose it is, and stays one file."""
    written(path, updates(5), run="")
    assert parts(path) == ["log.jsonl"]
    assert b'"kind":"update"' in path.read_bytes().splitlines()[0]
    written(path, updates(15, 6), run="", keep=path.stat().st_size)
    assert parts(path) == ["log.jsonl"]
    assert list(read(path)) == updates(20)
