"""How small values are written as text (`name`, `name(2,b=3)`) and read back from it."""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from offbeat.errors import ConfigError


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def call_text(value: Any) -> str:
    """A plain value as it is written on a command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "auto"
    return repr(float(value)) if isinstance(value, float) else str(value)


def read_value(word: str, kind: Any, where: str) -> Any:
    """Read `word` as `kind` (int, float, bool, a Literal of words, or one of those or None)."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in options and word == "auto":
        return None
    base = next(option for option in options if option is not type(None))
    if typing.get_origin(base) is typing.Literal:
        words = typing.get_args(base)
        if word not in words:
            raise ConfigError(f"{where} must be one of {', '.join(words)}, not {word!r}")
        return word
    if base is bool:
        if word not in ("yes", "no"):
            raise ConfigError(f"{where} must be yes or no, not {word!r}")
        return word == "yes"
    try:
        return base(word)
    except ValueError:
        wanted = "a whole number" if base is int else "a number"
        raise ConfigError(f"{where} must be {wanted}, not {word!r}") from None


def split_arguments(rest: str, text: str) -> tuple[list[str], dict[str, str]]:
    """Split `2,b=3,c=f(1,2)` into positional and named words; brackets keep their commas."""
    words, depth, start = [], 0, 0
    for index, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            words.append(rest[start:index])
            start = index + 1
    if depth != 0:
        raise ConfigError(f"{text!r}: brackets do not match")
    words.append(rest[start:])
    positional: list[str] = []
    named: dict[str, str] = {}
    for word in (word.strip() for word in words if rest.strip()):
        key, equals, value = word.partition("=")
        if not equals or "(" in key:
            positional.append(word)
        elif key.strip() in named:
            raise ConfigError(f"{text!r}: {key.strip()!r} is given twice")
        else:
            named[key.strip()] = value.strip()
    return positional, named


def parse_call(
    text: str,
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    positional: list[str],
    named: dict[str, str],
    readers: Mapping[str, Callable[[str], Any]] | None = None,
) -> dict[str, Any]:
    """Match words to a signature's parameters and read each as its annotation says."""
    order = [key for key, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    takes = f"{name} takes {', '.join(parameters)}" if parameters else f"{name} takes no arguments"
    if len(positional) > len(order):
        extra = positional[len(order)]
        hint = ""
        if extra in parameters:
            hint = f"; write {extra}={1 if parameters[extra].annotation is int else '...'}"
        elif parameters and not order:
            hint = f"; write {next(iter(parameters))}={extra}"
        raise ConfigError(f"{text!r}: {extra!r} has no place; {takes}{hint}")
    words = dict(zip(order, positional, strict=False))
    for key, word in named.items():
        if key not in parameters:
            raise ConfigError(f"{text!r}: unknown {key!r}{nearest(key, parameters)}; {takes}")
        if key in words:
            raise ConfigError(f"{text!r}: {key!r} is given twice")
        words[key] = word
    missing = [
        key
        for key, p in parameters.items()
        if p.default is inspect.Parameter.empty and key not in words
    ]
    if missing:
        raise ConfigError(f"{text!r}: {missing[0]} is missing; write {name}:{missing[0]}=...")
    readers = readers or {}
    return {
        key: readers[key](word)
        if key in readers
        else read_value(word, parameters[key].annotation, f"{text!r}: {key}")
        for key, word in words.items()
    }


class Choice:
    """A family of small frozen values with one word each: `inverse`, `poly(0.5)`."""

    def __init__(self, what: str, kinds: Mapping[str, type]):
        self.what = what
        self.kinds = dict(kinds)
        self.words = {kind: word for word, kind in self.kinds.items()}

    def text(self, value: Any) -> str:
        """The shortest spelling: only settings that are not the default."""
        word = self.words[type(value)]
        settings = [
            f"{f.name}={call_text(getattr(value, f.name))}"
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != f.default
        ]
        return f"{word}({','.join(settings)})" if settings else word

    def read(self, text: str) -> Any:
        """Read a spelling back; an unknown word lists the family."""
        word, bracket, rest = text.partition("(")
        if word not in self.kinds:
            raise ConfigError(
                f"unknown {self.what} {word!r}{nearest(word, self.kinds)}; "
                f"there are {', '.join(self.kinds)}"
            )
        if bracket and not rest.endswith(")"):
            raise ConfigError(f"{text!r}: the closing bracket is missing")
        kind = self.kinds[word]
        positional, named = split_arguments(rest[:-1], text)
        arguments = parse_call(text, word, inspect.signature(kind).parameters, positional, named)
        return kind(**arguments)
