"""Scripts on Ray: the launcher is the store, actors play them from the first line to the last."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.engine.ray.cluster import RayCluster
from offbeat.engine.ray.scripts import ScriptTask
from offbeat.engine.script import Script
from offbeat.log.log import read
from offbeat.log.records import Updated
from tests.engine.ray.common import nothing_held

SCRIPT = """
import sys
from functools import partial
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import offbeat as ob
chance = torch.Generator().manual_seed(7)
x = torch.randn(24, 6, generator=chance)
torch.manual_seed(11)
with ob.join(discipline="asp", hash_every=1) as run:
    model = run.replica(torch.nn.Linear(6, 2))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.02))
    for features, target in run.batches(TensorDataset(x, x[:, :2]), batch_size=4, epochs=2):
        F.mse_loss(model(features), target).backward()
        optimizer.step()
        optimizer.zero_grad()
with open(f"{sys.argv[1]}.{run.rank}", "w") as out:
    print(run.version, file=out)
if sys.argv[2:]:
    raise ValueError("after the loop")
"""


@pytest.fixture
def folder(
    tmp_path: Path, ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    with nothing_held(ray_cluster):
        yield tmp_path


RUN = ["run", "--engine", "ray", "--worker-resources", '{"CPU": 0.25}']


def test_a_script_takes_part_and_goes_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [*RUN, "-n", "2", "--sync", "ssp:2", "--out", "run", "train.py", "said"]
    assert main(words) == 0
    updates = sum(isinstance(record, Updated) for record in read(folder / "run" / "log.jsonl"))
    for number in range(2):
        assert (folder / f"said.{number}").read_text() == f"{updates}\n"
    assert main(["run", "--replay", "run", "train.py", "replayed"]) == 0
    assert f"identical at all {updates} versions" in capfd.readouterr().out


def test_what_fails_behind_the_loop_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "-n", "1", "train.py", "said", "fail"]) == 3
    assert "worker 0 failed: ValueError: after the loop" in capfd.readouterr().err


def test_who_waits_for_room_holds_up_nobody_that_is_through(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The only worker there is leaves its loop; for the other one there is no place."""
    script = folder / "train.py"
    step = "        optimizer.zero_grad()\n"
    script.write_text(SCRIPT.replace(step, f"{step}        break\n"))
    words = ["run", "--engine", "ray", "--worker-resources", '{"CPU": 3}', "-n", "1:2"]
    assert main([*words, "train.py", "said"]) == 0
    assert (folder / "said.0").is_file()
    assert not (folder / "said.1").exists()


def test_a_host_without_the_file_gets_its_text(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print()")
    task = ScriptTask.of(Script(path, ("a",)))
    with task.here() as script:
        assert script.path == path
    path.write_text("another")
    with task.here() as script:
        assert script.path.read_text() == "print()"
        assert (script.path.name, script.arguments) == ("train.py", ("a",))
    assert not script.path.exists()
