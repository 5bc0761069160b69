"""A script in virtual time: the same bits again, one thread at a time, and all of them ended."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.engine.script import Script
from offbeat.engine.sim.scripts import replay_script, simulate_script
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.log import read
from offbeat.log.records import Joined, Pulled, Updated
from tests.contract.common import NAMES, Records, named, optimizer_for, problem

LOOP = """
import random
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob

assert __name__ == "__main__"
BEFORE
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = TensorDataset(
        torch.randn(24, 3, dtype=torch.float64), torch.randn(24, 2, dtype=torch.float64)
    )
with ob.join(seed=7) as run:
    model = run.replica(net)
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.05, momentum=0.5))
    for step, (x, y) in enumerate(run.batches(data, batch_size=4, epochs=2)):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        run.record(loss)
        IN_LOOP
        optimizer.step()
        optimizer.zero_grad()
AFTER
"""
Capture = pytest.CaptureFixture[str]
CLUSTER = ob.Cluster.parse("20ms,25ms,80ms")
LAGGING = ob.Cluster.from_toml_text(
    """
[[worker]]
compute = "20ms"
latency = "1ms"
count = 2
"""
)
TROUBLE = ob.Cluster.from_toml_text(
    """
patience = "15ms"
[[worker]]
compute = "10ms"
failures = [{ at = "35ms", returns_after = "20ms" }]
[[worker]]
compute = "12ms"
pauses = [{ at = "15ms", lasting = "30ms" }]
[[worker]]
compute = "25ms"
failures = [{ at = "30ms" }]
[[worker]]
compute = "11ms"
joins_at = "15ms"
"""
)


@pytest.fixture(autouse=True)
def nobody_stays() -> Any:
    """Whatever a test does, its threads are gone when it is over."""
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("worker ")]


def script(folder: Path, before: str = "", in_loop: str = "pass", after: str = "") -> Script:
    path = folder / "loop.py"
    text = LOOP.replace("BEFORE", before).replace("IN_LOOP", in_loop).replace("AFTER", after)
    path.write_text(text)
    return Script(path)


def simulate(what: Script, discipline: Any = "asp", cluster: Any = CLUSTER, **asked: Any) -> ob.Run:
    return simulate_script(what, cluster, {"discipline": discipline, **asked})


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("name", NAMES)
def test_every_discipline_is_what_a_function_trains(tmp_path: Path, name: str) -> None:
    discipline = named(3)[name]
    run = simulate(script(tmp_path), discipline)
    same = ob.train(
        *problem(), discipline=discipline, optimizer=optimizer_for(discipline), batch_size=4,
        epochs=2, seed=7, engine="sim", cluster=CLUSTER,
    )  # fmt: skip
    assert run.summary() == same.summary()


def test_a_turn_in_a_script_is_one_in_a_function(tmp_path: Path) -> None:
    course = "switch:bsp,asp,at=30%,ssp:1,at=60%"
    run = simulate(script(tmp_path), course, out=tmp_path / "run")
    same = ob.train(
        *problem(), discipline=course, optimizer=optimizer_for(course), batch_size=4,
        epochs=2, seed=7, engine="sim", cluster=CLUSTER,
    )  # fmt: skip
    assert run.summary() == same.summary()
    assert [turn.discipline for turn in run.summary().turns] == ["asp", "ssp:1"]
    assert replay_script(script(tmp_path), RunFolder(tmp_path / "run")).identical


@pytest.mark.parametrize("cluster", [CLUSTER, TROUBLE], ids=["calm", "trouble"])
def test_same_seed_same_log_and_replay(tmp_path: Path, cluster: ob.Cluster) -> None:
    what = script(tmp_path, in_loop="x.add_(torch.rand(1) * random.random() * np.random.rand())")
    logs = []
    for name in ("one", "two"):
        simulate(what, "ssp:2", cluster, out=tmp_path / name)
        logs.append((tmp_path / name / "log.jsonl").read_bytes())
    assert logs[0] == logs[1]
    found = replay_script(what, RunFolder(tmp_path / "one"))
    assert found.identical
    assert found.compared == found.versions > 0
    simulate(what, "ssp:2", cluster, out=tmp_path / "other", seed=8)
    assert (tmp_path / "other" / "log.jsonl").read_bytes() != logs[0]


def test_a_replay_notices_another_script(tmp_path: Path) -> None:
    simulate(script(tmp_path), out=tmp_path / "run")
    other = script(tmp_path, in_loop="model[0].weight.grad.mul_(1.5)")
    found = replay_script(other, RunFolder(tmp_path / "run"))
    assert not found.identical
    assert found.difference is not None
    assert found.difference.version == 1


def test_the_worker_that_failed_begins_again(tmp_path: Path, capsys: Capture) -> None:
    records = Records()
    what = script(tmp_path, before="print('begins')", after="print('ends')")
    run = simulate_script(what, TROUBLE, {"discipline": "asp"}, [records])
    words = capsys.readouterr().out.split()
    # One failed and came back, one was given up and came back, one failed for good.
    assert words.count("begins") == len(list(records.of(Joined))) == 6
    assert words.count("ends") == 3
    assert all(row == run.summary().ledger[0] for row in run.summary().ledger)
    assert run.summary().ledger[0]["applied"] == 24


# ---------------------------------------------------------------- what each thread sees


def test_each_thread_has_its_own_globals_and_chance(tmp_path: Path, capsys: Capture) -> None:
    """Between two batches a worker's random numbers go on where its own thread left them."""
    what = script(
        tmp_path,
        before="first = torch.rand(1).item(), random.random(), np.random.rand(); count = 0",
        in_loop=(
            "import sys; count += 1; assert count == step + 1; "
            "assert sys.modules['__main__'].run is run; "
            "kept = torch.get_rng_state(), random.getstate(), str(np.random.get_state()); "
            "optimizer.step(); "
            "assert torch.equal(kept[0], torch.get_rng_state()); "
            "assert kept[1:] == (random.getstate(), str(np.random.get_state())); "
            "print(run.rank, first, torch.rand(1).item()); "
            "optimizer.zero_grad(); continue"
        ),
    )
    simulate(what)
    once = capsys.readouterr().out.splitlines()
    assert len({line.split(" ", 1)[1].rpartition(" ")[0] for line in once}) == 1
    assert len({line.rpartition(" ")[2] for line in once}) == len(once) == 12
    assert {line[0] for line in once} == {"0", "1", "2"}


@pytest.mark.parametrize("discipline", ["local:3", "asp"])
def test_after_the_loop_everyone_has_the_final_parameters(
    tmp_path: Path, capsys: Capture, discipline: str
) -> None:
    what = script(
        tmp_path,
        after="print(run.rank, run.version, [p.tolist() for p in model.parameters()])",
    )
    run = simulate(what, discipline)
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines] == ["0", "1", "2"]
    final = [p.tolist() for p in run.model.parameters()]
    assert all(line.endswith(f" {run.summary().updates} {final}") for line in lines)


def test_after_a_step_the_model_holds_what_was_pulled(tmp_path: Path, capsys: Capture) -> None:
    what = script(
        tmp_path,
        in_loop=(
            "was = run.version; optimizer.step(); "
            "print(run.rank, was, run.version); "
            "optimizer.zero_grad(); continue"
        ),
    )
    records = Records()
    simulate_script(what, CLUSTER, {"discipline": "asp"}, [records])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for worker in range(3):
        mine = [(int(was), int(now)) for rank, was, now in rows if int(rank) == worker]
        pulled = [r.version for r in records.of(Pulled) if r.worker == worker]
        assert [was for was, _ in mine] == pulled[: len(mine)]
        assert [now for _, now in mine[:-1]] == [was for was, _ in mine[1:]]
        assert mine[-1][1] == 12


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("where", ["before", "in_loop", "after"])
def test_an_error_in_a_thread_comes_out_once(tmp_path: Path, where: str) -> None:
    text = "1 / 0 if run.rank == 1 and step == 1 else None"
    if where == "before":
        text = "1 / 0"
    elif where == "after":
        text = "1 / 0 if run.rank == 1 else None"
    with pytest.raises(ZeroDivisionError):
        simulate(script(tmp_path, **{where: text}))


def test_parameters_that_come_late_are_refused(tmp_path: Path) -> None:
    what = script(tmp_path, in_loop="model[0] = nn.Linear(3, 4).double()")
    with pytest.raises(ob.ConfigError, match=r"'0\.weight' is new, and the run would not train it"):
        simulate(what)


def test_leaving_after_the_loop_is_fine(tmp_path: Path) -> None:
    simulate(script(tmp_path, after="raise SystemExit"))
    with pytest.raises(SystemExit, match="3"):
        simulate(script(tmp_path, after="raise SystemExit(3)"))


def test_a_script_without_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("import offbeat\n")
    with pytest.raises(ob.ConfigError, match=r"ended without a loop: write for x, y in"):
        simulate(Script(path))


def test_workers_that_disagree(tmp_path: Path) -> None:
    path = script(tmp_path).path
    path.write_text(path.read_text().replace("batch_size=4", "batch_size=4 + run.rank"))
    with pytest.raises(ob.ConfigError, match=r"worker 1: batch_size is 5 here and 4"):
        simulate(Script(path))


def test_hogwild_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ob.ConfigError, match="engine='local'"):
        simulate(script(tmp_path), "hogwild")


@pytest.mark.parametrize("what", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("discipline", ["ssp:2", "local:2", "easgd:2", "soft:2"])
def test_ctrl_c_saves_and_the_run_goes_on(tmp_path: Path, discipline: str, what: str) -> None:
    simulate(script(tmp_path), discipline, LAGGING, out=tmp_path / "whole")
    stop = f"import signal; run.rank == 1 and step == 1 and signal.raise_signal(signal.{what})"
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        simulate(script(tmp_path, in_loop=stop), discipline, LAGGING, out=tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is before
    run = simulate(script(tmp_path), discipline, LAGGING, out=tmp_path / "run", resume=True)
    logs = [(tmp_path / name / "log.jsonl").read_bytes() for name in ("whole", "run")]
    assert logs[0] == logs[1]
    assert run.folder == tmp_path / "run"


def test_nothing_of_the_program_is_changed(tmp_path: Path) -> None:
    import sys

    before = (list(sys.argv), list(sys.path), sys.modules["__main__"], torch.get_rng_state())
    simulate(script(tmp_path, before="import sys; assert sys.argv[0].endswith('loop.py')"))
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before[:3]
    assert torch.equal(torch.get_rng_state(), before[3])


def test_updates_are_logged_with_the_recorded_loss(tmp_path: Path) -> None:
    simulate(script(tmp_path), out=tmp_path / "run")
    updates = [r for r in read(tmp_path / "run" / "log.jsonl") if isinstance(r, Updated)]
    assert all(part.loss is not None and part.loss > 0 for r in updates for part in r.parts)
