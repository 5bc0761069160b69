"""What a script keeps beside its model comes back as it was, and nothing else is taken."""

import copy
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.join import join
from tests.contract.common import assert_same_bits, problem
from tests.engine.local.test_scripts import offbeat

ADAM = partial(torch.optim.AdamW, lr=0.01)


class Average:
    """What a user would write: an exponential moving average, with a state of its own."""

    def __init__(self, model: torch.nn.Module):
        self.model = copy.deepcopy(model)
        self.count = 0

    def update(self, model: torch.nn.Module) -> None:
        self.count += 1
        with torch.no_grad():
            for mine, now in zip(self.model.parameters(), model.parameters(), strict=True):
                mine.lerp_(now, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.count = state["count"]


def averaged(out: Path, stop: int = -1, **more: Any) -> tuple[Average, dict[str, Any]]:
    what = problem()
    best: dict[str, Any] = {"score": float("-inf"), "seen": ()}
    with join(out=out, **more) as run:
        model = run.replica(what.model)
        optimizer = run.optimizer(ADAM(model.parameters()))
        average = Average(model)
        run.state(average=average)
        run.state(best=best, shared=True)
        for x, y in run.batches(what.data, batch_size=4, epochs=2):
            if average.count == stop:
                raise KeyboardInterrupt
            optimizer.zero_grad()
            loss = what.loss(model(x), y)
            loss.backward()
            optimizer.step()
            average.update(model)
            best["score"] = max(best["score"], -loss.item())
            best["seen"] = (*best["seen"], run.version)
    return average, best


def test_what_a_script_keeps_is_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole, best = averaged(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        averaged(tmp_path / "run", stop=7)
    again, later = averaged(tmp_path / "run", resume=True)
    assert again.count == whole.count == 12
    assert_same_bits(again.model, whole.model)
    assert later == best
    assert later["seen"] == tuple(range(1, 13))
    done, kept = averaged(tmp_path / "run", resume=True)  # with nothing left to do
    assert (done.count, kept) == (12, best)
    assert_same_bits(done.model, whole.model)


def test_what_was_kept_later_than_the_checkpoint_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        averaged(tmp_path / "run", stop=7)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    shutil.rmtree(checkpoints[-1])  # the run goes back to the end of its first epoch
    again, later = averaged(tmp_path / "run", resume=True)
    assert again.count == 12
    assert later["seen"] == tuple(range(1, 13))


def test_what_cannot_be_kept_is_refused_before_the_first_step() -> None:
    run = join()
    model = run.replica(problem().model)
    with pytest.raises(ob.ConfigError, match="a dict, or an object with state_dict"):
        run.state(best=1.0)  # type: ignore[arg-type]
    with pytest.raises(ob.ConfigError, match=r"cannot keep best\.seen, a set"):
        run.state(best={"seen": {1, 2}})
    with pytest.raises(ob.ConfigError, match="keys are text or whole numbers"):
        run.state(best={(1, 2): 3})  # type: ignore[dict-item]
    run.state(best={"score": 1.0})
    with pytest.raises(ob.ConfigError, match="has best already"):
        run.state(best={}, shared=True)
    with pytest.raises(ob.ConfigError, match="nothing to keep, or nowhere"):
        run.save_state()
    run.optimizer(ADAM(model.parameters()))
    run.batches(problem().data, batch_size=4)
    with pytest.raises(ob.ConfigError, match=r"before run\.batches"):
        run.state(more={})


def test_other_names_than_were_kept(tmp_path: Path) -> None:
    averaged(tmp_path / "run")
    run = join(out=tmp_path / "run", resume=True)
    model = run.replica(problem().model)
    run.optimizer(ADAM(model.parameters()))
    run.state(other={})
    batches = run.batches(problem().data, batch_size=4, epochs=2)
    with pytest.raises(ob.CheckpointError, match="kept average and the script has other"):
        next(batches)
    run._seat.left(None)  # type: ignore[union-attr]


KILLED = """
import os, pathlib, signal
import torch
from torch.utils.data import TensorDataset
import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(160, 3), torch.randn(160, 2))
count, best, once = {"steps": 0, "mean": torch.zeros(2)}, {"by": -1}, pathlib.Path(MARK)
with ob.join(discipline="bsp", checkpoint_every=1) as run:
    model = run.replica(torch.nn.Linear(3, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    run.state(count=count)
    run.state(best=best, shared=True)
    first = True
    for x, y in run.batches(data, batch_size=4):
        if first:
            print(f"worker {run.rank} begins with {count['steps']} and {best['by']}\\n", end="")
            first = False
        if run.rank == 1 and count["steps"] == 5 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        count["steps"] += 1
        count["mean"] = count["mean"] + 1
        best["by"] = run.rank
told = f"{count['steps']} {count['mean'].tolist()}"
print(f"worker {run.rank} ends with {told}\\n", end="", flush=True)
"""


def test_a_worker_that_was_killed_has_its_own_and_what_is_for_all(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED.replace("MARK", repr(str(tmp_path / "killed"))))
    done = offbeat("run", "-n", 2, "--out", tmp_path / "run", script)
    assert done.returncode == 0, done.stderr
    begun = re.findall(r"worker (\d) begins with (\d+) and (-?\d)", done.stdout)
    assert sorted(begun) == [("0", "0", "-1"), ("1", "0", "-1"), ("1", "5", "0")]
    ends = re.findall(r"worker 1 ends with (\d+) \[(\d+)\.0", done.stdout)
    assert len(ends) == 1
    assert int(ends[0][0]) == int(ends[0][1]) > 5
