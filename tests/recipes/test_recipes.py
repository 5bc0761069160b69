"""What every recipe promises: sizes, determinism, a quiet generator, and a loss that falls."""

import pickle
import struct
from pathlib import Path

import pytest
import torch

from offbeat.config.task import Task
from offbeat.errors import ConfigError
from offbeat.recipes import RECIPES, recipe


def write_idx(path: Path, *sizes: int, values: bytes) -> None:
    path.write_bytes(bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + values)


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, dict[str, object]]:
    """Options that make each recipe small."""
    for part, count in (("train", 8), ("t10k", 4)):
        pixels = bytes(i * 37 % 256 for i in range(count * 784))
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", count, 28, 28, values=pixels)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", count, values=bytes(range(count)))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 10, encoding="utf-8")
    return {
        "digits": {"hidden": 16},
        "mnist": {"folder": tmp_path},
        "chars": {"path": text, "context": 8, "width": 16, "layers": 1, "heads": 2},
        "resnet50": {"classes": 4, "samples": 4, "side": 32},
    }


def loss_of(task: Task, count: int = 8) -> torch.Tensor:
    pairs = [task.data[i] for i in range(min(count, len(task.data)))]
    x, y = (torch.stack(column) for column in zip(*pairs, strict=True))
    return task.loss(task.model(x), y)


def parameters(task: Task) -> int:
    return sum(p.numel() for p in task.model.parameters())


def same_state(one: Task, other: Task) -> bool:
    first, second = one.model.state_dict(), other.model.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_the_names() -> None:
    assert list(RECIPES) == ["digits", "mnist", "chars", "resnet50"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_seed_fixes_model_and_data(name: str, tiny: dict[str, dict[str, object]]) -> None:
    one, again = recipe(name, **tiny[name], seed=3), recipe(name, **tiny[name], seed=3)
    assert same_state(one, again)
    for a, b in zip(one.data.tensors, again.data.tensors, strict=True):
        assert torch.equal(a, b)
    assert not same_state(one, recipe(name, **tiny[name], seed=4))


@pytest.mark.parametrize("name", RECIPES)
def test_the_global_generator_is_left_alone(name: str, tiny: dict[str, dict[str, object]]) -> None:
    before = torch.get_rng_state()
    recipe(name, **tiny[name])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", RECIPES)
def test_one_step_lowers_the_loss(name: str, tiny: dict[str, dict[str, object]]) -> None:
    task = recipe(name, **tiny[name])
    optimizer = task.optimizer(task.model.parameters())
    before = loss_of(task)
    before.backward()
    optimizer.step()
    assert loss_of(task).item() < before.item()


@pytest.mark.parametrize("name", RECIPES)
def test_a_task_can_be_sent_to_another_process(
    name: str, tiny: dict[str, dict[str, object]]
) -> None:
    task = recipe(name, **tiny[name])
    copy = pickle.loads(pickle.dumps(task))
    assert same_state(task, copy)
    assert copy.loss is task.loss
    assert copy.optimizer.func is task.optimizer.func
    assert copy.optimizer.keywords == task.optimizer.keywords


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("seed", [-1, 1.5, "0", True])
def test_a_bad_seed(name: str, seed: object, tiny: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ConfigError, match="seed must be a whole number of at least 0"):
        recipe(name, **tiny[name], seed=seed)


def test_an_unknown_recipe() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'imagenet'.*digits, mnist, chars, resnet50"):
        recipe("imagenet")


def test_an_unknown_option() -> None:
    with pytest.raises(ConfigError, match=r"digits has no option 'rate'.*hidden=128, seed=0"):
        recipe("digits", rate=0.1)


def test_a_missing_option() -> None:
    with pytest.raises(
        ConfigError, match=r"mnist needs a value for 'folder'.*folder \(required\), seed=0"
    ):
        recipe("mnist")


def test_resnet50_has_the_published_number_of_parameters() -> None:
    assert parameters(recipe("resnet50", samples=1, side=32)) == 25_557_032


def test_resnet50_strides_in_the_3_by_3() -> None:
    first = recipe("resnet50", classes=2, samples=1).model.blocks[3].branch
    strides = [m.stride[0] for m in first if isinstance(m, torch.nn.Conv2d)]
    assert strides == [1, 2, 1]


@pytest.mark.parametrize("seed", [0, 1])
def test_resnet50_learns_its_samples_by_heart(seed: int) -> None:
    task = recipe("resnet50", classes=4, samples=4, side=32, seed=seed)
    optimizer = task.optimizer(task.model.parameters())
    losses = []
    for _ in range(3):
        loss = loss_of(task)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2


def test_resnet50_refuses_images_that_vanish() -> None:
    with pytest.raises(ConfigError, match="side must be a whole number of at least 32"):
        recipe("resnet50", side=31)
