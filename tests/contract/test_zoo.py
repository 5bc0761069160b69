"""A model comes back as PyTorch would have left it, or is refused before the first step."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

import offbeat as ob
from tests.contract import zoo
from tests.contract.zoo import BATCH, ZOO, Case, made

# What PyTorch says when it adds up sparse gradients.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

TRAINED = [name for name in ZOO if not made(name).refused]
REFUSED = [name for name in ZOO if made(name).refused]
ENGINES = ["sim", "local"]
# A rule that is applied at the store, and one that is applied at the worker.
ONE = ["asp", "bsp", "local:3"]


def compare(case: Case, found: torch.nn.Module, wanted: torch.nn.Module, loose: float) -> None:
    assert found is case.model
    assert list(zoo.shape(found)) == list(zoo.shape(wanted))
    mine, theirs = zoo.tensors(found), zoo.tensors(wanted)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        exact = not loose or not (tensor.is_floating_point() or tensor.is_complex())
        if exact:
            assert torch.equal(mine[name], tensor), name
        else:
            torch.testing.assert_close(mine[name], tensor, rtol=loose, atol=loose, msg=name)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("engine", ENGINES)
def test_one_worker_is_a_plain_loop(engine: str, name: str) -> None:
    wanted = zoo.plain(made(name))
    for discipline in ONE if engine == "sim" else ONE[: 1 + (name == "plain")]:
        case = made(name)
        run = zoo.train(case, engine, discipline=discipline)
        # Adding the change of some steps to where they began rounds once more.
        loose = case.tolerance or (1e-12 if discipline.startswith("local") else 0.0)
        compare(case, run.model, wanted, loose)


@pytest.mark.parametrize("name", [name for name in TRAINED if made(name).mean])
@pytest.mark.parametrize("engine", ENGINES)
def test_lock_step_is_a_larger_batch(engine: str, name: str) -> None:
    case = made(name)
    run = zoo.train(case, engine, workers=2, discipline="bsp")
    wanted = zoo.plain(made(name), 2 * BATCH)
    assert list(zoo.shape(run.model)) == list(zoo.shape(wanted))
    loose = case.tolerance or 1e-10
    mine = dict(run.model.named_parameters())
    for key, tensor in wanted.named_parameters():
        torch.testing.assert_close(mine[key], tensor, rtol=loose, atol=loose, msg=key)


def test_buffers_that_nobody_changes_come_back_untouched() -> None:
    case, before = made("buffers"), made("buffers").model
    run = zoo.train(case, "sim", workers=3, discipline="asp")
    for name in ("turn", "large", "flags", "bytes", "brief", "passing"):
        assert torch.equal(run.model.get_buffer(name), before.get_buffer(name)), name


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_would_come_back_wrong_is_refused(engine: str, name: str, monkeypatch: Any) -> None:
    case = made(name)
    front = sys.modules["offbeat.train"]
    monkeypatch.setattr(front, "run_local", None)  # no worker, and no step
    monkeypatch.setattr(front, "simulate", None)
    with pytest.raises(ob.ConfigError, match=case.refused):
        zoo.train(case, engine)


def test_a_run_that_fails_leaves_the_model_as_it_was() -> None:
    class Stop(ob.Listener):
        def see(self, record: Any) -> None:
            if type(record).__name__ == "Updated" and record.version == 3:
                raise KeyError("stop")

    case, before = made("buffers"), made("buffers").model
    with pytest.raises(KeyError):
        zoo.train(case, "sim", workers=2, discipline="asp", listeners=[Stop()])
    compare(case, case.model, before, 0.0)
    assert all(p.grad is None for p in case.model.parameters())


def test_the_trial_leaves_no_trace() -> None:
    """Neither in what a model counts nor in its buffers nor in anybody's random numbers."""

    class Drawing(zoo.Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + 0 * np.random.rand() + 0 * torch.rand(()))

    class Look(ob.Listener):
        def describe(self, config: Any, samples: Any) -> None:
            calls.append(model.calls)

    calls: list[int] = []
    model = Drawing()
    before = (torch.get_rng_state(), np.random.get_state()[1].copy())
    zoo.train(Case(model), "sim", listeners=[Look()])
    assert calls == [0]
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_each_worker_counts_for_itself(engine: str, tmp_path: Any) -> None:
    """Attributes of modules are a worker's own, in one process as in several."""
    case = made("counting")
    zoo.train(case, engine, workers=2, discipline="bsp", out=tmp_path / "run")
    again = made("counting")
    found = ob.replay(tmp_path / "run", again.model, again.data(), again.loss)
    assert found.check().versions == 4
    assert again.model.calls == 0  # type: ignore[union-attr]


LAYOUTS = {
    "masked by a hook": "has a hook",
    "hook after accumulation": "has a hook",
    "loss reads the model": "looks at the model's parameters",
    "without a copy": "cannot be copied",
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_refuses_what_it_would_lose(name: str) -> None:
    with pytest.raises(ob.ConfigError, match=LAYOUTS[name]):
        zoo.train(made(name), "local", layout="pp=2")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layout_leaves_modes_alone(engine: str) -> None:
    case, wanted = made("part in evaluation mode"), zoo.plain(made("part in evaluation mode"))
    run = zoo.train(case, engine, discipline="asp", layout="pp=2,schedule=gpipe,microbatches=1")
    compare(case, run.model, wanted, 0.0)
