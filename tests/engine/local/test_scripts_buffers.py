"""A script's buffers outlive its process: killed, given up or resumed, it goes on with the mean."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import offbeat as ob
from offbeat.engine.script import Script
from offbeat.engine.sim.compute_times import Constant
from offbeat.engine.sim.scripts import replay_script, simulate_script
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.log import read
from offbeat.log.records import Joined

STEPS = 120
TEXT = """
import os, pathlib
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(20 + torch.randn(48, 3), torch.arange(48) % 2)
mark = pathlib.Path(os.environ.get("MARK", "/"))
with ob.join(JOIN) as run:
    model = run.replica(torch.nn.Sequential(torch.nn.BatchNorm1d(3, momentum=0.05),
                                            torch.nn.Linear(3, 2)))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.01))
    for x, y in run.batches(data, batch_size=4, epochs=10):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.record(loss)
        if run.version == 110 and not mark.exists():
            mark.touch()
            DIE
        optimizer.step()
        optimizer.zero_grad()
print(f"mean {float(model[0].running_mean.mean()):.2f} after {int(model[0].num_batches_tracked)}")
"""


def script(folder: Path, join: str = "", die: str = "pass") -> Path:
    path = folder / "train.py"
    path.write_text(TEXT.replace("JOIN", join).replace("DIE", die))
    return path


def played(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"MARK": str(folder / "mark")},
    )


def check(printed: str) -> None:
    found = [line.split() for line in printed.splitlines() if line.startswith("mean ")]
    assert found, printed
    assert all(abs(float(words[1]) - 20) < 0.5 for words in found), printed
    assert all(int(words[3]) == STEPS for words in found), printed


@pytest.mark.parametrize("layout", [[], ["--layout", "pp=2,split=1,microbatches=2"]])
def test_a_killed_worker(tmp_path: Path, layout: list[str]) -> None:
    out = tmp_path / "run"
    path = script(tmp_path, die="os.kill(os.getpid(), 9)")
    words = ("-m", "offbeat", "run", "-n", 1, "--sync", "asp", *layout, "--out", out, path)
    done = played(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert sum(isinstance(record, Joined) for record in read(out / "log.jsonl")) == 2
    if not layout:  # where batch norm sees microbatches it counts them
        check(done.stdout)
    assert abs(float(done.stdout.split("mean ")[1].split()[0]) - 20) < 0.5


def test_alone_and_resumed(tmp_path: Path) -> None:
    settings = f"out={str(tmp_path / 'run')!r}, checkpoint_every=5, resume=True"
    path = script(tmp_path, settings, "raise RuntimeError('somebody pulled the plug')")
    assert "somebody pulled the plug" in played(tmp_path, path).stderr
    done = played(tmp_path, path)
    assert done.returncode == 0, done.stderr
    check(done.stdout)


def test_in_virtual_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = ob.Machine(Constant(0.01), failures=(ob.Failure(1.105, returns_after=0.02),))
    cluster, what = ob.Cluster((failing,), patience=0.01), Script(script(tmp_path))
    run = simulate_script(what, cluster, {"discipline": "asp", "out": tmp_path / "run"})
    assert run.summary().lost == 1
    check(capsys.readouterr().out)
    assert replay_script(what, RunFolder(tmp_path / "run")).identical
