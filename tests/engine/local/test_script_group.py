"""A script whose replicas are several processes: its loop as it was, the bits of one process."""

import json
import os
import re
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from offbeat.log.log import read
from offbeat.log.records import Joined

SCRIPT = """
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
print("once")
data = TensorDataset(torch.randn(46, 3), torch.randn(46, 2))
with ob.join(layout="pp=3,microbatches=2,split=count") as run:
    net = nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2)
    )
    model = run.replica(net)
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    for x, y in run.batches(data, batch_size=8, epochs=2):
        loss = nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
        loss.backward()
        run.record(loss + 0.0 * torch.rand(()))
        HERE
        optimizer.step()
        optimizer.zero_grad()
        if run.version == 4:
            model.eval()
            with torch.no_grad():
                model(data.tensors[0])
            model.train()
model.eval()
print(f"end {run.rank} {run.version} {float(model(torch.ones(2, 3)).sum()):.9f}", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("HERE", "pass"))
    return path


def offbeat(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("discipline", ["asp", "easgd:2"])
def test_a_split_script_is_replayed_by_one_process(
    script: Path, tmp_path: Path, discipline: str
) -> None:
    out = tmp_path / "run"
    done = offbeat("run", "-n", 2, "--sync", discipline, "--out", out, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("once") == 1
    ends = re.findall(r"end (\d) (\d+) (-?\d\.\d+)", done.stdout)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1"]
    assert len({total for _, _, total in ends}) == 1
    config = json.loads((out / "run.json").read_text())
    assert config["layout"] == "pp=3,schedule=gpipe,microbatches=2,split=1+3"
    again = offbeat("run", "--replay", out, script)
    assert again.returncode == 0, again.stderr
    assert "identical at all" in again.stdout


def test_one_process_simulates_the_same_bits(script: Path) -> None:
    found = []
    for words in (["-n", 2], ["--engine", "sim", "-n", 2]):
        done = offbeat("run", "--json", "--sync", "bsp", *words, script)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["summary"]["parameter_hash"])
    assert found[0] == found[1]


def test_a_replica_that_loses_a_process_is_forked_again(script: Path, tmp_path: Path) -> None:
    mark, out = tmp_path / "mark", tmp_path / "run"
    kill = f"import os, pathlib; mark = pathlib.Path({str(mark)!r})\n" + " " * 8
    kill += "if run.rank == 1 and run.version > 2 and not mark.exists():\n" + " " * 12
    kill += "mine = pathlib.Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children')\n" + " " * 12
    kill += "mark.touch(); os.kill(int(mine.read_text().split()[-1]), 9)"
    script.write_text(SCRIPT.replace("HERE", kill))
    done = offbeat("run", "-n", 2, "--emulate", "50ms", "--sync", "asp", "--out", out, script)
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    joins = [r.worker for r in read(out / "log.jsonl") if isinstance(r, Joined)]
    assert joins.count(1) == 2
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [46, 46]
    assert offbeat("run", "--replay", out, script).returncode == 0


def test_a_mistake_in_a_later_stage_is_told_with_the_line(script: Path) -> None:
    script.write_text(
        SCRIPT.replace("HERE", "pass").replace("nn.Linear(6, 2)\n", "nn.Linear(5, 2)\n")
    )
    done = offbeat("run", "-n", 1, script)
    assert done.returncode == 3, done.stderr
    assert "process 2 of its replica" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_leaves_early_takes_its_processes_along(script: Path) -> None:
    leave = "import os, pathlib; me = os.getpid()\n" + " " * 8
    leave += "print('mine', pathlib.Path(f'/proc/{me}/task/{me}/children').read_text())\n" + " " * 8
    leave += "if run.version > 3: break"
    script.write_text(SCRIPT.replace("HERE", leave))
    done = offbeat("run", "-n", 1, script)
    assert done.returncode == 0, done.stderr
    assert "end 0" in done.stdout
    others = re.findall(r"mine (\d+) (\d+)", done.stdout)[0]
    for other in map(int, others):
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(other)
            assert select.select([handle], [], [], 60)[0]
            os.close(handle)


def test_a_mistake_in_the_leaders_own_stage_is_told_while_others_wait(script: Path) -> None:
    script.write_text(SCRIPT.replace("HERE", "pass").replace("nn.Linear(3, 6)", "nn.Linear(4, 6)"))
    done = offbeat("run", "-n", 1, script)
    assert done.returncode == 3, done.stderr
    assert "worker 0 failed: RuntimeError" in done.stderr
