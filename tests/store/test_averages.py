"""Averaged buffers: who counts how much, what is left alone, and what a newcomer begins with."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.errors import CheckpointError
from offbeat.model.table import buffer_entries
from offbeat.store.averages import Averages


def holder(**buffers: Tensor) -> nn.Module:
    module = nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def averages(policies: dict[str, Any] | None = None, **buffers: Tensor) -> Averages:
    model = holder(**buffers)
    return Averages(buffer_entries(model, policies or {}), model)


def mean_of(held: Averages, name: str = "x") -> Any:
    return held.mean()[name].tolist()


def test_a_worker_counts_by_the_samples_it_has_seen() -> None:
    held = averages(x=torch.zeros(1))
    held.take(0, 999, {"x": torch.tensor([1.0])})
    held.take(1, 1, {"x": torch.tensor([1001.0])})
    assert mean_of(held) == [2.0]


def test_what_nobody_has_changed_keeps_its_bits() -> None:
    kept = {
        "huge": torch.tensor([2**53 + 1, -(2**63)]),
        "turned": torch.tensor([1 + 2j, 0.1 - 0.3j]),
        "thin": torch.tensor([0.1, float("nan"), -0.0], dtype=torch.float16),
        "flag": torch.tensor([True, False]),
        "wide": torch.tensor(1 / 3, dtype=torch.float64),
    }
    held = averages(**kept)
    for worker, samples in enumerate((3, 7, 11)):
        held.take(worker, samples, {name: t.clone() for name, t in kept.items()})
    for name, value in held.mean().items():
        assert value.dtype is kept[name].dtype
        assert value.reshape(-1).view(torch.uint8).equal(kept[name].reshape(-1).view(torch.uint8))


def test_complex_statistics_are_averaged_as_complex_numbers() -> None:
    held = averages(x=torch.zeros(1, dtype=torch.complex64))
    held.take(0, 1, {"x": torch.tensor([1 + 2j])})
    held.take(1, 3, {"x": torch.tensor([5 - 2j])})
    assert mean_of(held) == [4 - 1j]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_whole_numbers_and_flags_are_those_of_whoever_has_seen_most(dtype: torch.dtype) -> None:
    held = averages(x=torch.zeros(2, dtype=dtype))
    held.take(0, 5, {"x": torch.tensor([1, 0], dtype=dtype)})
    held.take(1, 6, {"x": torch.tensor([0, 1], dtype=dtype)})
    assert mean_of(held) == torch.tensor([0, 1], dtype=dtype).tolist()
    held.take(0, 1, {"x": torch.tensor([1, 0], dtype=dtype)})  # as many: the first of them
    assert mean_of(held) == torch.tensor([1, 0], dtype=dtype).tolist()


def test_a_large_counter_is_exact() -> None:
    held = averages(x=torch.tensor(0))
    held.take(0, 1, {"x": torch.tensor(2**53 + 1)})
    held.take(1, 2, {"x": torch.tensor(2**62 + 3)})
    assert mean_of(held) == 2**62 + 3


def test_a_lost_worker_counts_until_those_who_are_there_have_seen_as_much() -> None:
    held = averages(x=torch.zeros(1))
    held.take(0, 10, {"x": torch.tensor([1.0])})
    held.take(1, 2, {"x": torch.tensor([5.0])})
    held.forget(0)
    assert held.weights() == {0: 8, 1: 2}
    held.take(1, 8, {"x": torch.tensor([5.0])})
    assert mean_of(held) == [5.0]


def test_what_the_only_worker_has_learnt_outlives_it() -> None:
    held = averages(x=torch.zeros(1))
    held.take(0, 4, {"x": torch.tensor([3.0])})
    held.forget(0)
    held.enter(0)
    assert held.begun_with()["x"].tolist() == [3.0]
    held.take(0, 1, {"x": torch.tensor([4.0])})  # its next incarnation has gone on from there
    assert mean_of(held) == [4.0]
    assert held.seen == {0: 5}


def test_everybody_who_joins_again_begins_with_the_mean_of_all() -> None:
    held = averages(x=torch.zeros(1))
    for worker in range(3):
        held.take(worker, 4, {"x": torch.tensor([float(worker)])})
    for worker in range(3):
        held.forget(worker)
    for worker in range(3):
        held.enter(worker)
        assert mean_of(held) == [1.0]


def test_what_was_sent_before_a_worker_was_lost_does_not_bring_it_back() -> None:
    """A contribution may wait for others until its worker is gone."""
    held = averages(x=torch.zeros(1))
    held.take(1, 4, {"x": torch.tensor([5.0])})
    held.forget(0)
    held.take(0, 4, {"x": torch.tensor([1.0])})
    assert mean_of(held) == [5.0]


def test_the_state_goes_into_tensors_and_back() -> None:
    held = averages(x=torch.zeros(1), n=torch.tensor(0))
    for worker in (2, 0):
        sent = {"x": torch.tensor([worker + 0.1]), "n": torch.tensor(2**60 + worker)}
        held.take(worker, 3 + worker, sent)
    held.forget(2)
    other = averages(x=torch.ones(1), n=torch.tensor(7))
    other.load(held.state(), held.meta())
    assert (other.weights(), other.lost) == (held.weights(), {2})
    assert mean_of(other) == mean_of(held)
    assert other.start["n"].item() == 0


def test_an_older_state_counts_everybody_alike() -> None:
    """It says neither what each has seen nor what the buffers were at first."""
    held = averages(x=torch.full((1,), 9.0))
    held.load({"statistics/0/x": torch.ones(1), "statistics/3/x": torch.full((1,), 2.0)}, None)
    assert mean_of(held) == [1.5]
    assert held.start["x"].tolist() == [9.0]


def test_a_run_that_begins_with_another_begins_with_its_mean() -> None:
    first = averages(x=torch.zeros(1))
    first.take(0, 3, {"x": torch.tensor([1.0])})
    first.take(1, 1, {"x": torch.tensor([5.0])})
    second = averages(x=torch.zeros(1))
    second.begin_with(first.state(), first.meta(), "there")
    assert mean_of(second) == [2.0]
    second.take(0, 1, {"x": torch.tensor([7.0])})  # from here on it is this run that counts
    assert mean_of(second) == [7.0]


def test_local_buffers_are_as_they_were_at_first() -> None:
    held = averages({"x": "local"}, x=torch.ones(1), y=torch.zeros(1))
    held.take(0, 1, {"y": torch.full((1,), 4.0)})
    begun = held.begun_with()
    assert (begun["x"].tolist(), begun["y"].tolist()) == ([1.0], [4.0])
    assert not any(name.endswith("x") for name in held.state())


def test_buffers_of_another_model_are_refused() -> None:
    first = averages(x=torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"there is of another model: buffer 'x' is \(2,\)"):
        averages(x=torch.zeros(3)).begin_with(first.state(), first.meta(), "there")
