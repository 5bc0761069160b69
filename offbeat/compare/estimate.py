"""How long the rest of a comparison will take, from what the finished part took."""

from collections.abc import Mapping

from offbeat.compare.plan import Point


class Estimate:
    """Real seconds left, if the rest costs as much per unit of expected work as what is done."""

    def __init__(self, work: Mapping[Point, float]):
        self.missing = dict(work)
        self.done = self.spent = 0.0

    def ended(self, point: Point, seconds: float) -> None:
        """A cell has been run; one that failed early says little, and is counted all the same."""
        self.done += self.missing.pop(point)
        self.spent += seconds

    def left(
        self, now: Point | None = None, done: float = 0.0, seconds: float = 0.0
    ) -> float | None:
        """Seconds left, when of the cell `now` the share `done` took `seconds`; None at first."""
        part = done * self.missing[now] if now is not None else 0.0
        if self.done + part <= 0:
            return None
        each = (self.spent + seconds) / (self.done + part)
        return each * max(0.0, sum(self.missing.values()) - part)


def in_words(seconds: float) -> str:
    """A duration as one says it: 40 s, 3 min, 2 h 10 min."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
