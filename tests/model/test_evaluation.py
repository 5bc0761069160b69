"""Mean loss over the whole test set, and accuracy where there are classes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from offbeat.config.task import Metric, metrics_of
from offbeat.errors import ConfigError, RunError
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
    loss, accuracy, *_ = evaluate(Given())
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
    assert evaluate(Given()) == (0.0, accuracy, None, {})


def test_a_batch_loss_has_no_accuracy() -> None:
    loss = BatchLoss(lambda model, batch: model(batch[0]).mean())
    found, accuracy, *_ = Evaluator(TensorDataset(SCORES, LABELS), loss, batch=2)(Given())
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


# ---------------------------------------------------------------- metrics


class Correct:
    """Counts as torchmetrics' objects do."""

    higher_is_better = True

    def __init__(self) -> None:
        self.right, self.count, self.resets = 0, 0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int((outputs.argmax(1) == targets).sum())
        self.count += len(targets)

    def compute(self) -> Tensor:
        return torch.tensor(self.right / self.count)

    def reset(self) -> None:
        self.right = self.count = 0
        self.resets += 1


class Wrong(Correct):
    higher_is_better = False

    def compute(self) -> Tensor:
        return 1 - super().compute()


class Collection:
    """Several objects, as torchmetrics collects them."""

    def __init__(self, **metrics: Correct):
        self.metrics = metrics

    def items(self) -> Any:
        return self.metrics.items()

    def update(self, *what: Any) -> None:
        raise AssertionError("each of them is told for itself")

    compute = reset = update


def largest(outputs: Tensor, targets: Tensor) -> float:
    assert len(outputs) == len(targets) == 5
    return float(outputs.max())


def scored(metric: Any, loss: Any = F.cross_entropy, batch: int = 2) -> Any:
    data = TensorDataset(SCORES, LABELS)
    return Evaluator(data, loss, batch=batch, metrics=metrics_of(metric))(Given())


def test_a_function_of_outputs_and_targets_sees_all_of_them_at_once() -> None:
    assert metrics_of(largest)[0].described() == {"name": "largest", "higher": True}
    assert scored(largest).metric == 5.0
    assert scored(Metric("top", largest, False, on="outputs")).metric == 5.0


def test_an_object_is_told_batch_by_batch_and_begins_anew_at_each_test() -> None:
    metric = Correct()
    assert metrics_of(metric)[0].described() == {"name": "Correct", "higher": True}
    assert scored(metric).metric == scored(metric).metric == pytest.approx(3 / 5)
    assert metric.resets == 2


def test_several_metrics_keep_their_order_names_and_directions() -> None:
    collection = Collection(good=Correct(), bad=Wrong())
    every = {"first": largest, **dict.fromkeys(["again"], Correct())}
    for given, names in [
        ([largest, Wrong(), "perplexity"], ["largest", "Wrong", "perplexity"]),
        (every, ["first", "again"]),
        (collection, ["good", "bad"]),
    ]:
        assert [metric.name for metric in metrics_of(given)] == names
    found = scored([largest, collection, "perplexity"])
    assert found.metric == 5.0
    assert found.metrics["good"] == pytest.approx(0.6)
    assert found.metrics["bad"] == pytest.approx(0.4)
    perplexity = F.cross_entropy(SCORES, LABELS).exp().item()
    assert found.metrics["perplexity"] == pytest.approx(perplexity)
    assert [metric.higher_is_better for metric in metrics_of(collection)] == [True, False]


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ([Correct(), Correct()], "two metrics are called Correct"),
        ("perplexty", r"no metric 'perplexty' \(did you mean 'perplexity'\?\)"),
        (3, "3 is no metric: pass a function of outputs and targets"),
        (Correct, "is no metric"),
        ({"f1": 3}, "3 is no metric"),
    ],
)
def test_what_is_no_metric_is_refused(metric: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        metrics_of(metric)


def test_what_the_outputs_of_a_batch_loss_are_nobody_knows() -> None:
    loss = BatchLoss(lambda model, batch: model(batch[0]).mean())
    with pytest.raises(ConfigError, match="a BatchLoss keeps them to itself"):
        scored(Correct(), loss)
    assert scored("perplexity", loss).metric == pytest.approx(SCORES.mean().exp().item())


def test_outputs_that_cannot_be_put_together_are_refused() -> None:
    data = TensorDataset(SCORES, LABELS)
    model, loss = Twice(), lambda output, target: F.cross_entropy(output[0], target)
    evaluate = Evaluator(data, loss, metrics=metrics_of(largest))
    with pytest.raises(RunError, match="these are tuple, not tensors: use an object"):
        evaluate(model)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_a_metric_that_is_not_finite_is_none() -> None:
    assert scored(lambda outputs, targets: float("nan")).metric is None
    assert scored("perplexity", lambda outputs, targets: outputs.sum() * 1e6).metric is None


TOKENS = TensorDataset(torch.randn(3, 4, 5), torch.arange(12).reshape(3, 4) % 5)


def test_a_language_model_has_its_perplexity_as_a_matter_of_course() -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    found = Evaluator(TOKENS, loss)(Given())
    assert found.metric is None
    assert found.metrics == {"perplexity": pytest.approx(torch.tensor(found.loss).exp().item())}
    named = Evaluator(TOKENS, loss, metrics=metrics_of("perplexity"))(Given())
    assert (named.metric, named.metrics) == (found.metrics["perplexity"], {})


def test_another_loss_over_tokens_has_none() -> None:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return 2 * F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    assert Evaluator(TOKENS, loss)(Given()).metrics == {}
    assert scored(None).metrics == {}  # classes, and no tokens
