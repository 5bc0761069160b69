"""One measured figure with what it is held against."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A number, its unit, what it should be, and what it was measured beside."""

    what: str
    value: float
    unit: str
    wanted: str = ""
    beside: str = ""
