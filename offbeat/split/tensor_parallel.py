"""A module of which each of several processes has a part: what they exchange on the way and back.

What lies between a `column` and a `row` is in parts. Everything else is whole, and equal in all
processes to the bit, because sums are made in the order of the shards everywhere.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from offbeat.split.tensor_group import TensorGroup
from offbeat.split.tensor_shards import COLUMN, GATHERED, ROW, Shards, dims, piece


def share(stage: nn.Module, shards: Shards, peers: TensorGroup) -> None:
    """Leave in `stage` this process's part of every module that the plan names."""
    made: dict[int, nn.Parameter] = {}
    done: set[int] = set()
    for name, module in stage.named_modules(remove_duplicate=False):
        word = shards.words.get(name)
        if word is None or id(module) in done:
            continue
        done.add(id(module))
        for key, dim in dims(module, word).items():
            whole = getattr(module, key)
            if whole is None:
                continue
            if id(whole) not in made:
                part = piece(whole.detach(), dim, peers.me, shards.count).clone()
                made[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
            setattr(module, key, made[id(whole)])
            # Two modules of a stage may share a parameter, which is looked for by its identity.
            made[id(made[id(whole)])] = made[id(whole)]
        module.__class__ = _KINDS[isinstance(module, nn.Embedding), word]
        module.peers = peers


# ---------------------------------------------------------------- ways between whole and parts


class _Spread(Function):
    """Something whole goes into parts; on the way back, what the parts say of it is added up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, peers: TensorGroup) -> Tensor:
        ctx.peers = peers
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.total(gradient), None


class _Sum(Function):
    """Parts are added up to something whole; on the way back, each gets all of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, peers: TensorGroup) -> Tensor:
        return peers.total(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Join(Function):
    """Parts side by side become something whole; on the way back, each gets its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, peers: TensorGroup) -> Tensor:
        ctx.peers = peers
        return peers.joined(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return piece(gradient, -1, ctx.peers.me, ctx.peers.count).contiguous(), None


class _Own(Function):
    """Of something whole each takes its part; on the way back, they are put side by side."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, peers: TensorGroup) -> Tensor:
        ctx.peers = peers
        return piece(value, -1, peers.me, peers.count).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.joined(gradient), None


def _through(way: type[Function], value: Tensor, peers: TensorGroup) -> Tensor:
    found: Tensor = way.apply(value, peers)  # type: ignore[no-untyped-call]
    return found


# ---------------------------------------------------------------- modules in parts


class ColumnLinear(nn.Linear):
    """Some of the outputs; they stay in parts, for a `row` that follows."""

    peers: TensorGroup

    def forward(self, value: Tensor) -> Tensor:
        found = F.linear(_through(_Spread, value, self.peers), self.weight, self.bias)
        if self.training:
            self.peers.part()
        return found


class GatheredLinear(nn.Linear):
    """Some of the outputs; everyone gets them all."""

    peers: TensorGroup

    def forward(self, value: Tensor) -> Tensor:
        found = F.linear(_through(_Spread, value, self.peers), self.weight, self.bias)
        return _through(_Join, found, self.peers)


class RowLinear(nn.Linear):
    """Some of the inputs, in parts already or still whole; the products are added up."""

    peers: TensorGroup

    def forward(self, value: Tensor) -> Tensor:
        self.peers.meet()
        if value.shape[-1] != self.weight.shape[1]:
            value = _through(_Own, value, self.peers)
        found = _through(_Sum, F.linear(value, self.weight), self.peers)
        # The bias counts once. Under autocast the sum is shorter than the bias.
        return found if self.bias is None else found + self.bias.to(found.dtype)


class ColumnEmbedding(nn.Embedding):
    """Some of the numbers of every word; they stay in parts, for a `row` that follows."""

    peers: TensorGroup

    def forward(self, codes: Tensor) -> Tensor:
        found = super().forward(codes)
        if self.training:
            self.peers.part()
        return found


class GatheredEmbedding(nn.Embedding):
    """Some of the numbers of every word; everyone gets them all."""

    peers: TensorGroup

    def forward(self, codes: Tensor) -> Tensor:
        return _through(_Join, super().forward(codes), self.peers)


class RowEmbedding(nn.Embedding):
    """Some of the words; what the others know of a word is added, and that is zero but for one."""

    peers: TensorGroup

    def forward(self, codes: Tensor) -> Tensor:
        count = len(self.weight)
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.num_embeddings:
            raise IndexError("index out of range in self")  # it would be nobody's, and so zero
        here = codes - self.peers.me * count
        elsewhere = (here < 0) | (here >= count)
        padding = None
        if self.padding_idx is not None and self.padding_idx // count == self.peers.me:
            padding = self.padding_idx % count
        found = F.embedding(here.masked_fill(elsewhere, 0), self.weight, padding)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return _through(_Sum, found, self.peers)


_KINDS: dict[tuple[bool, str], type[nn.Module]] = {
    (False, COLUMN): ColumnLinear,
    (False, GATHERED): GatheredLinear,
    (False, ROW): RowLinear,
    (True, COLUMN): ColumnEmbedding,
    (True, GATHERED): GatheredEmbedding,
    (True, ROW): RowEmbedding,
}
