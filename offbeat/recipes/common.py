"""What the recipes share: models made from a seed, and the check of whole-number options."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from offbeat.errors import ConfigError

M = TypeVar("M", bound=nn.Module)


def from_seed(seed: int, build: Callable[[], M]) -> M:
    """The model that `build` makes when the generator starts at `seed`."""
    whole("seed", seed, least=0)
    # Only the CPU generator is forked and seeded: torch.manual_seed would also reach every device.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def whole(option: str, value: Any, least: int) -> None:
    """Refuse a `value` of `option` that is no whole number or is below `least`."""
    # True is an int to Python, and a mistake here.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(
            f"{option} must be a whole number of at least {least}, not {value!r}; "
            f"write for example {option}={least}"
        )
