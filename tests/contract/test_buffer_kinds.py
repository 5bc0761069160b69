"""Buffers of every kind: what nobody changes keeps its bits, and only statistics are averaged."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from offbeat.errors import ConfigError
from offbeat.log.log import read
from offbeat.log.records import Updated
from tests.contract.common import Problem, run

SGD = partial(torch.optim.SGD, lr=0.01)
FIXED = {
    "large": torch.tensor([2**53 + 1, 2**63 - 1, -(2**63)]),
    "turned": torch.tensor([0.1 + 0.7j, -3.3j], dtype=torch.complex64),
    "mask": torch.tensor([True, False, True]),
    "small": torch.tensor([0.1, float("nan"), float("inf"), -0.0], dtype=torch.bfloat16),
    "narrow": torch.tensor([[1 / 3, 65504.0]], dtype=torch.float16),
    "wide": torch.tensor([1 / 3 + 2j / 7], dtype=torch.complex128),
    "fine": torch.tensor(1 / 3, dtype=torch.float64),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "none": torch.zeros(0),
}


class Holder(nn.Module):
    """A layer with buffers that stay, and some that follow what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for name, value in FIXED.items():
            self.register_buffer(name, value.clone())
        self.register_buffer("samples", torch.tensor(2**53 + 1))
        self.register_buffer("busy", torch.tensor(False))
        self.register_buffer("wave", torch.zeros(1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.samples += len(x)
            self.busy.fill_(True)
            self.wave += 2 + 1j
        return self.layer(x)


def holding(samples: int = 24) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(samples, 3), torch.arange(samples) % 2)
        return Problem(Holder(), data, F.cross_entropy)


def seen(folder: Path, workers: int) -> list[int]:
    """Samples of each worker."""
    found = [0] * workers
    for record in read(folder / "log.jsonl"):
        if isinstance(record, Updated):
            for part in record.parts:
                found[part.worker] += part.samples
    return found


HOW = [{}, {"shards": 2}, {"test": True}]


@pytest.mark.parametrize(
    ("engine", "options"),
    [*(("sim", how) for how in HOW), *(("local", how) for how in [*HOW, {"via": "allreduce"}])],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_what_nobody_changes_keeps_its_bits(engine, workers, options, tmp_path):
    what = holding()
    options = options | ({"test": what.data} if "test" in options else {})
    got = run(engine, what, "bsp", workers=workers, optimizer=SGD, out=tmp_path / "run", **options)
    after = dict(got.model.named_buffers())
    for name, value in FIXED.items():
        assert after[name].dtype is value.dtype
        assert _bits(after[name]) == _bits(value), name
    assert got.model.busy.item() is True


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("discipline", ["asp", "bsp", "gossip"])
def test_counters_are_exact_and_statistics_are_averaged_by_samples(engine, discipline, tmp_path):
    what, out = holding(samples=52), tmp_path / "run"
    got = run(
        engine, what, discipline, cluster="10ms,10ms,35ms", optimizer=SGD, out=out, test=what.data
    )
    samples = seen(out, 3)
    # Each has counted what it has seen; the model has the count of whoever has seen most.
    assert got.model.samples.item() == 2**53 + 1 + max(samples)
    steps = [count / 4 for count in samples]
    mean = sum(count * step for count, step in zip(samples, steps, strict=True)) / sum(samples)
    torch.testing.assert_close(got.model.wave, torch.tensor([(2 + 1j) * mean]))


def test_what_a_run_without_a_folder_keeps_is_kept_whole(local_only):
    """Its checkpoints lie in memory, and hold what the files of one would."""
    got = run(local_only, holding(), "gossip", workers=2, optimizer=SGD)
    for name, value in FIXED.items():
        assert _bits(got.model.get_buffer(name)) == _bits(value), name


def test_what_no_checkpoint_can_hold_is_refused(local_only):
    what = holding()
    what.model.register_buffer("odd", torch.zeros(1, dtype=torch.float8_e4m3fnuz))
    with pytest.raises(ConfigError, match="'odd' has dtype"):
        run(local_only, what, "gossip", workers=2, optimizer=SGD)
