"""Complete tasks as functions: model, data, loss and rate of known problems, by name or by call."""

import inspect
from collections.abc import Callable
from typing import Any

from offbeat.config.task import Task
from offbeat.errors import ConfigError
from offbeat.recipes.chars import chars
from offbeat.recipes.digits import digits
from offbeat.recipes.mnist import mnist
from offbeat.recipes.resnet import resnet50

__all__ = ["RECIPES", "chars", "digits", "mnist", "recipe", "resnet50"]

RECIPES: dict[str, Callable[..., Task]] = {
    "digits": digits,
    "mnist": mnist,
    "chars": chars,
    "resnet50": resnet50,
}


def recipe(name: str, **options: Any) -> Task:
    """The task of the recipe `name`, made with `options`."""
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}; write one of {', '.join(RECIPES)}")
    make = RECIPES[name]
    takes = inspect.signature(make).parameters
    unknown = [option for option in options if option not in takes]
    if unknown:
        raise ConfigError(
            f"the recipe {name} has no option {_names(unknown)}; it takes {_described(takes)}"
        )
    missing = [
        option
        for option, parameter in takes.items()
        if parameter.default is parameter.empty and option not in options
    ]
    if missing:
        raise ConfigError(
            f"the recipe {name} needs a value for {_names(missing)}; it takes {_described(takes)}"
        )
    return make(**options)


def _names(options: list[str]) -> str:
    return ", ".join(repr(option) for option in options)


def _described(parameters: Any) -> str:
    """The options with their defaults, as in `folder (required), seed=0, limit=None`."""
    return ", ".join(
        f"{option} (required)"
        if parameter.default is parameter.empty
        else f"{option}={parameter.default!r}"
        for option, parameter in parameters.items()
    )
