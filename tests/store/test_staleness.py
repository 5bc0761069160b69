"""Element-wise staleness corrections against their formulas, and the copies that they need."""

import pytest
import torch
from torch import Tensor

from offbeat.discipline.parts import (
    AdaptiveDelayCompensation,
    Constant,
    DelayCompensation,
    GapAware,
    Inverse,
    Weigh,
)
from offbeat.model.table import Entry, Flat, Table
from offbeat.store.staleness import GapWeigher, Reads, make_weigher

TABLE = Table.of(
    [Entry("a", (3,), torch.float32, "shared"), Entry("b", (2,), torch.float64, "shared")]
)


def flat(a: list[float], b: list[float]) -> Flat:
    made = Flat(TABLE)
    made.views["a"].copy_(torch.tensor(a))
    made.views["b"].copy_(torch.tensor(b, dtype=torch.float64))
    return made


def put(target: Flat, a: list[float], b: list[float]) -> None:
    target.copy_(flat(a, b))


G = flat([1.0, -2.0, 0.5], [4.0, -1.0])


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("weigh", [Constant(), Inverse()])
def test_scalar_weights_need_no_backup(weigh: Weigh) -> None:
    weigher = make_weigher(weigh, [flat([0, 0, 0], [0, 0])])
    payload = [G]
    assert weigher.correct(0, 0, payload) is payload
    assert weigher.nbytes == 0
    assert weigher.state() == {}


def test_delay_compensation_by_hand() -> None:
    weights = flat([1.0, 1.0, 1.0], [2.0, 2.0])
    weigher = make_weigher(DelayCompensation(0.5), [weights])
    weigher.remember(0, {0})
    put(weights, [1.5, 0.0, 1.0], [3.0, 1.0])
    (out,) = weigher.correct(0, 0, [G])
    # g + 0.5 g² (now − read): 1+.5·1·.5, −2+.5·4·(−1), .5, 4+.5·16·1, −1+.5·1·(−1)
    close(out.views["a"], [1.25, -4.0, 0.5])
    close(out.views["b"], [12.0, -1.5])
    close(G.views["a"], [1.0, -2.0, 0.5])  # the worker's buffer is not written


def test_nothing_moved_or_no_strength_changes_no_bit() -> None:
    weights = flat([1.0, 1.0, 1.0], [2.0, 2.0])
    still = make_weigher(DelayCompensation(5.0), [weights])
    still.remember(0, {0})
    assert torch.equal(still.correct(0, 0, [G])[0].buffer, G.buffer)
    weak = make_weigher(DelayCompensation(0.0), [weights])
    weak.remember(0, {0})
    put(weights, [9.0, 8.0, 7.0], [6.0, 5.0])
    assert torch.equal(weak.correct(0, 0, [G])[0].buffer, G.buffer)


def test_every_version_has_its_own_copy() -> None:
    weights = flat([0.0] * 3, [0.0] * 2)
    weigher = make_weigher(DelayCompensation(1.0), [weights])
    weigher.remember(0, {0})
    put(weights, [1.0] * 3, [1.0] * 2)
    weigher.remember(1, {0, 1})
    put(weights, [3.0] * 3, [3.0] * 2)
    (first,) = weigher.correct(7, 0, [G])
    (second,) = weigher.correct(7, 1, [G])
    close(first.views["a"], [1 + 3, -2 + 12, 0.5 + 0.75])
    close(second.views["a"], [1 + 2, -2 + 8, 0.5 + 0.5])
    weigher.remember(2, {1, 2})  # nothing has moved since
    assert torch.equal(weigher.correct(7, 2, [G])[0].buffer, G.buffer)
    close(weigher.correct(7, 1, [G])[0].views["b"], [4 + 32, -1 + 2])
    assert sorted(weigher.backups) == [1, 2]


def test_a_version_that_nobody_has_read_is_an_error_and_not_a_guess() -> None:
    weigher = make_weigher(DelayCompensation(1.0), [flat([0.0] * 3, [0.0] * 2)])
    with pytest.raises(AssertionError, match="nobody has read version 4"):
        weigher.correct(0, 4, [G])


def test_versions_are_kept_until_no_contribution_can_be_based_on_them() -> None:
    reads = Reads()
    reads.pull(0, 0)
    reads.pull(1, 0)
    reads.pull(0, 3)
    assert reads.needed() == {0, 3}
    reads.waiting.append(0)
    reads.pull(1, 4)
    assert reads.needed() == {0, 3, 4}
    reads.forget(0)
    assert reads.needed() == {0, 4}  # it waits, whoever computed it
    reads.waiting.clear()
    assert reads.needed() == {4}
    ahead = Reads()
    ahead.allow(2)
    for version in (0, 1, 5):
        ahead.pull(0, version)
    assert ahead.needed() == {1, 5}


def test_a_state_of_old_has_one_copy_per_worker() -> None:
    weights = flat([3.0] * 3, [3.0] * 2)
    weigher = make_weigher(DelayCompensation(1.0), [weights])
    old = {"backup/1/a": torch.ones(3), "backup/1/b": torch.ones(2, dtype=torch.float64)}
    weigher.load(old)
    close(weigher.correct(1, 8, [G])[0].views["a"], [1 + 2, -2 + 8, 0.5 + 0.5])
    weigher.remember(9, {9})
    assert torch.equal(weigher.correct(1, 9, [G])[0].buffer, G.buffer)
    assert weigher.state().keys() >= old.keys()


def test_adaptive_delay_compensation_by_hand() -> None:
    weights = flat([0.0] * 3, [0.0] * 2)
    weigher = make_weigher(AdaptiveDelayCompensation(2.0, 0.75), [weights])
    weigher.remember(0, {0})
    put(weights, [1.0, 1.0, 1.0], [1.0, 1.0])
    square = torch.zeros(3, dtype=torch.float64)
    g = G.views["a"].double()
    for _ in range(3):
        (out,) = weigher.correct(0, 0, [G])
        square = 0.75 * square + 0.25 * g * g
        expected = g + 2.0 / torch.sqrt(square + 1e-7) * g * g
        torch.testing.assert_close(out.views["a"].double(), expected, rtol=1e-5, atol=1e-6)


def test_gap_aware_by_hand() -> None:
    weights = flat([0.0] * 3, [0.0] * 2)
    weigher = make_weigher(GapAware(0.5), [weights])
    weigher.remember(0, {0})
    assert torch.equal(weigher.correct(0, 0, [G])[0].buffer, G.buffer)  # nothing has moved yet
    before = weigher.before_step()
    put(weights, [1.0, 2.0, 3.0], [1.0, 1.0])  # mean step: 2 and 1
    weigher.after_step(before)
    (out,) = weigher.correct(0, 0, [G])
    close(out.views["a"], [1 / 1.5, -2 / 2.0, 0.5 / 2.5])
    close(out.views["b"], [4 / 2.0, -1 / 2.0])
    before = weigher.before_step()
    put(weights, [1.0, 2.0, 9.0], [1.0, 1.0])  # mean step 2 again, and 0
    weigher.after_step(before)
    assert isinstance(weigher, GapWeigher)
    close(weigher.step_size["a"], 2.0)  # type: ignore[arg-type]
    close(weigher.step_size["b"], 0.5)  # type: ignore[arg-type]
    weigher.remember(2, {2})
    assert torch.equal(weigher.correct(0, 2, [G])[0].buffer, G.buffer)  # no gap, no change


def test_only_gap_aware_watches_the_steps() -> None:
    weigher = make_weigher(DelayCompensation(), [flat([0.0] * 3, [0.0] * 2)])
    assert weigher.before_step() is None
    weigher.after_step(None)
    assert weigher.state() == {}


@pytest.mark.parametrize(
    "weigh", [DelayCompensation(0.5), AdaptiveDelayCompensation(1.0, 0.5), GapAware(0.5)]
)
def test_the_state_goes_into_tensors_and_back(weigh: Weigh) -> None:
    weights = flat([0.0] * 3, [0.0] * 2)
    first = make_weigher(weigh, [weights])
    first.remember(0, {0})
    before = first.before_step()
    put(weights, [1.0, 2.0, 3.0], [4.0, 5.0])
    first.after_step(before)
    first.correct(0, 0, [G])
    first.remember(3, {0, 3})
    put(weights, [2.0, 2.0, 3.0], [4.0, 7.0])
    saved = {path: tensor.clone() for path, tensor in first.state().items()}
    second = make_weigher(weigh, [weights])
    second.load(saved)
    for version in (0, 3):
        (one,), (other,) = first.correct(0, version, [G]), second.correct(0, version, [G])
        assert torch.equal(one.buffer, other.buffer)
    assert second.nbytes == first.nbytes > 0
