"""What a script's loss is computed from: parameters that no worker would share are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

import offbeat as ob
from offbeat.engine.script import Script
from offbeat.engine.sim.scripts import simulate_script

SCRIPT = """
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 3), torch.randn(16, 2))
net, other = nn.Linear(3, 2), nn.Linear(2, 2)
with ob.join(discipline="asp") as run:
    model = run.replica(REPLICA)
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1))
    for x, y in run.batches(data, batch_size=4):
        x.requires_grad_()
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = nn.functional.mse_loss(other(out), y) + (slope**2).mean()
        loss.backward()
        run.record(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
WORDS = r"parameter of shape \(2, 2\) that is not the replica's.*run.replica\(nn.ModuleList"


def script(folder: Path, replica: str) -> Script:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("REPLICA", replica))
    return Script(path)


def test_parameters_beside_the_replica_are_refused_in_virtual_time(tmp_path: Path) -> None:
    with pytest.raises(ob.ConfigError, match=WORDS):
        simulate_script(script(tmp_path, "net"), ob.Cluster.equal(2), {})


def test_parameters_beside_the_replica_are_refused_on_real_processes(tmp_path: Path) -> None:
    what = script(tmp_path, "net")
    command = [sys.executable, "-m", "offbeat", "run", "-n", "2", str(what.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert "that is not the replica's" in done.stderr


@pytest.mark.parametrize(("replica", "workers"), [("nn.ModuleList([net, other])", 2), ("net", 1)])
def test_they_may_be_in_it_or_one_worker_has_them(
    tmp_path: Path, replica: str, workers: int
) -> None:
    """Alone an optimiser of the script's own is as good as in plain PyTorch."""
    run = simulate_script(script(tmp_path, replica), ob.Cluster.equal(workers), {})
    assert run.summary().updates == 4
