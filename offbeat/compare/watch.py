"""What somebody who watches a comparison hears, beside the records of its runs."""

from collections.abc import Mapping

from offbeat.compare.plan import Point
from offbeat.log.log import Listener
from offbeat.report.summary import Summary


class Watcher(Listener):
    """A listener of every run that also hears of cells; a progress display is one."""

    def planned(self, work: Mapping[Point, float], kept: int) -> None:
        """Cells to run, with their expected relative cost; `kept` others are there already."""

    def starts(self, point: Point) -> None:
        """A cell is run now."""

    def ends(self, point: Point, summary: Summary | None, failed: str = "") -> None:
        """What came of it: a summary, or why it failed."""
