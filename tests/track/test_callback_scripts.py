"""Callbacks of scripts, given to `ob.join`, and what callbacks are told of a run's settings."""

import runpy
from pathlib import Path

import pytest

from offbeat.cli import main
from tests.contract.real import held_at
from tests.track.common import Memory, StopAt, small_run

SCRIPT = """
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset
import offbeat as ob

class Lines(ob.Callback):
    def on_begin(self, begin):
        self.file = open("lines", "a")
        print("begin", begin.workers, begin.settings["discipline"], file=self.file)

    def on_epoch(self, epoch):
        print("epoch", epoch.epoch, epoch.samples, file=self.file)

    def on_end(self, end):
        print("end", end.finished, file=self.file)
        self.file.close()

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
with ob.join(discipline="bsp", listeners=[Lines()]) as run:
    model = run.replica(nn.Linear(3, 2))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.05))
    for x, y in run.batches(data, batch_size=4, epochs=2):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("engine", ["alone", "sim", "local"])
def test_a_script_brings_its_own_callback(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    if engine == "alone":
        runpy.run_path("train.py", run_name="__main__")
    else:
        assert main(["run", "-n", "2", "--engine", engine, "train.py"]) == 0
    workers = 1 if engine == "alone" else 2
    assert Path("lines").read_text().splitlines() == [
        f"begin {workers} bsp",
        "epoch 0 48",
        "epoch 1 96",
        "end True",
    ]


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_settings_are_those_of_the_folder(engine: str, tmp_path: Path) -> None:
    memory = Memory()
    small_run(memory, engine=engine, out=tmp_path / "run")
    (begin,) = memory.begun
    assert (begin.settings["engine"], begin.settings["discipline"]) == (engine, "asp")
    assert memory.ends[0].summary.engine == engine


def test_a_local_run_that_goes_on_counts_exactly(tmp_path: Path) -> None:
    out, memory = tmp_path / "run", Memory()
    stop = StopAt(20, RuntimeError("on purpose"))
    with held_at(20), pytest.raises(RuntimeError):
        small_run(stop, engine="local", out=out, checkpoint_every=4)
    run = small_run(memory, engine="local", out=out, checkpoint_every=4, resume=True)
    assert memory.updates[-1].samples == run.summary().samples == 96
