"""The profiler: runs each block of a model on a sample and measures what it costs."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from offbeat.errors import ConfigError
from offbeat.model.copies import tried
from offbeat.split.plan.blocks import Block
from offbeat.split.plan.costs import BlockCost, Profile, SharedTensor
from offbeat.split.stages import Stage
from offbeat.split.tensor_shards import GATHERED, ROW, dims
from offbeat.split.tree import batch_size, mapped, size, tensors, trained_size

WARM_UP, REPEATS = 2, 5
PROBE = 1024  # elements of the parameter that an optimiser is tried on

Clock = Callable[[], float]


def clock() -> float:
    """Seconds, when everything asked of a GPU so far is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass
class _Run:
    """One block's turn in one pass over the model."""

    stage: Stage
    parameters: list[Tensor]
    entered: Any = None  # what came in, as the start of a graph
    taken: Any = None  # what the block was given, which it may write to
    left: Any = None
    saved: dict[int, int] = field(default_factory=dict)  # bytes by address


def profile(
    model: nn.Module,
    blocks: Sequence[Block],
    sample: Any,
    precision: str = "float32",
    repeats: int = REPEATS,
    clock: Clock = clock,
    words: Mapping[str, str] = MappingProxyType({}),
) -> Profile:
    """Measure every block on `sample`, one microbatch of what the model takes.

    `words` are of the modules that processes can share: what of a block's cost is theirs.

    Times are medians over `repeats` passes in training mode, after some to warm up, of a copy: the
    model itself and the random state are left as they were.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, not {repeats}; write repeats={REPEATS}")
    samples = batch_size(sample)
    with tried(model) as own:
        runs = []
        for block in blocks:
            stage = Stage(own, (block,)).train()
            runs.append(_Run(stage, [p for p in stage.parameters() if p.requires_grad]))
        try:
            _remember(runs, sample, precision)
        except Exception as error:
            raise ConfigError(
                f"the model does not take a microbatch of {_samples(samples)} in training "
                f"({type(error).__name__}: {error}): write fewer microbatches, or a larger "
                "batch_size"
            ) from error
        costs = [_bytes(run, after) for run, after in zip(runs, [*runs[1:], None], strict=True)]
        passes = [_timed(runs, sample, precision, clock) for _ in range(WARM_UP + repeats)]
        shared = [SharedTensor()] * len(runs)
        if words:
            shared = _shared(runs, sample, precision, clock, words)
    timed = passes[WARM_UP:]
    found = []
    for index, cost in enumerate(costs):
        forward = statistics.median(one[index][0] for one in timed)
        backward = statistics.median(one[index][1] for one in timed)
        found.append(BlockCost(blocks[index].name, forward, backward, **cost, shared=shared[index]))
    return Profile(tuple(found), samples)


def state_copies(optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None) -> float:
    """Tensors of a parameter's size that an optimiser keeps for it: 0 for SGD, 2 for Adam."""
    if optimizer is None:
        return 0.0
    probe = nn.Parameter(torch.zeros(PROBE))
    made = optimizer([probe])
    probe.grad = torch.zeros(PROBE)
    made.step()
    held = sum(t.nbytes for state in made.state.values() for t in tensors(dict(state)))
    # Counters of a step or two are no copies.
    return round(held / probe.nbytes, 2)


# ---------------------------------------------------------------- one pass


def _enter(run: _Run, value: Any) -> None:
    run.entered = mapped(_fresh, value)
    # A copy: the first operation may write in place, which no start of a graph allows, and the
    # sample is the caller's.
    run.taken = mapped(Tensor.clone, run.entered)


def _forward(run: _Run, precision: str) -> Any:
    kind = next((tensor.device.type for tensor in tensors(run.taken)), "cpu")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with nullcontext() if dtype is None else torch.autocast(kind, dtype):
        run.left = run.stage(run.taken)
    return run.left


def _fresh(tensor: Tensor) -> Tensor:
    """The same values as the start of a graph of their own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _timed(
    runs: Sequence[_Run], value: Any, precision: str, clock: Clock
) -> list[tuple[float, float]]:
    """Forward and backward seconds of every block in one pass."""
    forward = []
    for run in runs:
        _enter(run, value)
        since = clock()
        value = _forward(run, precision)
        forward.append(clock() - since)
    backward = []
    for run in reversed(runs):
        outputs = [tensor for tensor in tensors(run.left) if tensor.requires_grad]
        wanted = [t for t in tensors(run.entered) if t.requires_grad] + run.parameters
        seeds = [torch.ones_like(tensor) for tensor in outputs]
        since = clock()
        if outputs and wanted:
            # Unlike backward(), this leaves the gradients that the model has alone.
            torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        backward.append(clock() - since)
        run.entered = run.taken = run.left = None
    return list(zip(forward, reversed(backward), strict=True))


# ---------------------------------------------------------------- what can be shared


def _shared(
    runs: Sequence[_Run], value: Any, precision: str, clock: Clock, words: Mapping[str, str]
) -> list[SharedTensor]:
    """One forward pass with a look at every module that can be shared.

    The backward pass is taken to spend as large a share of its time there.
    """
    found = []
    for run in runs:
        watches = [
            _Watch(module, words[name], clock)
            for name, module in run.stage.named_modules()
            if name in words
        ]
        _enter(run, value)
        since = clock()
        value = _forward(run, precision)
        spent = clock() - since
        for watch in watches:
            watch.end()
        run.entered = run.taken = run.left = None
        totals = [sum(getattr(watch, key) for watch in watches) for key in _Watch.BYTES]
        time = sum(watch.seconds for watch in watches) / spent if watches and spent > 0 else 0.0
        found.append(SharedTensor(min(time, 1.0), *totals))
    return found


class _Watch:
    """Notes what one module takes and gives in a forward pass."""

    BYTES = ("parameters", "trained", "summed", "joined", "returned")

    def __init__(self, module: nn.Module, word: str, clock: Clock):
        cut = [p for key in dims(module, word) if (p := getattr(module, key)) is not None]
        self.parameters = sum(p.nbytes for p in cut)
        self.trained = sum(p.nbytes for p in cut if p.requires_grad)
        self.word, self.clock = word, clock
        self.summed = self.joined = self.returned = 0
        self.seconds = self.since = 0.0
        self.hooks = [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after),
        ]

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self.since = self.clock()

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.seconds += self.clock() - self.since
        if self.word == ROW:
            self.summed += size(output)
            return
        self.joined += size(output) if self.word == GATHERED else 0
        self.returned += trained_size(inputs)

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()


def _samples(number: int) -> str:
    return "1 sample" if number == 1 else f"{number} samples"


# ---------------------------------------------------------------- bytes


def _remember(runs: Sequence[_Run], value: Any, precision: str) -> None:
    """One pass that keeps inputs and outputs and notes what autograd saves."""
    for run in runs:

        def note(tensor: Tensor, run: _Run = run) -> Tensor:
            run.saved[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        _enter(run, value)
        with saved_tensors_hooks(note, lambda tensor: tensor):
            value = _forward(run, precision)


def _bytes(run: _Run, after: _Run | None) -> dict[str, int]:
    own = [*run.stage.parameters(), *run.stage.buffers()]
    known = _addresses(own) | _addresses(tensors(run.taken))
    kept = {address: count for address, count in run.saved.items() if address not in known}
    # What only the next block saves is its input, this block's output, and stays for it.
    if after is not None:
        for mine, taken in zip(tensors(run.left), tensors(after.taken), strict=True):
            if _address(taken) in after.saved and _address(mine) not in known:
                kept[_address(mine)] = mine.untyped_storage().nbytes()
    return {
        "parameters": sum(t.nbytes for t in own),
        "trained": sum(parameter.nbytes for parameter in run.parameters),
        "kept": sum(kept.values()),
        "input": size(run.entered),
        "output": size(run.left),
        "returned": trained_size(run.left),
    }


def _addresses(found: Iterable[Tensor]) -> set[int]:
    return {_address(tensor) for tensor in found}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
