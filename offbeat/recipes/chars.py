"""A language model over the characters of a text file: a small transformer that reads any text."""

from functools import partial
from os import PathLike
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from offbeat.config.task import Task
from offbeat.errors import ConfigError
from offbeat.recipes.common import from_seed, whole

TEST_PARTS = 10  # the last of so many equal parts of the text is the test


def chars(
    path: str | PathLike[str],
    context: int = 64,
    stride: int | None = None,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    seed: int = 0,
) -> Task:
    """Predict every next character of the text at `path` from up to `context` before it.

    Windows start every `stride` characters; the default, `context`, lets none overlap.
    """
    stride = context if stride is None else stride
    sizes = {
        "context": context,
        "stride": stride,
        "width": width,
        "layers": layers,
        "heads": heads,
    }
    for option, value in sizes.items():
        whole(option, value, least=1)
    if width % heads:
        raise ConfigError(
            f"width={width} does not divide into heads={heads}; write for example "
            f"width={heads * (width // heads + 1)}"
        )
    text = _read(path)
    alphabet = "".join(sorted(set(text)))
    model = from_seed(seed, partial(CharTransformer, alphabet, context, width, layers, heads))
    codes = encode(text, alphabet)
    cut = len(codes) - len(codes) // TEST_PARTS
    if len(codes) - cut <= context:
        raise ConfigError(
            f"{path} has {len(codes)} characters, too few for context={context}: the last tenth, "
            f"kept for the test, must fill one window; write a context below {len(codes) - cut} "
            f"or use a text of at least {TEST_PARTS * (context + 1)} characters"
        )
    return Task(
        model=model,
        data=windows(codes[:cut], context, stride),
        loss=next_character_loss,
        test=windows(codes[cut:], context, stride),
        optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01),
        batch_size=32,
    )


def encode(text: str, alphabet: str) -> Tensor:
    """The place in `alphabet` of every character of `text`."""
    place = {character: number for number, character in enumerate(alphabet)}
    return torch.tensor([place[character] for character in text], dtype=torch.int64)


def windows(codes: Tensor, context: int, stride: int) -> TensorDataset:
    """Pairs (x, y) of `context` codes, where y is x moved on by one character."""
    # Views of the one tensor: overlapping windows cost no memory.
    spans = codes.unfold(0, context + 1, stride)
    return TensorDataset(spans[:, :-1], spans[:, 1:])


def next_character_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over every position of every window."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CharTransformer(nn.Module):
    """Logits of shape (batch, position, character); `alphabet` gives the character of a code."""

    # In the order they run, for models split over processes.
    layout_blocks = (("embed", "character", "position"), "blocks", "norm", "head")

    def __init__(self, alphabet: str, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.alphabet = alphabet
        self.character = nn.Embedding(len(alphabet), width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        # Not tied to the embedding: a model split over devices may hold the two apart.
        self.head = nn.Linear(width, len(alphabet), bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, codes: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(codes))))
        return logits

    def embed(self, codes: Tensor) -> Tensor:
        """What each character is and where it stands."""
        places = torch.arange(codes.shape[1], device=codes.device)
        states: Tensor = self.character(codes) + self.position(places)
        return states


class DecoderBlock(nn.Module):
    """Attention, then a perceptron; each reads a normalised copy and adds to what it read."""

    # What processes that have this block together share: most of its weights.
    layout_shards: ClassVar = {"mlp.0": "column", "mlp.2": "row"}

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.attention(self.attention_norm(states))
        result: Tensor = states + self.mlp(self.mlp_norm(states))
        return result


class CausalAttention(nn.Module):
    """Self-attention in which a position sees itself and what comes before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        split = self.queries_keys_values(states).unflatten(-1, (3, self.heads, -1))
        # From (batch, position, which, head, part) to three of (batch, head, position, part).
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        result: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return result


def _read(path: str | PathLike[str]) -> str:
    if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
        raise ConfigError(f"{path} is not a regular file: write path= with one of text")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the text {str(path)!r} cannot be read ({error.strerror}); "
            "write path= with the path of a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8 and try again"
        ) from error
