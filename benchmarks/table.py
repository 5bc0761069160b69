"""Figures as a table for a hundred columns, and as JSON."""

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.figure import Figure, quantity

WIDTH = 100


def table(figures: Sequence[Figure]) -> Table:
    """One row for each figure, its peers below each other beside it."""
    result = Table(box=None, pad_edge=False, width=WIDTH, padding=(0, 2, 0, 0))
    result.add_column("what", overflow="fold", width=30)
    result.add_column("measured", overflow="fold", width=14)
    result.add_column("wanted", overflow="fold", width=12)
    result.add_column("kept", width=4)
    result.add_column("beside", overflow="fold", ratio=1)
    for figure in figures:
        measured = "not measured" if figure.value is None else quantity(figure.value, figure.unit)
        beside = [*map(str, figure.peers), *([figure.beside] if figure.beside else [])]
        row = (figure.what, measured, figure.wanted, figure.judged, "\n".join(beside))
        # As text: a bracket in a note is a bracket, not markup.
        result.add_row(*map(Text, row))
    return result


def verdict(figures: Sequence[Figure]) -> str:
    """How many of the bounds are kept."""
    judged = [figure for figure in figures if figure.judged]
    kept = sum(figure.passed is True for figure in judged)
    return f"{kept} of {len(judged)} bounds kept"


def as_json(machine: dict[str, Any], figures: Sequence[Figure]) -> str:
    """Everything that was measured, and on what."""
    whole = {"machine": machine, "figures": [figure.plain() for figure in figures]}
    return json.dumps(whole, indent=1) + "\n"
