"""A script's model whose stages are computed one by one: what it gives, and what it refuses."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import offbeat as ob
from offbeat.join import join
from tests.contract.common import MOMENTUM, SGD, assert_close, plain, problem
from tests.split.models import Carrying, Tied, codes, rows

HALVES = "pp=2,microbatches=2,split=count"


def trained(
    model: nn.Module,
    data: Dataset[Any],
    loss: Callable[..., Tensor],
    layout: str | ob.Layout | None = HALVES,
    inside: Callable[[nn.Module, Tensor], None] = lambda model, x: None,
    **more: Any,
) -> nn.Module:
    """A copy of the model after a script's loop; `inside` is done once for each batch."""
    model = copy.deepcopy(model)
    with join(layout=layout, **more) as run:
        assert run.replica(model) is model
        optimizer = run.optimizer(MOMENTUM)
        for x, y in run.batches(data, batch_size=4, epochs=2):
            inside(model, x)
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "forward" not in vars(model)
    return model


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("discipline", ["bsp", "local:2"])
@pytest.mark.parametrize("samples", [24, 23])  # with a short last batch
def test_it_trains_as_plain_pytorch_does(discipline: str, samples: int) -> None:
    what = problem(samples=samples)
    assert_close(trained(*what, discipline=discipline), plain(what, MOMENTUM))


def test_tied_parameters_get_the_gradients_of_both_stages() -> None:
    torch.manual_seed(0)
    model, data = Tied().double(), TensorDataset(codes(), codes())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    layout = "pp=2,microbatches=2,split=norm"
    assert_close(trained(model, data, loss, layout), trained(model, data, loss, None))


def test_dicts_and_tuples_travel_between_stages() -> None:
    model, data = Carrying().double(), TensorDataset(rows(8), rows(8)[:, :2])
    layout = "pp=3,microbatches=2,split=count"
    assert_close(trained(model, data, F.mse_loss, layout), trained(model, data, F.mse_loss, None))


def test_an_upstream_module_gets_its_gradient() -> None:
    what = problem()
    upstream, found = nn.Linear(3, 3).double(), []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    for layout in (None, HALVES):
        model = copy.deepcopy(what.model)
        with join(layout=layout) as run:
            run.replica(model)
            optimizer = run.optimizer(SGD)
            for x, y in run.batches(what.data, batch_size=4):
                loss(model(upstream(x)), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert upstream.weight.grad is not None
        found.append(upstream.weight.grad)
        upstream.weight.grad = None
    assert torch.allclose(found[0], found[1])


def test_the_script_decides_which_modules_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))

    def freeze(model: nn.Module, x: Tensor) -> None:
        assert isinstance(model, nn.Sequential)
        model[3].eval()

    after = trained(model, data, F.mse_loss, inside=freeze)
    assert isinstance(after, nn.Sequential)
    assert int(after[1].num_batches_tracked) == 24  # two microbatches for each of twelve batches
    assert int(after[3].num_batches_tracked) == 0


def test_after_every_step_the_parameters_are_to_be_seen() -> None:
    seen = []

    def look(model: nn.Module, x: Tensor) -> None:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})

    what = problem()
    trained(*what, inside=look)
    for name in seen[0]:
        assert not torch.equal(seen[0][name], seen[1][name])


# ---------------------------------------------------------------- a look in between


def test_evaluating_in_the_loop_changes_nothing() -> None:
    def look(model: nn.Module, x: Tensor) -> None:
        alone = copy.deepcopy(model)
        alone.eval()
        model.eval()
        with torch.no_grad():
            assert torch.allclose(model(x), alone(x))
        with torch.inference_mode():
            model(x[:1])
        model.train()

    torch.manual_seed(0)
    dropping = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2), nn.Dropout(0.2))
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
    plainly, looking = (
        trained(dropping, data, F.mse_loss, inside=inside)
        for inside in (lambda model, x: None, look)
    )
    for one, other in zip(plainly.parameters(), looking.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_look_between_the_two_passes() -> None:
    what = problem()
    model = copy.deepcopy(what.model)
    with join(layout=HALVES) as run:
        run.replica(model)
        optimizer = run.optimizer(MOMENTUM)
        for x, y in run.batches(what.data, batch_size=4, epochs=2):
            cost = what.loss(model(x), y)
            with torch.no_grad():
                model(x)
            cost.backward()
            optimizer.step()
    assert_close(model, plain(what, MOMENTUM))


def test_bf16_comes_back_as_float32() -> None:
    found = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found.append(output.dtype)
        return F.mse_loss(output, target)

    data = TensorDataset(torch.randn(8, 3), torch.randn(8, 2))
    trained(problem().model.float(), data, loss, f"{HALVES},precision=bf16")
    assert set(found) == {torch.float32}


# ---------------------------------------------------------------- mistakes


def begun(layout: str = HALVES, data: Any = None, **more: Any) -> tuple[Any, nn.Module, Any, Any]:
    run = join(layout=layout, **more)
    model = run.replica(copy.deepcopy(problem().model))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1))
    return run, model, optimizer, run.batches(data or problem().data, batch_size=4)


def test_a_second_forward_pass_is_refused() -> None:
    _, model, _, batches = begun()
    x, _ = next(batches)
    model(x)
    with pytest.raises(ob.ConfigError, match=r"second time .* torch\.no_grad"):
        model(x)


def test_a_second_backward_pass_is_refused() -> None:
    _, model, _, batches = begun()
    x, _ = next(batches)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ob.ConfigError, match=r"loss\.backward\(\) for a second time"):
        loss.backward()


def test_a_step_needs_both_passes() -> None:
    _, model, optimizer, batches = begun()
    x, _ = next(batches)
    with pytest.raises(ob.ConfigError, match=r"step\(\) without model\(x\)"):
        optimizer.step()
    model(x)
    with pytest.raises(ob.ConfigError, match=r"step\(\) without loss\.backward\(\)"):
        optimizer.step()


def test_a_loss_that_uses_a_parameter_is_refused() -> None:
    _, model, optimizer, batches = begun()
    x, _ = next(batches)
    (model(x).sum() + model.get_parameter("2.bias").sum()).backward()
    with pytest.raises(ob.ConfigError, match=r"the loss uses 2\.bias itself"):
        optimizer.step()


def test_other_mistakes() -> None:
    _, model, _, batches = begun()
    with pytest.raises(ob.ConfigError, match="before the first batch"):
        model(torch.zeros(4, 3))
    x, _ = next(batches)
    with pytest.raises(ob.ConfigError, match="takes one argument"):
        model(x, x)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ob.ConfigError, match="precision=bf16 in the layout"),
    ):
        model(x)


def test_an_output_without_rows_is_refused() -> None:
    class Mean(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.mean()

    model = nn.Sequential(nn.Linear(3, 2), Mean())
    data = TensorDataset(torch.randn(8, 3), torch.randn(8))
    with pytest.raises(ob.ConfigError, match="a row for each sample"):
        trained(model, data, lambda output, target: output)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_other_schedules_are_refused(schedule: str) -> None:
    with pytest.raises(ob.ConfigError, match=f"schedule={schedule} .* write schedule=gpipe"):
        begun(f"pp=2,split=count,schedule={schedule}")


@pytest.mark.parametrize("more", ["tp=2", "precision=fp16"])
def test_what_only_functions_have_is_refused(more: str) -> None:
    with pytest.raises(ob.ConfigError, match=r"use ob\.train"):
        begun(f"pp=2,split=count,{more}")


@pytest.mark.parametrize("layout", ["pp=2,split=count,schedule=layers", ob.Layout(pp=2)])
def test_a_layout_without_a_schedule_is_gpipe(layout: Any) -> None:
    what = problem()
    assert_close(trained(*what, layout=layout), plain(what, MOMENTUM))


def test_measuring_needs_pairs_that_the_model_takes() -> None:
    flat = TensorDataset(torch.randn(8, 3, 1).double(), torch.randn(8, 2).double())
    for data in (flat, TensorDataset(torch.randn(8, 3).double())):
        with pytest.raises(ob.ConfigError, match="write split=count"):
            begun("pp=2", data)
    _, model, _, batches = begun("pp=2,split=count", flat)
    x, _ = next(batches)
    assert model(x.flatten(1)).shape == (4, 2)


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "one", "MASTER_PORT": "1234",
    }  # fmt: skip
    for key, value in words.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ob.ConfigError, match="offbeat run -n 2 --layout pp=2"):
        begun()
