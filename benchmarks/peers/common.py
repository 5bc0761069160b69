"""What the peers share: their tasks, how a step is made to last, and how it is timed."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
# Seconds that each of the four emulated workers takes at least for one gradient.
STRAGGLER = (0.02, 0.02, 0.02, 0.08)


@dataclass(frozen=True)
class Times:
    """Seconds of repeats of one thing."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Rate:
    """Samples per second of some looks, and how long the first step of the last worker took."""

    per_second: tuple[float, ...]
    start_up: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.per_second)


@dataclass(frozen=True)
class Training:
    """Steps of a large model: their seconds, samples/s of all processes, bytes of the largest."""

    step: Times
    per_second: float
    peak_bytes: int


def ideal(emulate: Sequence[float], batch: int) -> float:
    """Samples per second if nobody ever waits for anybody."""
    return sum(batch / seconds for seconds in emulate)


def timed(work: Callable[[], object], repeats: int, warm_up: int = 2) -> list[float]:
    """Seconds of each of `repeats` calls, after some that are not counted."""
    for _ in range(warm_up):
        work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def wait_until(moment: float) -> None:
    """Sleep until the monotonic clock shows `moment`."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


def peak_bytes() -> int:
    """The most memory this process has had resident, shared pages included."""
    # Not getrusage: its maximum survives exec, so a child would report its parent's.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def small_mlp(seed: int = 0) -> nn.Module:
    """The network of the digits recipe: 9,610 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def image_mlp(seed: int = 0) -> nn.Module:
    """The network of the straggler: 784-128-10."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def made_up(inputs: int, samples: int = 2048, seed: int = 0) -> Batch:
    """Random samples of ten classes, where only speed counts."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=generator)
    return x, torch.randint(10, (samples,), generator=generator)


def batches(data: Batch, size: int, seed: int, part: int = 0, parts: int = 1) -> Iterator[Batch]:
    """Shuffled batches without end; of `parts` readers with one seed, each has its own samples."""
    generator = torch.Generator().manual_seed(seed)
    x, y = data
    while True:
        order = torch.randperm(len(x), generator=generator)[part::parts]
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield x[rows], y[rows]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, until: float = 0.0
) -> float:
    """One step of a plain loop, its update not before the moment `until`; returns the loss."""
    x, y = batch
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    if until:
        wait_until(until)
    optimizer.step()
    return loss.item()


def falling(steps: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """A rate that falls to nothing over so many steps, so that a run ends where it has settled."""
    return partial(
        torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=steps
    )


def accuracy(model: nn.Module, data: Batch, size: int = 1000) -> float:
    """The share of `data` that the model gets right."""
    x, y = data
    training = model.training
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(part).argmax(1) == truth).sum())
            for part, truth in zip(x.split(size), y.split(size), strict=True)
        )
    model.train(training)
    return right / len(x)
