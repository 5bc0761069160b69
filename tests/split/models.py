"""Models of the kinds that can be split, and one that cannot."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, WORDS = 6, 9


class Residual(nn.Module):
    """A skip connection inside one block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = value + self.inner(value)
        return result


class Tied(nn.Module):
    """A language model whose head is its embedding, with a parameter of its own."""

    layout_blocks = (("embed", "token", "place"), "layers", "norm", "head")

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(torch.randn(4, WIDTH))
        self.layers = nn.ModuleList(Residual() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, codes: Tensor) -> Tensor:
        value = self.embed(codes)
        for layer in self.layers:
            value = layer(value)
        result: Tensor = self.head(self.norm(value))
        return result

    def embed(self, codes: Tensor) -> Tensor:
        result: Tensor = self.token(codes) + self.place[: codes.shape[1]]
        return result


class Carrying(nn.Module):
    """A skip over several blocks: a dict and a tuple travel between them."""

    layout_blocks = (("begin", "first"), ("middle", "second"), "body", ("end", "last", "scale"))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.body = Body()
        self.last = nn.Linear(WIDTH, 2)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, value: Tensor) -> Tensor:
        return self.end(self.body(self.middle(self.begin(value))))

    def begin(self, value: Tensor) -> dict[str, Any]:
        first = self.first(value)
        return {"skip": first, "now": (first.relu(), len(value))}

    def middle(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        now, _ = state["now"]
        return state["skip"], self.second(now)

    def end(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        skip, now = pair
        result: Tensor = self.last(skip + self.scale * now)
        return result


class Body(nn.Module):
    """An annotated model inside an annotated one."""

    layout_blocks = (("one", "deep.a"), ("two", "deep.b"))

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.two(self.one(pair))

    def one(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0], self.deep["a"](pair[1]).tanh()

    def two(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0], self.deep["b"](pair[1])


class Opaque(nn.Module):
    """Nothing says in which order its modules run."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.one(self.two(value))
        return result


def nested() -> nn.Sequential:
    """Containers in containers, a module that comes twice, and writing in place."""
    shared = nn.ReLU(inplace=True)
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), shared),
        Residual(),
        nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), shared), nn.Linear(WIDTH, 2)),
    )


def codes() -> Tensor:
    return torch.arange(20).reshape(5, 4) % WORDS


def rows(count: int = 5) -> Tensor:
    return torch.linspace(-1, 1, count * WIDTH, dtype=torch.float64).reshape(count, WIDTH)
