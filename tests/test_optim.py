"""The update rules against their formulas, their limits and PyTorch's own optimisers."""

import copy
import io
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from offbeat.errors import ConfigError
from offbeat.optim import BlockMomentum, DelayedNesterov, RMSMomentum

Make = Callable[..., Optimizer]

RULES: dict[str, Make] = {
    "rms": RMSMomentum,
    "rms-decay": partial(RMSMomentum, weight_decay=0.1),
    "block": BlockMomentum,
    "block-nesterov": partial(BlockMomentum, nesterov=True),
    "delayed": partial(DelayedNesterov, delay=3),
    "delayed-spread": partial(DelayedNesterov, delay=3, c=0.2),
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())
numbers = st.floats(-3, 3, allow_nan=False, width=32)
quick = settings(deadline=None, max_examples=25)


def tensors(seed: int, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, generator=generator, dtype=dtype) for _ in range(count)]


def drive(optimizer: Optimizer, p: Tensor, gradients: list[Tensor]) -> list[Tensor]:
    """Step once per gradient; return the tensor after each step."""
    path = []
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
        path.append(p.detach().clone())
    return path


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


# What every rule owes a PyTorch user


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_dict_half_way_continues_to_the_same_bits(make: Make, dtype: torch.dtype) -> None:
    start, *gradients = tensors(0, 10, dtype)
    whole = start.clone()
    expected = drive(make([whole], lr=0.3), whole, gradients)

    first = start.clone()
    optimizer = make([first], lr=0.3)
    drive(optimizer, first, gradients[:4])
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)

    second = first.clone()
    resumed = make([second], lr=99.0)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert same_bits(drive(resumed, second, gradients[4:]), expected[4:])


@every_rule
def test_state_is_all_tensors_and_loading_keeps_their_types(make: Make) -> None:
    start, *gradients = tensors(1, 5, torch.float32)
    optimizer = make([start])
    drive(optimizer, start, gradients)
    saved = copy.deepcopy(optimizer.state_dict())
    other = start.clone()
    loaded = make([other])
    loaded.load_state_dict(copy.deepcopy(saved))
    before, after = saved["state"][0], loaded.state_dict()["state"][0]
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert isinstance(value, Tensor)
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], value)


@every_rule
def test_a_tensor_without_gradient_is_left_alone(make: Make) -> None:
    moved, still, gradient = tensors(2, 3)
    kept = still.clone()
    optimizer = make([moved, still])
    drive(optimizer, moved, [gradient] * 4)
    assert torch.equal(still, kept)
    assert still not in optimizer.state


@every_rule
def test_the_gradient_is_only_read(make: Make) -> None:
    p, gradient = tensors(3, 2)
    p.grad = gradient.clone()
    make([p]).step()
    assert torch.equal(p.grad, gradient)


@every_rule
def test_the_tensor_is_changed_in_place(make: Make) -> None:
    flat = torch.ones(12, dtype=torch.float64)
    view = flat[3:9].view(2, 3)
    address = view.data_ptr()
    drive(make([view]), view, tensors(4, 3))
    assert view.data_ptr() == address
    assert not torch.equal(flat[3:9], torch.ones(6, dtype=torch.float64))
    assert torch.equal(flat[:3], torch.ones(3, dtype=torch.float64))
    assert torch.equal(flat[9:], torch.ones(3, dtype=torch.float64))


@every_rule
def test_groups_have_their_own_rate(make: Make) -> None:
    start, *gradients = tensors(5, 7)
    slow, fast, alone = start.clone(), start.clone(), start.clone()
    together = make([{"params": [slow], "lr": 0.01}, {"params": [fast], "lr": 0.2}])
    for gradient in gradients:
        slow.grad, fast.grad = gradient.clone(), gradient.clone()
        together.step()
    drive(make([alone], lr=0.2), alone, gradients)
    assert torch.equal(fast, alone)
    assert not torch.equal(slow, alone)


@every_rule
def test_the_rate_is_read_when_the_step_is_made(make: Make) -> None:
    start, gradient = tensors(6, 2)
    scaled, direct = start.clone(), start.clone()
    optimizer = make([scaled], lr=1.0)
    optimizer.param_groups[0]["lr"] *= 0.25
    drive(optimizer, scaled, [gradient])
    drive(make([direct], lr=0.25), direct, [gradient])
    assert torch.equal(scaled, direct)


@every_rule
@pytest.mark.parametrize(
    "schedule",
    [
        partial(StepLR, step_size=2, gamma=0.1),
        partial(CosineAnnealingLR, T_max=5),
        partial(OneCycleLR, max_lr=0.5, total_steps=8),
    ],
    ids=["step", "cosine", "one-cycle"],
)
def test_schedules_drive_the_rate(make: Make, schedule: Callable[[Optimizer], object]) -> None:
    start, *gradients = tensors(7, 7)
    by_hand, scheduled = start.clone(), start.clone()
    optimizer = make([scheduled], lr=0.4)
    scheduler = schedule(optimizer)
    groups = []
    for gradient in gradients:
        groups.append({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
        drive(optimizer, scheduled, [gradient])
        scheduler.step()
    assert len({group["lr"] for group in groups}) > 1
    manual = make([by_hand], lr=0.4)
    for group, gradient in zip(groups, gradients, strict=True):
        manual.param_groups[0].update(group)
        drive(manual, by_hand, [gradient])
    assert torch.equal(scheduled, by_hand)


@every_rule
def test_a_closure_gives_the_loss_and_may_use_autograd(make: Make) -> None:
    p = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = make([p], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 13.0
    assert optimizer.step(closure) < 13.0
    assert optimizer.step() is None


@every_rule
def test_a_sparse_gradient_is_refused_and_nothing_moves(make: Make) -> None:
    first, second = torch.ones(2, 3), torch.ones(2, 3)
    optimizer = make([first, second])
    first.grad, second.grad = torch.ones(2, 3), torch.ones(2, 3).to_sparse()
    with pytest.raises(ConfigError, match=r"sparse gradients are not supported.*to_dense"):
        optimizer.step()
    assert torch.equal(first, torch.ones(2, 3))
    assert not optimizer.state


@every_rule
def test_a_complex_gradient_is_refused(make: Make) -> None:
    p = torch.ones(2, dtype=torch.complex64)
    p.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="view_as_real"):
        make([p]).step()


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (RMSMomentum, {"lr": -0.1}),
        (RMSMomentum, {"lr": math.inf}),
        (RMSMomentum, {"lr": math.nan}),
        (RMSMomentum, {"lr": "fast"}),
        (RMSMomentum, {"rho": 1.0}),
        (RMSMomentum, {"momentum": -0.1}),
        (RMSMomentum, {"eps": 0.0}),
        (RMSMomentum, {"weight_decay": -1.0}),
        (BlockMomentum, {"lr": None}),
        (BlockMomentum, {"momentum": 1.0}),
        (RULES["delayed"], {"momentum": math.nan}),
        (DelayedNesterov, {"delay": 0}),
        (DelayedNesterov, {"delay": 2.0}),
        (DelayedNesterov, {"delay": True}),
        (RULES["delayed"], {"c": -0.1}),
        (RULES["delayed"], {"c": 0.5}),
    ],
)
def test_a_wrong_hyper_parameter_is_named(make: Make, bad: dict[str, object]) -> None:
    (name,) = bad
    with pytest.raises(ConfigError, match=rf": {name} is .*; write "):
        make([torch.zeros(1)], **bad)


def test_a_wrong_hyper_parameter_in_a_group_is_refused_too() -> None:
    optimizer = RMSMomentum([torch.zeros(1)])
    with pytest.raises(ConfigError, match="rho is 2"):
        optimizer.add_param_group({"params": [torch.zeros(1)], "rho": 2})
    assert len(optimizer.param_groups) == 1


# RMSMomentum


@quick
@given(
    gradients=st.lists(numbers, min_size=1, max_size=8),
    lr=st.floats(0.001, 1),
    rho=st.floats(0, 0.99),
    momentum=st.floats(0, 0.99),
    eps=st.floats(1e-8, 1),
    decay=st.floats(0, 0.5),
)
def test_rms_follows_its_formula(
    gradients: list[float], lr: float, rho: float, momentum: float, eps: float, decay: float
) -> None:
    p = torch.tensor([1.5], dtype=torch.float64)
    optimizer = RMSMomentum([p], lr, rho, momentum, eps, decay)
    path = drive(optimizer, p, [torch.tensor([g], dtype=torch.float64) for g in gradients])
    w, s, v = 1.5, 0.0, 0.0
    for gradient, seen in zip(gradients, path, strict=True):
        g = gradient + decay * w
        s = rho * s + (1 - rho) * g * g
        v = momentum * v + lr * g / math.sqrt(s + eps)
        w -= v
        assert seen.item() == pytest.approx(w, rel=1e-9, abs=1e-9)


def test_rms_without_momentum_is_rmsprop_with_eps_inside_the_root() -> None:
    start, *gradients = tensors(8, 7)
    p = start.clone()
    path = drive(RMSMomentum([p], lr=0.1, rho=0.8, momentum=0.0, eps=0.01), p, gradients)
    w, s = start.clone(), torch.zeros_like(start)
    for gradient, seen in zip(gradients, path, strict=True):
        s = 0.8 * s + 0.2 * gradient**2
        w = w - 0.1 * gradient / (s + 0.01).sqrt()
        torch.testing.assert_close(seen, w)


@quick
@given(
    size=st.floats(0.01, 10),
    sign=st.sampled_from([-1, 1]),
    lr=st.floats(0.001, 1),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_rms_step_settles_whatever_the_size_of_a_constant_gradient(
    size: float, sign: int, lr: float, momentum: float
) -> None:
    p = torch.zeros(1, dtype=torch.float64)
    optimizer = RMSMomentum([p], lr=lr, momentum=momentum, eps=1e-14)
    path = drive(optimizer, p, [torch.full((1,), sign * size, dtype=torch.float64)] * 400)
    step = (path[-1] - path[-2]).item()
    assert step == pytest.approx(-sign * lr / (1 - momentum), rel=1e-6)


def test_rms_equals_torch_while_the_rate_is_constant_and_departs_when_it_changes() -> None:
    start, *gradients = tensors(9, 8)
    ours, theirs = start.clone(), start.clone()
    rule = RMSMomentum([ours], lr=0.1, rho=0.9, momentum=0.9, eps=1e-30)
    torch_rule = RMSprop([theirs], lr=0.1, alpha=0.9, momentum=0.9, eps=1e-15)
    drive(rule, ours, gradients[:4])
    drive(torch_rule, theirs, gradients[:4])
    torch.testing.assert_close(ours, theirs)

    for optimizer in (rule, torch_rule):
        optimizer.param_groups[0]["lr"] = 0.0
    before_ours, before_theirs = ours.clone(), theirs.clone()
    drive(rule, ours, gradients[4:5])
    drive(torch_rule, theirs, gradients[4:5])
    # PyTorch stands still at rate zero; here the buffer already holds rate times gradient.
    assert torch.equal(theirs, before_theirs)
    assert (ours - before_ours).abs().min() > 1e-3


def test_rms_stays_finite_at_zero_gradient() -> None:
    p = torch.ones(3)
    drive(RMSMomentum([p]), p, [torch.zeros(3)] * 3)
    assert torch.equal(p, torch.ones(3))


# BlockMomentum


@quick
@given(
    workers=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=5),
    nesterov=st.booleans(),
)
def test_block_momentum_without_momentum_is_model_averaging(
    workers: list[list[float]], nesterov: bool
) -> None:
    mean = torch.tensor(workers, dtype=torch.float64).mean(dim=0)
    anchor = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    optimizer = BlockMomentum([anchor], lr=1.0, momentum=0.0, nesterov=nesterov)
    for shift in range(3):
        drive(optimizer, anchor, [anchor - (mean + shift)])
        torch.testing.assert_close(anchor, mean + shift)


@pytest.mark.parametrize("nesterov", [False, True])
def test_block_momentum_without_momentum_has_the_bits_of_sgd(nesterov: bool) -> None:
    start, *gradients = tensors(10, 7, torch.float32)
    ours, theirs = start.clone(), start.clone()
    path = drive(BlockMomentum([ours], momentum=0.0, nesterov=nesterov), ours, gradients)
    assert same_bits(path, drive(SGD([theirs], lr=1.0), theirs, gradients))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("zeta", [1.0, 0.5])
def test_block_momentum_gains_one_step_per_worker(
    workers: int, zeta: float, nesterov: bool
) -> None:
    change = torch.tensor([0.3, -2.0], dtype=torch.float64)
    p = torch.zeros(2, dtype=torch.float64)
    optimizer = BlockMomentum([p], lr=zeta, momentum=1 - 1 / workers, nesterov=nesterov)
    drive(optimizer, p, [-change] * 300)
    before = optimizer.eval_tensor(p).clone()
    drive(optimizer, p, [-change])
    torch.testing.assert_close(optimizer.eval_tensor(p) - before, zeta * workers * change)


@pytest.mark.parametrize("nesterov", [False, True])
def test_block_momentum_follows_the_paper(nesterov: bool) -> None:
    eta, zeta = 0.75, 0.8
    start, *means = tensors(11, 8)
    anchor = start.clone()
    optimizer = BlockMomentum([anchor], lr=zeta, momentum=eta, nesterov=nesterov)
    weights, delta, pulled = start.clone(), torch.zeros_like(start), start.clone()
    for mean in means:
        drive(optimizer, anchor, [anchor - mean])
        delta = eta * delta + zeta * (mean - pulled)
        weights = weights + delta
        pulled = weights + eta * delta if nesterov else weights
        torch.testing.assert_close(anchor, pulled)
        torch.testing.assert_close(optimizer.eval_tensor(anchor), weights)


def test_block_momentum_looks_ahead_of_the_weights_it_keeps() -> None:
    start, *gradients = tensors(12, 5)
    anchor = start.clone()
    optimizer = BlockMomentum([anchor], momentum=0.5, nesterov=True)
    assert torch.equal(optimizer.eval_tensor(anchor), start)
    assert not optimizer.state
    previous = start
    for gradient in gradients:
        drive(optimizer, anchor, [gradient])
        weights = optimizer.eval_tensor(anchor).clone()
        torch.testing.assert_close(anchor, weights + 0.5 * (weights - previous))
        previous = weights


def test_classical_block_momentum_evaluates_the_tensor_itself() -> None:
    p, gradient = tensors(13, 2)
    optimizer = BlockMomentum([p])
    drive(optimizer, p, [gradient] * 2)
    assert torch.equal(optimizer.eval_tensor(p), p)
    assert set(optimizer.state[p]) == {"momentum_buffer"}


# DelayedNesterov


@quick
@given(
    seed=st.integers(0, 1000),
    delay=st.integers(1, 6),
    blocks=st.integers(1, 4),
    lr=st.floats(0.01, 1),
    momentum=st.floats(0.01, 0.99),
)
def test_delayed_pushes_add_up_to_nesterov_steps(
    seed: int, delay: int, blocks: int, lr: float, momentum: float
) -> None:
    start, *gradients = tensors(seed, 1 + delay * blocks)
    ours, theirs = start.clone(), start.clone()
    path = drive(DelayedNesterov([ours], lr, momentum, delay=delay), ours, gradients)
    means = [
        torch.stack(gradients[i : i + delay]).mean(dim=0) for i in range(0, len(gradients), delay)
    ]
    expected = drive(SGD([theirs], lr=lr, momentum=momentum, nesterov=True), theirs, means)
    torch.testing.assert_close(path[delay - 1 :: delay], expected)


@pytest.mark.parametrize("c", [0.0, 0.1, 0.25])
def test_delayed_follows_its_formula(c: float) -> None:
    lr, beta, delay = 0.7, 0.9, 4
    start, *gradients = tensors(14, 12)
    p = start.clone()
    path = drive(DelayedNesterov([p], lr, beta, delay=delay, c=c), p, gradients)
    w, d, m = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, (gradient, seen) in enumerate(zip(gradients, path, strict=True)):
        d = d + gradient / delay
        if (t + 1) % delay == 0:
            m = beta * m + d
            w = w - lr * ((1 - c * delay + c) * beta * m + gradient / delay)
            d = torch.zeros_like(start)
        else:
            w = w - lr * (c * beta * m + gradient / delay)
        torch.testing.assert_close(seen, w)


def test_delayed_moves_by_the_gradient_alone_inside_a_block() -> None:
    start, *gradients = tensors(15, 7)
    p = start.clone()
    path = drive(DelayedNesterov([p], lr=0.5, delay=3), p, gradients)
    torch.testing.assert_close(path[3] - path[2], -0.5 * gradients[3] / 3)
    torch.testing.assert_close(path[4] - path[3], -0.5 * gradients[4] / 3)
    assert not torch.allclose(path[5] - path[4], -0.5 * gradients[5] / 3)


def test_delayed_keeps_a_tensors_place_while_it_has_no_gradient() -> None:
    start, *gradients = tensors(16, 4)
    steady, paused = start.clone(), start.clone()
    expected = drive(DelayedNesterov([steady], delay=2), steady, gradients)
    optimizer = DelayedNesterov([paused], delay=2)
    drive(optimizer, paused, gradients[:1])
    paused.grad = None
    optimizer.step()
    assert same_bits(drive(optimizer, paused, gradients[1:]), expected[1:])


def test_delayed_needs_a_delay() -> None:
    with pytest.raises(TypeError, match="delay"):
        DelayedNesterov([torch.zeros(1)])  # type: ignore[call-arg]


def test_delayed_counts_pushes_beyond_the_precision_of_the_tensor() -> None:
    p = torch.zeros(1, dtype=torch.bfloat16)
    optimizer = DelayedNesterov([p], delay=3)
    drive(optimizer, p, [torch.ones(1, dtype=torch.bfloat16)] * 300)
    assert int(optimizer.state[p]["step"]) == 300
