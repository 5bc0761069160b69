"""Runs side by side: which discipline on how many devices, how often, and what each came to."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from offbeat.report.digest import Digest


class Cell(msgspec.Struct):
    """One run of a comparison: its digest, or why it failed; neither while it has not been run."""

    discipline: str
    devices: int
    repeat: int = 0
    digest: Digest | None = None
    failed: str = ""


@dataclass(frozen=True)
class Grid:
    """The cells of a comparison, or the runs that a report puts side by side."""

    title: str
    cells: Sequence[Cell]
    target: float | None = None  # accuracy whose time is compared; None takes one all can be held to
    settings: dict[str, str] = field(default_factory=dict)  # shown with the results, as they are
