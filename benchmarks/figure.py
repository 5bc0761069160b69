"""One measured figure: its bound, whether it keeps it, and what was measured beside it."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Peer:
    """What another way of doing the same took in the same run; no value where it cannot run."""

    name: str
    value: float | None = None
    unit: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name}: {self.note or 'not measured'}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.name} {quantity(self.value, self.unit)}{note}"


@dataclass(frozen=True)
class Figure:
    """A number, its unit, the bound it should keep, and its peers."""

    what: str
    value: float | None
    unit: str
    wanted: str = ""
    beside: str = ""
    at_most: float | None = None
    at_least: float | None = None
    peers: tuple[Peer, ...] = ()

    def __post_init__(self) -> None:
        if not self.wanted:
            bounds = (("at most", self.at_most), ("at least", self.at_least))
            said = " and ".join(
                f"{words} {bound:g}" for words, bound in bounds if bound is not None
            )
            object.__setattr__(self, "wanted", said)

    @property
    def passed(self) -> bool | None:
        """Whether the value keeps its bounds; None where there is no value or no bound."""
        if self.value is None or (self.at_most is None and self.at_least is None):
            return None
        # Asked for what is wanted, so that a value that is not a number never passes.
        low = self.at_least is None or self.value >= self.at_least
        high = self.at_most is None or self.value <= self.at_most
        return low and high

    @property
    def judged(self) -> str:
        """The verdict in one word, and nothing where nothing is asked."""
        if self.at_most is None and self.at_least is None:
            return ""
        return {True: "yes", False: "NO", None: "?"}[self.passed]

    def plain(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {**asdict(self), "passed": self.passed}


def quantity(value: float, unit: str) -> str:
    """Three digits or all before the point, then the unit: `0.123 s`, `5,200 samples/s`."""
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}".strip()
