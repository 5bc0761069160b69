"""The table of a run: its rows against the log, a run that goes on, and failures on the way."""

import csv
import errno
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.cli import main
from offbeat.log.log import read
from offbeat.log.records import Updated
from tests.track.common import StopAt, open_here, small_run


def rows(path: Path, kind: str | None = None) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if kind in (None, row["kind"])]


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_rows_agree_with_the_log(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.csv"
    run = small_run(ob.track.CSV(path, every=1), engine=engine, out=tmp_path / "run")
    records = [r for r in read(tmp_path / "run" / "log.jsonl") if isinstance(r, Updated)]
    found = rows(path, "update")
    assert [(float(r["time"]), int(r["version"])) for r in found] == [
        (r.time, r.version) for r in records
    ]
    assert [float(row["loss"]) for row in found] == [r.parts[0].loss for r in records]
    assert int(found[-1]["samples"]) == run.summary().samples
    tests = rows(path, "test")
    assert [float(row["loss"]) for row in tests] == [t.loss for t in run.history.tests]
    assert len(rows(path, "epoch")) == 2
    assert [row["text"] for row in rows(path, "event")] == [
        f"worker {row['text'].split()[1]} joined, for the 1st time" for row in rows(path, "event")
    ]
    assert not open_here(tmp_path)


def test_few_rows_of_a_long_run(tmp_path: Path) -> None:
    small_run(ob.track.CSV(tmp_path / "a.csv", every=10))
    versions = [int(row["version"]) for row in rows(tmp_path / "a.csv", "update")]
    assert versions == [10, 20, 24]


def test_a_new_run_begins_anew_and_a_resumed_one_adds(tmp_path: Path) -> None:
    path, out = tmp_path / "a.csv", tmp_path / "run"
    path.write_text("something else\n")
    with pytest.raises(RuntimeError):
        small_run(
            StopAt(20, RuntimeError("on purpose")),
            ob.track.CSV(path, every=1),
            out=out,
            checkpoint_every=4,
        )
    assert not open_here(tmp_path)
    before = path.read_text()
    assert before.startswith("kind,time,version,samples,loss,")
    small_run(ob.track.CSV(path, every=1), out=out, checkpoint_every=4, resume=True)
    assert path.read_text().startswith(before)
    assert path.read_text().count("kind,") == 1
    assert rows(path, "update")[-1]["samples"] == "96"


def test_a_run_that_never_trained_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("kind,time\n")

    def broken(output: Any, target: Any) -> Any:
        raise ArithmeticError("on purpose")

    with pytest.raises(Exception, match="on purpose"):
        small_run(ob.track.CSV(path), loss=broken)
    assert path.read_text().startswith("kind,time\n")


def test_a_place_that_cannot_be_written_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ob.ConfigError, match=r"CSV cannot write to .*choose another one"):
        small_run(ob.track.CSV(tmp_path / "file" / "a.csv"))


class Full(ob.track.CSV):
    """Its disk fills up."""

    def _write(self, row: Any) -> None:
        if row.get("version") == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(row)


def test_a_full_disk_stops_the_table_and_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with pytest.warns(RuntimeWarning, match=r"Full has stopped tracking .*No space.*the run goes"):
        run = small_run(Full(path, every=1))
    assert run.summary().samples == 96
    assert [row["version"] for row in rows(path, "update")] == ["1", "2"]
    assert not open_here(tmp_path)


def test_the_command_line_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    words = ["simulate", "-n", "2", "--epochs", "1", "--csv", str(path), "--json"]
    assert main(words) == 0
    assert rows(path, "test")[0]["samples"] == "1438"
    assert main([*words, "--cost-only"]) == 2
