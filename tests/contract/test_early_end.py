"""`run.stop()` ends the run for all; a `break` is one worker that leaves; the same everywhere."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offbeat as ob
from offbeat.engine.script import Script
from offbeat.engine.sim.scripts import replay_script, simulate_script
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.log import read
from offbeat.log.records import Ended, Joined, Left, Lost, Updated
from offbeat.store.parameters import Parameters

SCRIPT = """
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
with ob.join(JOIN) as run:
    model = run.replica(net)
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    for step, (x, y) in enumerate(run.batches(data, batch_size=4, epochs=2)):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        run.record(loss)
        BEFORE
        optimizer.step()
        optimizer.zero_grad()
        AFTER
total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
print(f"end {run.rank} {run.version} {total:.9f}", flush=True)
END
"""
LAYOUT = "pp=2,microbatches=2,split=count"
STOPS = {
    "before": {"before": "if run.rank == 1 and step == 2: run.stop()"},
    "after": {"after": "if run.rank == 1 and step == 2: run.stop()"},
    "with a break": {"after": "if run.rank == 1 and step == 2: run.stop(); break"},
}


def script(
    folder: Path, before: str = "pass", after: str = "pass", join: str = "", end: str = ""
) -> Script:
    path = folder / "train.py"
    text = SCRIPT.replace("BEFORE", before).replace("AFTER", after)
    path.write_text(text.replace("JOIN", join).replace("END", end))
    return Script(path)


def offbeat(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat", "run", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def ends(text: str) -> list[tuple[int, int, str]]:
    """Of each worker that came to its end: rank, version and the sum over its parameters."""
    found = re.findall(r"end (\d) (\d+) (\d+\.\d{9})", text)
    return sorted((int(rank), int(version), total) for rank, version, total in found)


def of(kind: type[Any], folder: Path) -> list[Any]:
    return [record for record in read(folder / "log.jsonl") if isinstance(record, kind)]


def everything_once(folder: Path) -> bool:
    positions = [
        (lease.epoch, position)
        for record in of(Updated, folder)
        for part in record.parts
        for lease in part.leases
        for position in range(lease.start, lease.stop)
    ]
    return sorted(positions) == [(epoch, n) for epoch in range(2) for n in range(48)]


def check_stopped(folder: Path, found: list[tuple[int, int, str]]) -> None:
    """All came out with one model, which is saved, and the log says who ended the run."""
    assert [rank for rank, _, _ in found] == [0, 1]
    assert len({(version, total) for _, version, total in found}) == 1
    summary = json.loads((folder / "summary.json").read_text())
    (ended,) = of(Ended, folder)
    assert (ended.worker, ended.version) == (1, found[0][1])
    assert summary["ended_by"] == 1
    assert summary["lost"] == 0
    assert summary["left"] == []
    assert 0 < summary["updates"] < 24
    parameters = [t for n, t in load_file(folder / "model.safetensors").items() if not _buffer(n)]
    assert f"{sum(float(t.double().abs().sum()) for t in parameters):.9f}" == found[0][2]


def _buffer(name: str) -> bool:
    return "running" in name or "num_batches" in name


# ---------------------------------------------------------------- the end for all


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("before", ("asp", "--shards", 2)),
        ("after", ("bsp", "--via", "allreduce")),
        ("with a break", ("local:2", "--layout", LAYOUT)),
    ],
)
def test_stop_ends_the_run_for_all(tmp_path: Path, how: str, words: tuple[Any, ...]) -> None:
    out = tmp_path / "run"
    split = {"join": f"layout={LAYOUT!r}"} if LAYOUT in words else {}
    # Slow enough that nobody is through before the one that stops has come to it.
    options = ("-n", 2, "--emulate", "30ms", "--sync", *words)
    what = script(tmp_path, **STOPS[how], **split)
    done = offbeat(*options, "--out", out, what.path)
    assert done.returncode == 0, done.stderr
    assert "worker 1 ended the run at version" in done.stdout
    check_stopped(out, ends(done.stdout))
    assert replay_script(what, RunFolder(out)).identical
    what = script(tmp_path, **split)
    done = offbeat(*options, "--out", out, "--resume", what.path)
    assert done.returncode == 0, done.stderr
    assert everything_once(out)
    assert not of(Ended, out)
    assert json.loads((out / "summary.json").read_text())["ended_by"] is None
    assert replay_script(what, RunFolder(out)).identical


@pytest.mark.parametrize("discipline", ["bsp", "asp", "local:2", "easgd:2"])
@pytest.mark.parametrize("how", STOPS)
def test_stop_in_virtual_time(tmp_path: Path, capsys: Any, how: str, discipline: str) -> None:
    out, cluster = tmp_path / "run", ob.Cluster.parse("20ms,25ms")
    what = script(tmp_path, **STOPS[how])
    run = simulate_script(what, cluster, {"discipline": discipline, "out": out})
    check_stopped(out, ends(capsys.readouterr().out))
    assert run.summary().ended_by == 1
    assert replay_script(what, RunFolder(out)).identical
    asked = {"discipline": discipline, "out": out, "resume": True}
    simulate_script(script(tmp_path), cluster, asked)
    assert everything_once(out)


def test_stop_alone(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    for how in ("before", "after"):
        stop = {how: "if step == 2: run.stop()"}
        what = script(tmp_path, **stop, join=f"out={str(out / how)!r}")
        what.play(what.module())
        ((_, version, _),) = ends(capsys.readouterr().out)
        assert version == 3
        (ended,) = of(Ended, out / how)
        assert (ended.worker, ended.version) == (0, 3)
        what = script(tmp_path, join=f"out={str(out / how)!r}, resume=True")
        what.play(what.module())
        assert everything_once(out / how)
        assert ends(capsys.readouterr().out)[0][1] == 24


# ---------------------------------------------------------------- one that leaves


def check_left(folder: Path, found: list[tuple[int, int, str]]) -> None:
    """The other did the rest, and the one that left names the version that it printed."""
    (gone, version, total), (_, last, _) = found
    assert gone == 0
    (left,) = of(Left, folder)
    assert left.worker == 0
    assert not of(Lost, folder)
    assert everything_once(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["left"], summary["lost"]) == ([0], 0)
    assert last == summary["updates"] > version
    assert f"{seen_at(folder, version):.9f}" == total


def seen_at(folder: Path, version: int) -> float:
    """The sum over the parameters of a version, from a replay of the log."""
    sums: dict[int, float] = {}
    update = Parameters.update

    def watched(self: Parameters, contributions: Any) -> float:
        if not sums:
            sums[0] = total(self)
        rate = update(self, contributions)
        sums[len(sums)] = total(self)
        return rate

    def total(parameters: Parameters) -> float:
        views = {n: v for flat in parameters.flats for n, v in flat.views.items()}
        return sum(float(views[n].double().abs().sum()) for n in parameters.names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parameters, "update", watched)
        assert replay_script(Script(folder.parent / "train.py"), RunFolder(folder)).identical
    return sums[version]


LEAVE = "if run.rank == 0 and step == 3: break"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("after", ("bsp",)),
        ("before", ("easgd:3",)),
        ("after", ("bsp", "--via", "allreduce")),
        ("before", ("local:3", "--layout", LAYOUT)),
    ],
)
def test_a_break_is_one_worker_that_leaves(
    tmp_path: Path, where: str, words: tuple[Any, ...]
) -> None:
    out = tmp_path / "run"
    split = {"join": f"layout={LAYOUT!r}"} if LAYOUT in words else {}
    what = script(tmp_path, **{where: LEAVE}, **split)
    done = offbeat("-n", 2, "--emulate", "20ms", "--sync", *words, "--out", out, what.path)
    assert done.returncode == 0, done.stderr
    assert "worker 0 left before the end" in done.stdout
    assert "lost" not in done.stdout.replace("none lost", "")
    check_left(out, ends(done.stdout))


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("discipline", ["bsp", "asp", "local:3", "easgd:3"])
def test_a_break_in_virtual_time(tmp_path: Path, capsys: Any, discipline: str, where: str) -> None:
    out = tmp_path / "run"
    what = script(tmp_path, **{where: LEAVE})
    asked = {"discipline": discipline, "out": out}
    simulate_script(what, ob.Cluster.parse("20ms,25ms"), asked)
    check_left(out, ends(capsys.readouterr().out))


def test_all_leave(tmp_path: Path, capsys: Any) -> None:
    what = script(tmp_path, after="if step == 3: break")
    run = simulate_script(what, ob.Cluster.equal(2), {"discipline": "asp", "out": tmp_path / "sim"})
    assert run.summary().left == [0, 1]
    done = offbeat("-n", 2, "--sync", "asp", "--out", tmp_path / "local", what.path)
    assert done.returncode == 0, done.stderr
    assert "workers 0, 1 left before the end" in done.stdout
    what = script(tmp_path, after="if step == 3: break", join=f"out={str(tmp_path / 'alone')!r}")
    what.play(what.module())
    assert json.loads((tmp_path / "alone" / "summary.json").read_text())["left"] == [0]
    again = script(tmp_path)
    simulate_script(again, ob.Cluster.equal(1), {"out": None})
    for folder in ("local", "alone"):
        assert len(of(Left, tmp_path / folder)) == (1 if folder == "alone" else 2)
    done = offbeat("-n", 2, "--sync", "asp", "--out", tmp_path / "local", "--resume", again.path)
    assert done.returncode == 0, done.stderr
    assert everything_once(tmp_path / "local")


@pytest.mark.parametrize(
    ("after", "left", "ended_by"),
    [
        ("if step == 3: break", [0, 1], None),
        ("if run.rank == 1 and step == 3: run.stop()", [], 1),
    ],
)
def test_torchrun(tmp_path: Path, after: str, left: list[int], ended_by: int | None) -> None:
    out = tmp_path / "run"
    what = script(tmp_path, after=after, join=f"discipline='bsp', out={str(out)!r}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(what.path)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["left"], summary["ended_by"]) == (left, ended_by)
    assert 0 < summary["updates"] < 12


def test_one_that_fails_in_its_loop_and_comes_back_has_not_left(tmp_path: Path) -> None:
    out, mark = tmp_path / "run", tmp_path / "mark"
    fail = f"import pathlib; mark = pathlib.Path({str(mark)!r})\n" + " " * 8
    fail += "if run.rank == 1 and step == 2 and not mark.exists(): mark.touch(); 1 / 0"
    what = script(tmp_path, before=fail)
    done = offbeat("-n", 2, "--emulate", "50ms", "--sync", "bsp", "--out", out, what.path)
    assert done.returncode == 0, done.stderr
    assert [r.worker for r in of(Joined, out)].count(1) == 2
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["left"], summary["lost"]) == ([], 1)
    assert everything_once(out)


@pytest.mark.parametrize(
    ("leaving", "words"),
    [
        ("SystemExit(7)", "the script of worker 1 ended with exit status 7"),
        ("SystemExit('too bad')", "the script of worker 1 ended with too bad"),
    ],
)
def test_a_script_that_exits_after_its_loop_says_so(tmp_path: Path, leaving: str, words: str):
    what = script(tmp_path, end=f"if run.rank == 1: raise {leaving}")
    done = offbeat("-n", 2, what.path)
    assert done.returncode == 3, done.stdout
    assert words in done.stderr


@pytest.mark.parametrize(
    ("fail", "words"),
    [("1 / 0", "division by zero"), ("raise SystemExit(7)", "exit status 7, before the run")],
)
def test_one_that_fails_in_its_loop_and_is_not_back_in_time_has_not_left(
    tmp_path: Path, fail: str, words: str
) -> None:
    """The other does the rest, and the one that is started again finds nothing to do."""
    lines = [
        "if run.rank == 0 and step == 2: select.select([failing], [], [])",
        f"if run.rank == 1 and step == 2: os.eventfd_write(failing, 1); {fail}",
    ]
    before = f"\n{' ' * 8}".join(lines)
    what = script(tmp_path, before=before, end="if run.rank == 0: os.eventfd_write(over, 1)")
    # Whoever is forked after the failure goes on when worker 0 is through.
    held = """
import os
import select

failing, over = os.eventfd(0), os.eventfd(0)


def hold():
    if select.select([failing], [], [], 0)[0]:
        select.select([over], [], [])


os.register_at_fork(after_in_child=hold)
"""
    what.path.write_text(held + what.path.read_text())
    done = offbeat("-n", 2, "--sync", "asp", what.path)
    assert done.returncode == 3, done.stdout
    assert words in done.stderr


# ---------------------------------------------------------------- mistakes


def test_stop_belongs_into_the_loop(tmp_path: Path) -> None:
    with pytest.raises(ob.ConfigError, match=r"call it inside run\.batches"):
        ob.join().stop()
    for after, remedy in (
        ("run.stop()", "call it before break"),
        ("optimizer.step()", "inside"),
    ):
        what = script(tmp_path, after="if step == 3: break", end=after)
        with pytest.raises(ob.ConfigError, match=remedy):
            simulate_script(what, ob.Cluster.equal(1), {})


def test_stop_after_the_end_is_no_mistake(tmp_path: Path) -> None:
    run = simulate_script(script(tmp_path, end="run.stop()"), ob.Cluster.equal(1), {})
    assert run.summary().ended_by is None
    assert torch.isfinite(next(run.model.parameters())).all()
