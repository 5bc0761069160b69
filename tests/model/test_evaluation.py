"""Mean loss over the whole test set, and accuracy where there are classes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from offbeat.errors import ConfigError
from offbeat.model.evaluation import Evaluator
from offbeat.model.objective import BatchLoss


class Given(nn.Module):
    """Returns its input, so that a test knows the output."""

    def forward(self, x: Tensor) -> Tensor:
        return x


SCORES = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0], [5.0, 1.0], [0.0, 1.0]])
LABELS = torch.tensor([0, 1, 1, 0, 0])


@pytest.mark.parametrize("batch", [1, 2, 5, 512])
def test_loss_and_accuracy_do_not_depend_on_the_batch(batch: int) -> None:
    evaluate = Evaluator(TensorDataset(SCORES, LABELS), F.cross_entropy, batch=batch)
    loss, accuracy, _ = evaluate(Given())
    assert loss == pytest.approx(F.cross_entropy(SCORES, LABELS).item(), rel=1e-6)
    assert accuracy == 3 / 5


@pytest.mark.parametrize(
    ("outputs", "targets", "accuracy"),
    [(torch.eye(4), torch.zeros(4), None),  # a regression
     (torch.eye(4), torch.zeros(4, 4, dtype=torch.long), None),
     (torch.eye(3).expand(2, 3, 3), torch.arange(3).expand(2, 3), 1.0),
     (torch.eye(4, 5).expand(2, 4, 5), torch.arange(4).expand(2, 4), 1.0),
     (torch.eye(5, 4).expand(2, 5, 4), torch.arange(4).expand(2, 4), 1.0)],
    ids=["floats", "same-shape", "square", "classes-last", "classes-second"],
)  # fmt: skip
def test_accuracy_only_where_there_are_class_scores(
    outputs: Tensor, targets: Tensor, accuracy: float | None
) -> None:
    def nothing(output: Any, target: Any) -> Tensor:
        return torch.zeros(())

    evaluate = Evaluator(TensorDataset(outputs.clone(), targets.clone()), nothing)
    assert evaluate(Given()) == (0.0, accuracy, None)


def test_a_batch_loss_has_no_accuracy() -> None:
    loss = BatchLoss(lambda model, batch: model(batch[0]).mean())
    found, accuracy, _ = Evaluator(TensorDataset(SCORES, LABELS), loss, batch=2)(Given())
    assert found == pytest.approx(SCORES.mean().item())
    assert accuracy is None


def test_evaluation_uses_no_dropout_and_changes_no_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.9))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluate = Evaluator(TensorDataset(SCORES, LABELS), F.cross_entropy)
    assert evaluate(model) == evaluate(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_an_empty_test_set() -> None:
    with pytest.raises(ConfigError, match="the test set is empty: leave test= out"):
        Evaluator(TensorDataset(SCORES[:0], LABELS[:0]), F.cross_entropy)
