"""The digits: size of the model, scale of the pixels, and a split that is fair and fixed."""

import sys

import pytest
import torch

from offbeat.errors import ConfigError
from offbeat.recipes import digits


def test_the_model_has_9610_parameters() -> None:
    assert sum(p.numel() for p in digits().model.parameters()) == 9610


def test_pixels_lie_between_0_and_1() -> None:
    images, _ = digits().data.tensors
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)


def test_every_sample_is_on_one_side_and_every_class_is_shared_four_to_one() -> None:
    task = digits()
    (train, train_labels), (test, test_labels) = task.data.tensors, task.test.tensors
    together = torch.cat([train, test])
    assert len(together) == 1797
    assert len(torch.unique(together, dim=0)) == 1797
    counts, held = train_labels.bincount(), test_labels.bincount()
    for class_total, class_held in zip((counts + held).tolist(), held.tolist(), strict=True):
        assert class_held == round(0.2 * class_total)


def test_the_split_does_not_follow_the_seed() -> None:
    for one, other in zip(digits(seed=0).test.tensors, digits(seed=1).test.tensors, strict=True):
        assert torch.equal(one, other)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"pip install offbeat\[recipes\]"):
        digits()


def test_a_hidden_layer_needs_a_unit() -> None:
    with pytest.raises(ConfigError, match="hidden must be a whole number of at least 1"):
        digits(hidden=0)
