"""Split replicas: the gradient is that of one process, whatever the schedule and the cuts."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

import offbeat as ob
from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.log.records import Updated
from tests.contract.common import Problem, assert_close, assert_same_bits, check_run, run
from tests.split.models import WIDTH, WORDS, Carrying, Opaque, Tied

EXACT = 1e-10
BATCH = 24
SYNCHRONOUS = ("layers", "gpipe", "1f1b", "interleaved", "zero-bubble")
SGD = partial(torch.optim.SGD, lr=0.05)


def per_code(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target)


def tied(samples: int = BATCH, dtype: torch.dtype = torch.float64) -> Problem:
    """Eight blocks, of which the first and the last have one parameter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Tied(5).to(dtype)
        codes, target = torch.randint(0, WORDS, (2, samples, 4))
    return Problem(model, TensorDataset(codes, target), per_code)


def rows(make: Callable[[], nn.Module], samples: int = BATCH) -> Problem:
    """A regression of 6 numbers to 2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().double()
        inputs = torch.randn(samples, WIDTH, dtype=torch.float64)
        target = torch.randn(samples, 2, dtype=torch.float64)
    return Problem(model, TensorDataset(inputs, target), F.mse_loss)


def asked(schedule: str, pp: int, **more: Any) -> ob.Layout:
    """A layout of a schedule, with twice as many microbatches as stages where it has several."""
    pieces = {"layers": None, "stash": 2}.get(schedule, 2 * pp)
    return ob.Layout(
        **{"pp": pp, "schedule": schedule, "microbatches": pieces, "split": "count"} | more
    )


def trained(engine: str, what: Problem, layout: ob.Layout | str, **options: Any) -> ob.Run:
    """By one worker, with every gradient applied as it is."""
    given = {"workers": 1, "batch_size": BATCH, "epochs": 1, "optimizer": SGD}
    return run(engine, what, "bsp", layout=layout, **given | options)


def plainly(
    what: Problem, epochs: int = 1, collate: Any = None, pieces: int = 1, lr: float = 0.05
) -> nn.Module:
    """The loop of one process without any layout, over the same batches."""
    model = copy.deepcopy(what.model).train()
    rule = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    reader = Reader(what.data, 0, True, collate)
    for epoch in range(epochs):
        for start in range(0, len(reader), BATCH):
            inputs, target = reader.read(Lease(epoch, start, min(start + BATCH, len(reader))))
            rule.zero_grad()
            size = -(-len(target) // pieces)
            for part, goal in zip(inputs.split(size), target.split(size), strict=True):
                (what.loss(model(part), goal) * (len(goal) / len(target))).backward()
            rule.step()
    return model


def gradient(before: nn.Module, after: nn.Module) -> dict[str, Tensor]:
    """What one step of rate 1 went down by."""
    later = dict(after.named_parameters())
    return {n: (p - later[n]).detach() for n, p in before.named_parameters()}


def assert_gradient(what: Problem, after: nn.Module) -> None:
    found = gradient(what.model, after)
    wanted = gradient(what.model, plainly(what, lr=1.0))
    for name, mine in wanted.items():
        assert mine.abs().max() > 0, name
        torch.testing.assert_close(found[name], mine, rtol=EXACT, atol=EXACT, msg=name)


# ---------------------------------------------------------------- every schedule


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", [*SYNCHRONOUS, "stash", "2bw"])
def test_the_gradient_of_a_tied_model_is_that_of_one_process(local_only, schedule, pp):
    what = tied()
    one = partial(torch.optim.SGD, lr=1.0)
    got = trained(local_only, what, asked(schedule, pp), optimizer=one)
    assert_gradient(what, got.model)
    if schedule in SYNCHRONOUS:
        same = trained("sim", what, asked(schedule, pp), optimizer=one)
        assert_same_bits(got.model, same.model)


FITTING = [
    (schedule, pp)
    for schedule in (*SYNCHRONOUS, "stash", "2bw")
    for pp in (2, 3, 4)
    if schedule != "interleaved" or pp == 2
]


@pytest.mark.parametrize(("schedule", "pp"), FITTING)
def test_the_gradient_of_a_model_with_skips_over_stages_is_that_of_one_process(schedule, pp):
    """Dicts, tuples and plain numbers cross the cuts; on real processes where they matter most."""
    what = rows(Carrying)
    engine = "sim" if schedule in ("layers", "gpipe") else "local"
    one = partial(torch.optim.SGD, lr=1.0)
    got = trained(engine, what, asked(schedule, pp), optimizer=one)
    assert_gradient(what, got.model)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "stash"])
def test_bf16_is_near_the_gradient_of_float32(local_only, schedule):
    """Each tensor of the gradient is within 2 % of that of one process in float32, by norm.

    Measured: 0.2 % to 0.8 %. A bfloat16 has 8 bits, and is rounded by up to 0.4 %.
    """
    what = tied(dtype=torch.float32)
    got = trained(
        local_only, what, asked(schedule, 3, precision="bf16"),
        optimizer=partial(torch.optim.SGD, lr=1.0),
    )  # fmt: skip
    found = gradient(what.model, got.model)
    wanted = gradient(what.model, plainly(what, lr=1.0))
    apart = {n: float((found[n] - g).norm() / g.norm()) for n, g in wanted.items()}
    assert 1e-5 < max(apart.values()) < 0.02, apart


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("schedule", [*SYNCHRONOUS, "2bw"])
def test_a_last_batch_with_fewer_samples_than_microbatches(local_only, schedule):
    """For `interleaved` three samples are no multiple of the stages either."""
    what = tied(BATCH + 3)
    got = trained(local_only, what, asked(schedule, 2), epochs=2)
    if schedule == "2bw":  # of which the second step begins before the first is applied
        assert got.summary().updates == 4
        assert all(epoch["missing"] == epoch["repeated"] == 0 for epoch in got.summary().ledger)
    else:
        assert_close(got.model, plainly(what, epochs=2), EXACT)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_last_batch_that_does_not_divide_into_microbatches(local_only, schedule):
    """Five samples are microbatches of one and one of two, which counts twice."""
    what = tied(BATCH + 5)
    got = trained(local_only, what, asked(schedule, 2), epochs=2)
    assert_close(got.model, plainly(what, epochs=2), EXACT)


class Sentences(Dataset):
    """Codes and targets of two to four words each."""

    def __init__(self, samples: int):
        torch.manual_seed(0)
        lengths = torch.randint(2, 5, (samples,)).tolist()
        lengths[:BATCH] = [2] * BATCH
        self.all = [tuple(torch.randint(1, WORDS, (2, length))) for length in lengths]

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> Any:
        return self.all[index]


def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    codes, target = zip(*samples, strict=True)
    return pad_sequence(codes, batch_first=True), pad_sequence(target, batch_first=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_batches_of_different_lengths(local_only, schedule):
    what = tied()._replace(data=Sentences(2 * BATCH))
    options = {"collate": padded, "shuffle": False}
    reader = Reader(what.data, 0, False, padded)
    widths = [len(reader.read(Lease(0, s, s + BATCH))[0][0]) for s in (0, BATCH)]
    assert widths == [2, 4]
    got = trained(local_only, what, asked(schedule, 2), **options)
    model = copy.deepcopy(what.model)
    rule = SGD(model.parameters())
    for start in (0, BATCH):
        codes, target = reader.read(Lease(0, start, start + BATCH))
        rule.zero_grad()
        what.loss(model(codes), target).backward()
        rule.step()
    assert_close(got.model, model, EXACT)


def test_batches_of_different_lengths_are_replayed_under_an_asynchronous_schedule(tmp_path):
    what = tied()._replace(data=Sentences(3 * BATCH))
    trained("local", what, asked("2bw", 3), out=tmp_path / "run", collate=padded)
    check_run(tmp_path / "run", what, epochs=1, collate=padded)


# ---------------------------------------------------------------- stages of all kinds


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def bare_middle() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(), nn.Linear(WIDTH, 2))


def bare_ends() -> nn.Module:
    return nn.Sequential(nn.Tanh(), nn.Sequential(linear(), nn.Linear(WIDTH, 2)), nn.Tanh())


def in_place() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.Linear(WIDTH, 2))


class Halve(nn.Module):
    """Writes in place what it is given, the samples of the batch themselves if it comes first."""

    def forward(self, value: Tensor) -> Tensor:
        return value.mul_(0.5)


def in_place_at_once() -> nn.Module:
    return nn.Sequential(Halve(), linear(), Halve(), linear(), Halve(), nn.Linear(WIDTH, 2))


def frozen_first() -> nn.Module:
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Linear(WIDTH, 2))
    model[0].requires_grad_(False)
    return model


def frozen_inside() -> nn.Module:
    model = nn.Sequential(linear(), linear(), nn.Tanh(), nn.Linear(WIDTH, 2))
    model[1].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def frozen_last() -> nn.Module:
    model = nn.Sequential(linear(), nn.Tanh(), nn.Linear(WIDTH, 2))
    model[2].requires_grad_(False)
    return model


class Off(nn.Module):
    """Two outputs, of which the next block takes one: a weight without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(value), self.unused(value)


class Takes(nn.Module):
    """Of a pair, the first; beside it a weight that no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.alone = nn.Linear(WIDTH, 2), nn.Parameter(torch.ones(2))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self.last(pair[0]) + self.alone.exp()
        return result


def half_used() -> nn.Module:
    return nn.Sequential(linear(), Off(), Takes())


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no parameters in the middle": (bare_middle, "1+2"),
    "no parameters at both ends": (bare_ends, "1+2"),
    "writes in place first": (in_place, "1+3"),
    "writes the samples in place": (in_place_at_once, "2+4"),
    "all frozen in the first": (frozen_first, "2+3"),
    "frozen in the middle": (frozen_inside, "1+3"),
    "frozen in the last": (frozen_last, "1+2"),
    "an output that nobody takes": (half_used, "1+2"),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "stash"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_all_kinds(local_only, kind, schedule):
    make, split = KINDS[kind]
    what = rows(make)
    got = trained(local_only, what, f"pp=3,schedule={schedule},microbatches=4,split={split}")
    assert_close(got.model, plainly(what), EXACT)
    for name, before in what.model.named_parameters():
        after = dict(got.model.named_parameters())[name]
        still = not before.requires_grad or "unused" in name
        assert torch.equal(after, before) == still, name


def with_chance() -> nn.Module:
    return nn.Sequential(
        linear(), nn.Dropout(0.4), nn.Tanh(), linear(), nn.Dropout(0.4), nn.Linear(WIDTH, 2)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "stash", "2bw"])
def test_dropout_is_replayed(local_only, schedule, tmp_path):
    what, out = rows(with_chance, 3 * BATCH), tmp_path / "run"
    got = trained(local_only, what, asked(schedule, 2), out=out)
    check_run(out, what, epochs=1)
    surely = copy.deepcopy(what.model)
    surely[1], surely[4] = nn.Dropout(0.0), nn.Dropout(0.0)
    other = plainly(what._replace(model=surely))
    assert not torch.allclose(got.model[0].weight, other[0].weight)


def test_dropout_differs_from_microbatch_to_microbatch():
    """Else four microbatches of the same samples would be one."""
    same = torch.ones(4, WIDTH, dtype=torch.float64)
    seen: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad:
            seen.append(output.detach().clone())
        return output.sum()

    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)).double()
    what = Problem(model, TensorDataset(same, same), loss)
    trained("sim", what, "pp=2,microbatches=4,split=1", batch_size=4)
    assert len(seen) == 4
    assert not any(torch.equal(seen[0], other) for other in seen[1:])


def with_norm() -> nn.Module:
    return nn.Sequential(
        linear(), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_batch_norm_has_the_statistics_of_microbatches(local_only, schedule, tmp_path):
    what, out = rows(with_norm, 2 * BATCH), tmp_path / "run"
    layout = f"pp=2,schedule={schedule},microbatches=4,split=3"
    got = trained(local_only, what, layout, out=out, epochs=2)
    wanted = plainly(what, epochs=2, pieces=4)
    assert_close(got.model, wanted, EXACT)  # buffers too
    assert int(got.model[1].num_batches_tracked) == 4 * 2 * 2
    check_run(out, what)


@pytest.mark.parametrize("schedule", ["stash", "2bw"])
def test_batch_norm_under_an_asynchronous_schedule(local_only, schedule, tmp_path):
    """The versions under way share one set of statistics, and every microbatch counts once."""
    what, out = rows(with_norm, 3 * BATCH), tmp_path / "run"
    layout = f"pp=2,schedule={schedule},microbatches=2,split=3"
    got = trained(local_only, what, layout, out=out, epochs=2)
    records = check_run(out, what)
    assert sum(isinstance(record, Updated) for record in records) == 6
    for norm in (got.model[1], got.model[3]):
        assert int(norm.num_batches_tracked) == 2 * 3 * 2
        assert norm.running_mean.abs().max() > 0


# ---------------------------------------------------------------- overlap, skips, one process


@pytest.mark.parametrize("name", ["bsp", "asp"])
def test_overlap_of_split_replicas_is_replayed(local_only, name, tmp_path):
    """Parameters come in at two places in turns, tied ones for the stages that borrow them too."""
    what, out = tied(4 * BATCH), tmp_path / "run"
    got = run(
        local_only, what, name, workers=2, batch_size=12, overlap=True, out=out,
        layout=asked("1f1b", 2, microbatches=2), optimizer=partial(torch.optim.SGD, lr=0.5),
    )  # fmt: skip
    check_run(out, what)
    assert got.summary().staleness_max >= 1


def test_microbatches_alone_are_one_process_that_computes_in_pieces(local_only, tmp_path):
    what, out = rows(lambda: Opaque().double(), 3 * BATCH), tmp_path / "run"
    what = what._replace(loss=lambda output, target: F.mse_loss(output[:, :2], target))
    got = trained(local_only, what, "microbatches=4", out=out)
    assert_close(got.model, plainly(what), EXACT)
    check_run(out, what, epochs=1)


class Root(nn.Module):
    """At zero the slope of its own weight has no number, whatever comes behind."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return (value * self.gain).abs().sqrt()


def skipping() -> nn.Module:
    return nn.Sequential(
        Root(), linear(), nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, 2),
    )  # fmt: skip


def bad_target(what: Problem) -> None:
    """The loss alone is not finite: no gradient comes of it."""
    what.data.tensors[1][5] = float("nan")


def bad_input(what: Problem) -> None:
    """Only the first stage has a gradient that is not finite."""
    what.data.tensors[0][5] = 0.0


@pytest.mark.parametrize("spoil", [bad_target, bad_input])
def test_what_is_skipped_leaves_nothing_in_any_stage(local_only, spoil):
    """A stage cannot tell from its own numbers that another's were not finite."""
    what = rows(skipping, 3 * BATCH)
    spoil(what)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean() + 0 * target.mean().detach()

    what = what._replace(loss=loss)
    options = {"layout": "pp=2,microbatches=2,split=3", "nonfinite": "skip", "epochs": 2}
    got = trained(local_only, what, **options)
    same = trained("sim", what, **options)
    skipped = sum(epoch["skipped"] for epoch in got.summary().ledger)
    assert skipped == 2 * BATCH
    assert_same_bits(got.model, same.model)
