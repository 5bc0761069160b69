"""Read tables of TOML: known keys, each with its reader, and errors that name the place."""

import json
import re
from collections.abc import Mapping
from typing import Any

from offbeat.config.text import nearest
from offbeat.config.units import placed, real, show
from offbeat.errors import ConfigError

MOST_WORKERS = 1_000_000
_SIZE = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kKMGT]?)(i?)B")
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_EXAMPLES = {"name": '"lab0"', "hosts": '["lab0", "lab1"]', "share": "0.5"}


def values_of(
    table: object, known: Mapping[str, Any], needed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The table's values, each read by its key's reader; `[reader]` reads each item of a list."""
    if not isinstance(table, dict):
        raise ConfigError(f"must be a table with the keys {', '.join(known)}, got {table!r}")
    for key in table:
        if key not in known:
            there = ", ".join(known)
            raise ConfigError(f'unknown key "{key}"{nearest(key, known)}; there are {there}')
    for key in needed:
        if key not in table:
            example = _EXAMPLES.get(key, '"20ms"')
            raise ConfigError(f'the key "{key}" is missing; write {key} = {example}')
    values: dict[str, Any] = {}
    for key, value in table.items():
        read = known[key]
        if not isinstance(read, list):
            values[key] = placed(key, read, value)
        elif isinstance(value, list):
            items = enumerate(value, 1)
            values[key] = tuple(placed(f"{key} {number}", read[0], item) for number, item in items)
        else:
            raise ConfigError(f"{key}: must be a list of tables, got {value!r}; write [{{...}}]")
    return values


def count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WORKERS:
        raise ConfigError(
            f"the number of workers must be a whole number from 1 to {MOST_WORKERS}, "
            f"got {value!r}; write for example 4"
        )
    return value


def size(value: Any) -> float:
    """Bytes, from a number or text such as `64KiB` or `4MB`."""
    if not isinstance(value, str):
        return real("a size", value, 'write for example "4MB" or a number of bytes')
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ConfigError(f'"{value}" is no size; write for example "64KiB", "4MB" or 4000000')
    base = 1024 if match[3] else 1000
    return float(match[1]) * float(base ** _POWER[match[2]])


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f'must be text, got {value!r}; write for example "lab0"')
    return value


def quoted(text: str) -> str:
    """A string of TOML; a printable one is written as in JSON."""
    return json.dumps(text, ensure_ascii=False)


def line_of(name: str, values: tuple[Any, ...]) -> list[str]:
    """A list of tables on one line, such as faults are; none at all if there are none."""
    tables = []
    for one in values:
        given = {key: value for key, value in vars(one).items() if value is not None}
        pairs = ", ".join(
            f"{key} = {value!r}" if key == "share" else f'{key} = "{show(value)}"'
            for key, value in given.items()
        )
        tables.append(f"{{{pairs}}}")
    return [f"{name} = [{', '.join(tables)}]"] if tables else []
