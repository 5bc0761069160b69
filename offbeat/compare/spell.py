"""Lists on a command line: disciplines whose own text has commas, devices, learning rates."""

import re
from collections.abc import Iterable

from offbeat.config.text import read_value
from offbeat.discipline.course import parse
from offbeat.discipline.named import ROWS
from offbeat.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z-]*(:|$)")  # how a discipline begins; `lr=0.1` and `2` do not


def read_disciplines(texts: Iterable[str]) -> tuple[str, ...]:
    """The disciplines of lists such as `bsp,fedbuff:2,2,asp`, each as it was written.

    A part that begins with a discipline's name begins a new one; any other part belongs to the
    one before it. So `fedbuff:2,2,asp` is two disciplines.
    """
    found: list[str] = []
    for text in texts:
        mine: list[str] = []
        for part in (part.strip() for part in _parts(text)):
            if mine and _belongs(part, mine[-1]):
                mine[-1] += f",{part}"
            elif part:
                mine.append(part)
        found += mine
    if not found:
        raise ConfigError("there is no discipline to compare: write --sync bsp,ssp:3,asp")
    seen = [parse(one) for one in found]
    for index, one in enumerate(found):
        if seen[index] in seen[:index]:
            raise ConfigError(f"{one} is listed twice: leave one out, or use --repeat 2")
    return tuple(found)


def _parts(text: str) -> list[str]:
    """Split at commas that no bracket encloses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _belongs(part: str, before: str) -> bool:
    """Whether `part` is an argument of the discipline `before` it."""
    name, colon, _ = part.partition(":")
    if not _NAME.match(part):
        return bool(part)
    if name in ROWS or name == "custom" or colon or ":" not in before:
        return False
    try:  # a bare word: a setting such as `keep`, or a discipline misspelt
        parse(f"{before},{part}")
    except ConfigError:
        return False
    return True


def read_devices(text: str) -> tuple[int, ...]:
    """Training of devices such as `1,2,4,8`, in ascending order."""
    words = [word.strip() for word in text.split(",")]
    return tuple(read_value(word, int, "--devices") for word in words)


def read_rates(words: Iterable[str]) -> dict[str, float]:
    """Rates such as `0.1`, for all (under the name ""), and `asp=0.05` or `ssp:3=0.05` for one."""
    rates: dict[str, float] = {}
    for word in words:
        name, _, value = word.rpartition("=")
        if name in rates:
            what = f"of {name} " if name else ""
            raise ConfigError(f"--lr {word}: the rate {what}is given twice; leave one out")
        rates[name] = read_value(value, float, f"--lr {word}: the rate")
    return rates
