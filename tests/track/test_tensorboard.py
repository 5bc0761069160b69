"""Event files, read back with TensorBoard's own reader; forks and kills do them no harm."""

import math
import os
import signal
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

import offbeat as ob
from offbeat.cli import main
from offbeat.log.log import read
from offbeat.log.records import Joined, Updated
from offbeat.track import eventfile
from offbeat.track.eventfile import EventFile, masked_crc, varint
from tests.engine.local.common import Gate, Script, after, contributed, nothing_left, seen, strike
from tests.track.common import StopAt, open_here, small_run


def curves(folder: Path) -> dict[str, list[Any]]:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}


def test_the_checksum_is_crc_32c() -> None:
    known = 0xE3069283  # of "123456789", as the standard has it
    assert masked_crc(b"123456789") == ((known >> 15 | known << 17) + 0xA282EAD8) & 0xFFFFFFFF


@given(st.integers(-(2**63), 2**63 - 1), st.floats(width=32, allow_nan=False), st.text(min_size=1))
def test_events_are_what_protobuf_reads(step: int, value: float, name: str) -> None:
    data = eventfile.event(1.5, step, eventfile.scalars({name: value, "b": 2.0}))
    read_back = Event.FromString(data)
    assert (read_back.wall_time, read_back.step) == (1.5, step)
    assert [(v.tag, v.simple_value) for v in read_back.summary.value] == [(name, value), ("b", 2.0)]


def test_numbers_are_as_long_as_they_need() -> None:
    assert [varint(n) for n in (0, 127, 128, 300)] == [b"\0", b"\x7f", b"\x80\x01", b"\xac\x02"]


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_curves_agree_with_the_log(engine: str, tmp_path: Path) -> None:
    folder = tmp_path / "board"
    run = small_run(ob.track.TensorBoard(folder, every=1), engine=engine, out=tmp_path / "run")
    records = [r for r in read(tmp_path / "run" / "log.jsonl") if isinstance(r, Updated)]
    found = curves(folder)
    loss = found["train/loss"]
    single = [struct.unpack("f", struct.pack("f", r.parts[0].loss))[0] for r in records]
    assert [point.value for point in loss] == single
    assert [point.step for point in loss] == [4 * n for n in range(1, 25)]
    first = loss[0].wall_time - records[0].time
    assert all(
        math.isclose(point.wall_time - first, record.time, abs_tol=1e-5)
        for point, record in zip(loss, records, strict=True)
    )
    tests = found["test/loss"]
    assert [point.step for point in tests] == [t.samples for t in run.history.tests]
    assert tests[-1].value == pytest.approx(run.summary().loss, rel=1e-6)
    assert {"train/staleness", "train/samples_per_second", "train/version"} <= found.keys()
    assert {"waiting/all", "waiting/worker_0", "waiting/worker_2"} <= found.keys()
    assert found["events/join"][-1].value == 3
    assert not open_here(tmp_path)


def test_a_worker_that_is_killed_and_started_again_does_not_touch_the_file(
    tmp_path: Path, unhurried: None
) -> None:
    gate = Gate()
    with nothing_left():
        threads = threading.active_count()
        steps = [after(2), strike("offbeat 1"), seen(Joined, 1), contributed(1, 2)]
        script = Script(gate, steps)
        tracker = ob.track.TensorBoard(tmp_path / "board", every=1)
        run = small_run(tracker, script, engine="local", loss=gate, epochs=12)
        assert not script.left
        assert threading.active_count() == threads
    gate.close()
    found = curves(tmp_path / "board")
    assert [point.value for point in found["train/version"]] == list(
        range(1, run.summary().updates + 1)
    )
    assert found["events/join"][-1].value == 4
    assert found["events/lost"][-1].value == 1


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), KeyboardInterrupt()])
def test_a_run_that_fails_leaves_whole_records(error: BaseException, tmp_path: Path) -> None:
    tracker = ob.track.TensorBoard(tmp_path / "board", every=1)
    with pytest.raises(type(error)):
        small_run(tracker, StopAt(5, error), engine="local")
    assert [point.step for point in curves(tmp_path / "board")["train/loss"]] == [4, 8, 12, 16, 20]
    assert not open_here(tmp_path)


def test_ctrl_c_keeps_the_last_update(tmp_path: Path, unhurried: None) -> None:
    gate = Gate()

    def interrupt(record: Any) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return True

    with nothing_left():
        tracker = ob.track.TensorBoard(tmp_path / "board")
        script = Script(gate, [after(6), interrupt])
        with pytest.raises(ob.Interrupted) as caught:
            small_run(tracker, script, engine="local", loss=gate, epochs=12)
        updates = caught.value.run.summary().updates
        del caught
    gate.close()
    assert curves(tmp_path / "board")["train/version"][-1].value == updates
    assert not open_here(tmp_path)


def test_a_run_that_goes_on_replaces_what_was_lost(tmp_path: Path) -> None:
    board, out = tmp_path / "board", tmp_path / "run"
    with pytest.raises(RuntimeError):
        small_run(
            StopAt(19, RuntimeError("on purpose")),
            ob.track.TensorBoard(board, every=1),
            out=out,
            checkpoint_every=4,
        )
    small_run(ob.track.TensorBoard(board, every=1), out=out, checkpoint_every=4, resume=True)
    assert len(list(board.iterdir())) == 2
    steps = [point.step for point in curves(board)["train/loss"]]
    assert steps == [4 * n for n in range(1, 25)]


def test_two_files_of_one_second_have_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eventfile, "time", lambda: 1000.0)
    for _ in range(2):
        EventFile(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_place_that_cannot_be_written_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ob.ConfigError, match="TensorBoard cannot write to"):
        small_run(ob.track.TensorBoard(tmp_path / "file"))


SCRIPT = """
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset
import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
with ob.join(discipline="asp") as run:
    model = run.replica(nn.Linear(3, 2))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.05))
    for x, y in run.batches(data, batch_size=4):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        run.record(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_scripts_are_tracked_by_a_flag(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, board, table = tmp_path / "train.py", tmp_path / "board", tmp_path / "a.csv"
    script.write_text(SCRIPT)
    words = ["run", "-n", "2", "--engine", engine, "--tensorboard", board, "--csv", table, script]
    assert main([str(word) for word in words]) == 0
    assert curves(board)["train/loss"][-1].step == 48
    assert sum(line.startswith("epoch") for line in table.read_text().splitlines()) == 1
    assert main(["run", "--replay", str(tmp_path), "--csv", str(table), str(script)]) == 2
    assert "leave the others out" in capsys.readouterr().err
