"""What a loop writes into its parameters stays in that worker until its next pull, everywhere."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.engine.script import Script
from offbeat.engine.sim.scripts import replay_script, simulate_script
from offbeat.folder.checkpoint import RunFolder

SCRIPT = """
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
with ob.join(JOIN) as run:
    model = run.replica(net)
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    for x, y in run.batches(data, batch_size=4, epochs=2):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        run.record(loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            WRITE
"""
# In place, as a clamp is; or other memory, as when an average is swapped in for a test.
WRITES = {
    "in place": "[p.mul_(1.1 + run.rank).add_(0.1) for p in model.parameters()]",
    "by swapping": "for p in model.parameters(): p.data = p.data * (1.1 + run.rank) + 0.1",
}
NONE = "pass"
LAYOUT = "pp=2,microbatches=2,split=count"


def script(folder: Path, write: str, join: str = "") -> Script:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("WRITE", write).replace("JOIN", join))
    return Script(path)


def local(what: Script, out: Path, *words: object) -> str:
    """The hash of a run of real processes, which its replay has found again."""
    mine = [*map(str, words), "--out", str(out), str(what.path)]
    command = [sys.executable, "-m", "offbeat", "run", "--json", "-n", "2", "--sync", *mine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = replay_script(what, RunFolder(out))
    assert found.identical, found.difference
    assert found.compared > 0
    return str(json.loads(done.stdout)["summary"]["parameter_hash"])


def simulated(what: Script, discipline: str) -> str:
    return simulate_script(what, ob.Cluster.equal(2), {"discipline": discipline}).parameter_hash


def test_lock_step_on_real_processes_is_what_is_simulated(tmp_path: Path) -> None:
    untouched = simulated(script(tmp_path, NONE), "bsp")
    what = script(tmp_path, WRITES["in place"])
    there = simulated(what, "bsp")
    assert local(what, tmp_path / "store", "bsp", "--shards", 2) == there != untouched
    assert local(what, tmp_path / "meeting", "bsp", "--via", "allreduce") == there


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("by swapping", ("soft:2",)),
        ("in place", ("local:2", "--via", "allreduce")),
        ("in place", ("easgd:2",)),
        ("in place", ("easgd:2", "--layout", LAYOUT)),
        ("in place", ("bsp", "--layout", LAYOUT)),
        ("by swapping", ("local:2", "--layout", LAYOUT)),
    ],
)
def test_a_run_with_writes_replays_to_the_bit(
    tmp_path: Path, how: str, words: tuple[str, ...]
) -> None:
    layout = f"layout={LAYOUT!r}" if LAYOUT in words else ""
    local(script(tmp_path, WRITES[how], layout), tmp_path / "run", *words)


@pytest.mark.parametrize("discipline", ["bsp", "soft:1", "local:2", "easgd:2"])
@pytest.mark.parametrize("how", WRITES)
def test_alone_means_the_same(tmp_path: Path, how: str, discipline: str) -> None:
    out = tmp_path / "run"
    what = script(tmp_path, WRITES[how], f"discipline={discipline!r}, out={str(out)!r}")
    what.play(what.module())
    found = replay_script(what, RunFolder(out))
    assert found.identical, found.difference
    one = simulate_script(what, ob.Cluster.equal(1), {"out": None})
    assert json.loads((out / "summary.json").read_text())["parameter_hash"] == one.parameter_hash


SEEN = """if run.version == 3:
                print("kept", bool((model[0].weight == 3.0).all()))
            HERE"""


@pytest.mark.parametrize(
    "write",
    ["model[0].weight.fill_(3.0)", "model[0].weight.data = torch.full((4, 3), 3.0)"],
)
def test_a_write_is_gone_with_the_next_pull(tmp_path: Path, capsys: Any, write: str) -> None:
    what = script(tmp_path, SEEN.replace("HERE", write))
    simulate_script(what, ob.Cluster.equal(1), {"discipline": "bsp"})
    assert "kept False" in capsys.readouterr().out
