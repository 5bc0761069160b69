"""Models and losses of many kinds, each with what a plain PyTorch loop makes of it.

A case is made anew for each use, with the same numbers: nothing is copied that a copy might lose.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.data.reader import Reader

SAMPLES, BATCH, EPOCHS = 16, 4, 2
SGD = partial(torch.optim.SGD, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@dataclass
class Case:
    """A task as a user has it; `refused` are words of the error where it cannot be trained."""

    model: nn.Module
    loss: Any = F.mse_loss
    optimizer: Any = MOMENTUM
    inputs: Tensor | None = None
    refused: str = ""
    tolerance: float = 0.0  # 0 for the same bits
    mean: bool = True  # whether lock-step of several workers is a larger batch
    dtype: torch.dtype = torch.float64

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)
        y = torch.randn(SAMPLES, 2, dtype=torch.float64, generator=generator)
        x = x.to(self.dtype) if self.inputs is None else self.inputs
        return TensorDataset(x, y.to(self.dtype))


def plain(case: Case, batch: int = BATCH) -> nn.Module:
    """The loop that a PyTorch user would write, over the same order of samples."""
    model, data = case.model, case.data()
    rule = case.optimizer([p for p in model.parameters() if p.requires_grad])
    for epoch in range(EPOCHS):
        for rows in Reader(data, 0).order(epoch).split(batch):
            rule.zero_grad()
            x, y = (tensor[rows] for tensor in data.tensors)
            if isinstance(case.loss, ob.BatchLoss):
                loss = case.loss.fn(model, (x, y))
            else:
                loss = case.loss(model(x), y)
            loss.backward()
            rule.step()
    return model


def train(case: Case, engine: str, **how: Any) -> ob.Run:
    settings = {"workers": 1, "batch_size": BATCH, "epochs": EPOCHS, "optimizer": case.optimizer}
    return ob.train(case.model, case.data(), case.loss, engine=engine, **settings | how)


# ---------------------------------------------------------------- models


def mlp(*, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double()


def tied() -> Case:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    model[2].weight = model[0].weight
    return Case(model)


def module_used_twice() -> Case:
    inner = nn.Linear(3, 3)
    return Case(nn.Sequential(inner, nn.Tanh(), inner, nn.Linear(3, 2)).double())


def tied_by_memory() -> Case:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    model[2].weight.data = model[0].weight.data
    return Case(model, refused="over the same memory")


def buffer_over_a_parameter() -> Case:
    model = mlp()
    model.register_buffer("seen", model[0].weight.data[1:])
    return Case(model, refused="over the same memory")


def view_of_a_parameter() -> Case:
    """A view that is no tensor of the model's own, as `state_dict` sees it."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.rows = [self.body[2].weight[:, :2]]

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + self.rows[0].sum()

    return Case(Looking(), refused="over the same memory")


def without_a_copy() -> Case:
    """Batch norm whose last batch has to be tried, in a model that holds a generator."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model.handle = (number for number in range(3))
    return Case(model, mean=False)


def frozen() -> Case:
    model = mlp()
    model[0].requires_grad_(False)
    return Case(model)


def part_in_evaluation_mode() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[1].running_mean.fill_(0.3)
    model[1].eval()
    model[2].eval()
    return Case(model.double())


def all_in_evaluation_mode() -> Case:
    return Case(mlp().eval(), refused=r"evaluation mode: call model\.train\(\)")


def batch_norm() -> Case:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.2), nn.Linear(4, 2))
    return Case(model.double(), mean=False)


def masked_by_a_hook() -> Case:
    model = mlp()
    mask = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    model[2].weight.register_hook(lambda gradient: -gradient)
    return Case(model)


def hook_after_accumulation() -> Case:
    model = mlp()

    def shrink(parameter: Tensor) -> None:
        parameter.grad.mul_(0.25)

    model[0].weight.register_post_accumulate_grad_hook(shrink)
    return Case(model)


def hooks_on_modules() -> Case:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out * 0.5)
    model[2].register_full_backward_hook(lambda module, ins, outs: (ins[0] * 0.5,))
    return Case(model)


class Buffers(nn.Module):
    """Buffers of all kinds that stay as they are, and some that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("turn", torch.tensor([1 + 2j, -0.5j], dtype=torch.complex128))
        self.register_buffer("large", torch.tensor([2**53 + 1, 2**62 + 3]))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("bytes", torch.tensor([255, 1], dtype=torch.uint8))
        self.register_buffer("brief", torch.tensor([0.1], dtype=torch.bfloat16))
        self.register_buffer("passing", torch.tensor([1.5]), persistent=False)
        self.register_buffer("steps", torch.tensor(2**53 + 1))
        self.register_buffer("spin", torch.tensor([1.0 + 1.0j], dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.spin = self.spin * (0.8 + 0.6j)  # a new tensor in its place
        return self.body(x) * self.turn.abs().max()


class LateBuffer(nn.Module):
    """Has no statistics before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.detach().mean(0)
        return self.body(x - self.first)


class Counting(nn.Module):
    """What it computes depends on how often it has."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls, self.seen = mlp(), 0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen[0] += 0.1
        return self.body(x) / (1 + 0.1 * self.calls + self.seen[0])


class Shapes(nn.Module):
    """Parameters with no dimension, with no element, transposed, in lists and in dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(2, 3, dtype=torch.float64).T)
        self.list = nn.ParameterList([torch.zeros(2, dtype=torch.float64)])
        self.dict = nn.ParameterDict({"a.b"[0]: torch.ones(2, dtype=torch.float64)})

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.turned) * self.dict["a"] + self.list[0]


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "extra"):
            self.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
        return self.body(x) * self.extra


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[..., None])[0][:, -1])


class Bag(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1))


def sparse(optimizer: Any = SGD, refused: str = "") -> Case:
    words = torch.arange(SAMPLES * 3).view(SAMPLES, 3) % 7
    return Case(Bag().double(), F.mse_loss, optimizer, words, refused, 1e-12)


def many_tensors() -> Case:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(
                [torch.full((1 + i % 3,), 1e-3 * i, dtype=torch.float64) for i in range(2000)]
            )
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + torch.cat(list(self.parts)).sum() * 1e-6

    return Case(Many())


def old_weight_norm() -> Case:
    model = mlp()
    nn.utils.weight_norm(model[0])
    return Case(model)


def parametrized() -> Case:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).T

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrizations.weight_norm(model[2])
    return Case(model)


def spectral() -> Case:
    model = mlp()
    parametrizations.spectral_norm(model[0])
    return Case(model, mean=False)


def pruned() -> Case:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return Case(model)


def scripted() -> Case:
    # What its compiler makes of a step differs in the last bits from one step to the next.
    return Case(torch.jit.script(mlp()), tolerance=1e-12)


def traced() -> Case:
    example = torch.zeros(2, 3, dtype=torch.float64)
    return Case(torch.jit.trace(mlp(), example), tolerance=1e-12)


def compiled() -> Case:
    return Case(torch.compile(mlp(), backend="eager"))


def lazy() -> Case:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    return Case(model, refused="is lazy and has no shape yet", dtype=torch.float32)


def no_longer_lazy() -> Case:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    model(torch.zeros(1, 3))
    return Case(model.double())


def half(dtype: torch.dtype) -> Case:
    return Case(mlp(width=5).to(dtype), optimizer=SGD, tolerance=0.05, dtype=dtype)


# ---------------------------------------------------------------- losses


def loss_reads_the_model() -> Case:
    model = mlp()
    anchor = [p.detach().clone() + 0.1 for p in model.parameters()]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        pulls = zip(model.parameters(), anchor, strict=True)
        return F.mse_loss(output, target) + sum(((p - a) ** 2).sum() for p, a in pulls)

    return Case(model, loss)


def loss_reads_features() -> Case:
    model, features = mlp(), {}
    model[1].register_forward_hook(lambda module, args, out: features.update(hidden=out))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + features["hidden"].abs().mean()

    return Case(model, loss)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, target)


def loss_with_a_parameter() -> Case:
    return Case(mlp(), Temperature().double(), refused="is not the model's")


def loss_with_a_leaf() -> Case:
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    return Case(mlp(), lambda o, t: F.mse_loss(o * scale, t), refused="is not the model's")


def distilled() -> Case:
    teacher = mlp().requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y) + F.mse_loss(model(x), teacher(x))

    return Case(mlp(), ob.BatchLoss(loss))


def gradient_penalty() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        x = x.detach().clone().requires_grad_(True)
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, y) + (slope**2).mean()

    return Case(mlp(), ob.BatchLoss(loss))


def detached() -> Case:
    return Case(mlp(), lambda o, t: F.mse_loss(o.detach(), t), refused="gradient")


ZOO: dict[str, Callable[[], Case]] = {
    "plain": lambda: Case(mlp()),
    "tied": tied,
    "module used twice": module_used_twice,
    "tied by memory": tied_by_memory,
    "buffer over a parameter": buffer_over_a_parameter,
    "view of a parameter": view_of_a_parameter,
    "without a copy": without_a_copy,
    "frozen": frozen,
    "part in evaluation mode": part_in_evaluation_mode,
    "all in evaluation mode": all_in_evaluation_mode,
    "batch norm": batch_norm,
    "masked by a hook": masked_by_a_hook,
    "hook after accumulation": hook_after_accumulation,
    "hooks on modules": hooks_on_modules,
    "buffers": lambda: Case(Buffers()),
    "late buffer": lambda: Case(LateBuffer(), refused="is made while the model computes"),
    "counting": lambda: Case(Counting(), mean=False),
    "shapes": lambda: Case(Shapes()),
    "growing": lambda: Case(Growing(), refused="is made while the model computes"),
    "LSTM": lambda: Case(Recurrent().double()),
    "sparse": sparse,
    "sparse, adagrad": lambda: sparse(partial(torch.optim.Adagrad, lr=0.1)),
    "sparse, adam": lambda: sparse(partial(torch.optim.Adam, lr=0.1), "gets sparse gradients"),
    "sparse, momentum": lambda: sparse(MOMENTUM, "gets sparse gradients"),
    "many tensors": many_tensors,
    "old weight norm": old_weight_norm,
    "parametrized": parametrized,
    "spectral": spectral,
    "pruned": pruned,
    "scripted": scripted,
    "traced": traced,
    "compiled": compiled,
    "lazy": lazy,
    "no longer lazy": no_longer_lazy,
    "bfloat16": lambda: half(torch.bfloat16),
    "float16": lambda: half(torch.float16),
    "loss reads the model": loss_reads_the_model,
    "loss reads features": loss_reads_features,
    "loss with a parameter": loss_with_a_parameter,
    "loss with a leaf": loss_with_a_leaf,
    "distilled": distilled,
    "gradient penalty": gradient_penalty,
    "detached": detached,
}


def made(name: str) -> Case:
    """The case with the numbers that it always has."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PyTorch says that there are newer ways than some of these, and those are tried too.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(3)
        return ZOO[name]()


# ---------------------------------------------------------------- what there is to compare


def shape(model: nn.Module) -> Iterator[Any]:
    """All that a plain loop would not have changed, in an order."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.dtype, parameter.requires_grad, names.setdefault(id(parameter), name)
        yield name, type(parameter).__name__, parameter.stride()
        yield name, len(parameter._backward_hooks or {})
        yield name, len(getattr(parameter, "_post_accumulate_grad_hooks", None) or {})
    for name, module in model.named_modules():
        yield name, type(module).__name__, module.training
        if not isinstance(module, torch.jit.ScriptModule):
            yield len(module._forward_hooks), len(module._backward_hooks)
            yield len(module._forward_pre_hooks)
    yield list(model.state_dict())


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())
