"""Schedules that are shorter or longer than a run, and the rates that a script reads."""

import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import offbeat as ob
from tests.contract import common
from tests.contract.common import SGD, assert_same_bits, check_run, optimizer_for, problem, run

SHORT = ob.Schedule(partial(OneCycleLR, max_lr=0.1, total_steps=4), per="version")


def held(params: Any, total: int = 4) -> torch.optim.Optimizer:
    """A rule that moves a cycle on after each step, and stays where that ends."""
    rule = torch.optim.SGD(params, lr=0.05)
    scheduler = OneCycleLR(rule, max_lr=0.1, total_steps=total)

    def move(*_: Any) -> None:
        if scheduler.last_epoch < total - 1:
            scheduler.step()

    rule.register_step_post_hook(move)
    return rule


@pytest.mark.filterwarnings("ignore:the schedule has 4 steps")
@pytest.mark.parametrize("name", ["bsp", "asp", "soft:2", "local:2", "easgd:2", "asup", "gossip"])
def test_one_of_fixed_length_ends_with_its_last_rate(engine, name, tmp_path):
    what = problem(samples=40)
    run(
        engine, what, name, workers=2, schedule=SHORT, optimizer=optimizer_for(name, SGD),
        out=tmp_path / "run",
    )  # fmt: skip
    check_run(tmp_path / "run", what, schedule=SHORT)


def test_one_worker_has_the_rates_of_plain_pytorch(engine):
    what = problem(samples=24)
    with pytest.warns(UserWarning, match="its last rate holds from there on: pass total_steps=12"):
        got = run(engine, what, "asp", workers=1, schedule=SHORT, optimizer=SGD)
    assert_same_bits(got.model, common.plain(what, held))


@pytest.mark.parametrize(
    ("name", "workers", "fits"),
    [("bsp", 3, 4), ("asp", 3, 12), ("soft:2", 3, 6), ("local:3", 2, 2), ("bsp:backup=1", 3, 6)],
)
def test_a_length_that_does_not_fit_is_told_before_the_run(sim_only, name, workers, fits):
    what = problem(samples=24)

    def asked(total: int) -> None:
        schedule = ob.Schedule(partial(OneCycleLR, max_lr=0.1, total_steps=total), per="version")
        run(sim_only, what, name, workers=workers, schedule=schedule, optimizer=SGD)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked(fits)
    with pytest.warns(UserWarning, match=f"it will not be over: pass total_steps={fits}"):
        asked(2 * fits + workers)
    if fits > 2:
        with pytest.warns(UserWarning, match=f"holds from there on: pass total_steps={fits}"):
            asked(fits - 1)


# ---------------------------------------------------------------- what a script reads

SCRIPT = """
from functools import partial

import torch
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
halve = ob.Schedule(partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), per="PER")
with ob.join() as run:
    model = run.replica(torch.nn.Linear(3, 2))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=1.0), schedule=halve)
    assert optimizer.param_groups[0]["lr"] == 1.0
    for x, y in run.batches(data, batch_size=4, epochs=3):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        rate = optimizer.param_groups[0]["lr"]
        print(f"<rate {run.version} {run.epoch} {rate}>", flush=True)
        optimizer.step()
        optimizer.zero_grad()
"""
HOSTS = {
    "alone": [sys.executable],
    "sim": [sys.executable, "-m", "offbeat", "run", "--engine", "sim", "-n", "2"],
    "local": [sys.executable, "-m", "offbeat", "run", "-n", "2"],
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("sync", ["bsp", "local:2"])
def test_a_script_reads_the_rate_in_force(host: str, sync: str, tmp_path: Path) -> None:
    for per in ("version", "epoch"):
        path = tmp_path / f"{per}.py"
        text = SCRIPT.replace("PER", per)
        if host == "alone":
            text = text.replace("ob.join()", f"ob.join(discipline={sync!r})")
        path.write_text(text)
        words = [] if host == "alone" else ["--sync", sync]
        done = subprocess.run(
            [*HOSTS[host], *words, str(path)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        told = re.findall(r"<rate (\d+) (\d+) ([\d.e-]+)>", done.stdout)
        assert len(told) == 18
        for version, epoch, rate in told:
            if per == "version":
                assert float(rate) == 0.5 ** int(version)
            else:  # an epoch is over for the rule when its last sample has been applied
                assert float(rate) in (0.5 ** int(epoch), 0.5 ** max(0, int(epoch) - 1))
        assert len({rate for _, _, rate in told}) >= 2
