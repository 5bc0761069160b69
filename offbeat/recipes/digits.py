"""Handwritten digits of 8 by 8 pixels: a small perceptron that trains in a second or two."""

from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from offbeat.config.task import Task
from offbeat.errors import ConfigError
from offbeat.recipes.common import from_seed, whole

PIXELS, CLASSES, BRIGHTEST = 64, 10, 16.0
TEST_SHARE = 0.2
# The split never follows `seed`: runs with different seeds are judged on the same images.
SPLIT_SEED = 1797


def digits(hidden: int = 128, seed: int = 0) -> Task:
    """The 1,797 digits that come with scikit-learn, one in five of each class kept for the test."""
    whole("hidden", hidden, least=1)
    model = from_seed(seed, partial(perceptron, hidden))
    images, labels = _load()
    train, test = _stratified_split(labels)
    return Task(
        model=model,
        data=TensorDataset(images[train], labels[train]),
        loss=functional.cross_entropy,
        test=TensorDataset(images[test], labels[test]),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=32,
    )


def perceptron(hidden: int) -> nn.Sequential:
    """One hidden layer; with the default 128 units it has 9,610 parameters."""
    return nn.Sequential(nn.Linear(PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def _load() -> tuple[Tensor, Tensor]:
    try:
        datasets = import_module("sklearn.datasets")
    except ImportError as error:
        raise ConfigError(
            "the recipe digits takes its images from scikit-learn, which cannot be imported "
            f"({error}); install it with: pip install offbeat[recipes]"
        ) from error
    images, labels = datasets.load_digits(return_X_y=True)
    return (
        torch.tensor(images, dtype=torch.float32) / BRIGHTEST,
        torch.tensor(labels, dtype=torch.int64),
    )


def _stratified_split(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the training and the test samples, each class shared out in the same ratio."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    in_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(CLASSES):
        members = torch.nonzero(labels == label).flatten()
        order = torch.randperm(len(members), generator=generator)
        in_test[members[order[: round(TEST_SHARE * len(members))]]] = True
    return torch.nonzero(~in_test).flatten(), torch.nonzero(in_test).flatten()
