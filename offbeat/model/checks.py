"""Which models and losses are refused, because they would come back wrong or change in a run."""

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from offbeat.errors import ConfigError

# Where PyTorch keeps the hooks of a tensor.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# What a dense gradient is the same as a sparse one to: rows without a gradient stay as they are.
_SPARSE = (torch.optim.SGD, torch.optim.Adagrad)
# Attributes of every module, where PyTorch itself keeps parameters, buffers and modules.
_OF_PYTORCH = frozenset(vars(nn.Module()))


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be laid out in flat buffers and come back as it was."""
    for name, tensor in _named(model):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name!r} is lazy and has no shape yet: call the model once on a batch before "
                "training, so that it knows"
            )
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"{name!r} lies on {tensor.device}: leave the model on the CPU (model.cpu()) and "
                f"say device='{tensor.device}': each worker brings its own there"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            weight = f"{name}.weight" if name else "weight"
            if module.weight.requires_grad:
                raise ConfigError(
                    f"{weight!r} has a max_norm, which writes the parameters in forward, and a "
                    "worker's write lasts until its next pull: leave max_norm out, and pass "
                    f'constrain=ob.MaxNorm({module.max_norm:g}, "{weight}")'
                )
    _check_ties(model)


def check_mode(model: nn.Module) -> None:
    """Training leaves every module in its mode, so that frozen parts stay as they are."""
    if not model.training:
        raise ConfigError(
            "the model is in evaluation mode: call model.train() first; parts that are to stay in "
            "evaluation mode, such as frozen batch norm, can be put there afterwards"
        )


def check_hooks(model: nn.Module) -> None:
    """The stages of a layout have parameters of their own, which hooks would not follow."""
    for name, parameter in model.named_parameters():
        if any(getattr(parameter, kind, None) for kind in HOOKS):
            raise ConfigError(
                f"{name!r} has a hook, and a layout computes with parameters of its own, which "
                "would not have it: leave layout out, or write what the hook does into forward"
            )


def check_copies(model: nn.Module) -> None:
    """The stages of a layout have modules of their own too."""
    try:
        copy.deepcopy(model)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and a layout computes "
            "with modules of its own: leave layout out, or let forward make what has no copy"
        ) from error


def made_of_torch(model: nn.Module, loss: Any) -> bool:
    """Whether model and loss are PyTorch's own, with nothing of the user's hung into them."""
    ours = "torch.nn.modules."
    for module in model.modules():
        held = vars(module)
        hooked = any(found for name, found in held.items() if name.endswith("_hooks"))
        if not type(module).__module__.startswith(ours) or hooked or "forward" in held:
            return False
    for tensor in model.parameters():
        if any(getattr(tensor, kind, None) for kind in HOOKS):
            return False
    function = getattr(loss, "__module__", None) == "torch.nn.functional"
    return function or (isinstance(loss, nn.Module) and made_of_torch(loss, F.mse_loss))


def sparse_parameters(model: nn.Module) -> tuple[str, ...]:
    """Parameters whose gradients have only the rows that a batch has looked up."""
    return tuple(
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    )


def check_sparse(names: Sequence[str], rule: torch.optim.Optimizer) -> None:
    """The store adds up whole tensors, which is the same only to rules that leave rows alone."""
    kind = type(rule).__name__
    idle = all(
        not group.get("momentum") and not group.get("weight_decay") for group in rule.param_groups
    )
    if type(rule) not in _SPARSE or not idle:
        raise ConfigError(
            f"{names[0]!r} gets sparse gradients, and {kind} would treat rows without a gradient "
            "otherwise than with dense ones: use SGD or Adagrad without momentum and weight "
            "decay, or sparse=False"
        )


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Views of what is trained that modules hold as plain attributes, or in lists and dicts.

    They would go on looking at memory that training has left.
    """
    known = {id(tensor) for _, tensor in _named(model)}
    trained = {_memory(p) for p in model.parameters() if p.requires_grad and p.numel()}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _OF_PYTORCH:
                continue
            inside = value.values() if isinstance(value, dict) else value
            for tensor in inside if isinstance(value, dict | list | tuple) else [value]:
                if not isinstance(tensor, Tensor) or id(tensor) in known:
                    continue
                if tensor.layout == torch.strided and _memory(tensor) in trained:
                    yield f"{prefix}.{key}" if prefix else key, tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_ties(model: nn.Module) -> None:
    """One tensor under two names is known by its identity; memory that two tensors share is not."""
    spans: list[tuple[int, int, str]] = []
    for name, tensor in [*_named(model), *_held(model)]:
        if tensor.numel() and tensor.layout == torch.strided:
            last = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), name))
    for (_, stop, one), (start, _, other) in pairwise(sorted(spans)):
        if start < stop:
            raise ConfigError(
                f"{one!r} and {other!r} are two tensors over the same memory, which training would "
                "take apart: tie them as one parameter (b.weight = a.weight), or clone one"
            )


# ---------------------------------------------------------------- what a loss was computed from


def leaves(loss: Tensor) -> list[Tensor]:
    """The tensors at which the graph of `loss` begins and a gradient would arrive."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        todo.extend(following for following, _ in node.next_functions)
    return found


def strangers(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """Tensors that a gradient would arrive at and that are no parameters of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return [leaf for leaf in leaves(loss) if id(leaf) not in own]


def check_strangers(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Refuse a loss that would train what is not the model's: nobody would apply its gradient.

    What a loss makes for itself, as a gradient penalty does, is another tensor each time; what two
    computations of it have in common was there before.
    """
    again = {id(leaf) for leaf in second}
    for leaf in first:
        if id(leaf) in again:
            raise ConfigError(
                f"the loss depends on a tensor of shape {tuple(leaf.shape)} that requires a "
                "gradient and is not the model's, so that it would not be trained: make it a "
                "parameter of the model and pass loss=ob.BatchLoss(fn) with fn(model, batch), or "
                "freeze it with requires_grad_(False)"
            )


class Trained:
    """The parameters of a model when its run began, and which of them were trainable."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.names = dict(model.named_parameters())
        self.each = list(self.names.values())
        self.frozen = [name for name, p in self.names.items() if not p.requires_grad]

    def check(self) -> None:
        """Refuse parameters that the run does not know; cheap enough for every step."""
        now = list(self.model.parameters())
        same = len(now) == len(self.each)
        if not same or any(a is not b for a, b in zip(now, self.each, strict=True)):
            self._refuse_others()
        for name in self.frozen:
            if self.names[name].requires_grad:
                raise ConfigError(
                    f"parameter {name!r} was frozen when the run began and requires a gradient "
                    "now, but the run trains what was trainable at run.batches(...): unfreeze it "
                    "before that; to let it rest at first, give it a group with a schedule of its "
                    "own, or set its gradient to None until then"
                )

    def _refuse_others(self) -> None:
        now = dict(self.model.named_parameters())
        new = [name for name, p in now.items() if self.names.get(name) is not p]
        gone = [name for name in self.names if name not in now]
        what = f"{new[0]!r} is new" if new else f"{gone[0]!r} is gone"
        raise ConfigError(
            f"the model has other parameters than when the run began: {what}, and the run would "
            "not train it: build the whole model before run.replica(model), and change it no more"
        )


def check_script_loss(loss: Tensor, model: nn.Module) -> None:
    """Refuse parameters beside the replica in a script's loss: `run.optimizer` has not got them.

    A tensor that only requires a gradient may be the script's own business, as an input is whose
    slope is asked for.
    """
    for leaf in strangers(loss, model):
        if isinstance(leaf, nn.Parameter):
            raise ConfigError(
                f"the loss depends on a parameter of shape {tuple(leaf.shape)} that is not the "
                "replica's, so that workers would not train it together: put both into one module, "
                "run.replica(nn.ModuleList([model, other])), or freeze it with "
                "requires_grad_(False)"
            )
