"""Who in a split replica waits for what from whom: notes in shared memory that anybody can read."""

from collections.abc import Callable, Sequence

from numpy import int64
from numpy.typing import NDArray

from offbeat.split.channel import Tag

FIELDS = 6  # of each process
WAITS, KIND, STAGE, NUMBER, OTHER, STEP = range(FIELDS)
KINDS = (
    *("activation", "gradient", "tied gradient", "order", "answer", "made", "shard", "output"),
)


class WaitNotes:
    """The notes of one worker's processes, a row for each."""

    def __init__(self, cells: NDArray[int64]):
        self.cells = cells

    def writer(
        self, process: int, step: Callable[[], int]
    ) -> Callable[[int | None, Tag | None], None]:
        """What a mesh tells: in `process`, whose number of the present step `step` gives."""
        row = self.cells[process]

        def note(other: int | None, tag: Tag | None) -> None:
            if other is None or tag is None:
                row[WAITS] = 0
                return
            kind, stage, number = tag
            row[KIND:] = (KINDS.index(kind), stage, number, other, step())
            row[WAITS] = 1  # last, so that a reader finds the rest in place

        return note

    def told(self) -> str:
        """In words, what every process does; who computes or stands still comes last."""
        rows: Sequence[Sequence[int]] = self.cells.tolist()
        waiting = [_waits(process, row) for process, row in enumerate(rows) if row[WAITS]]
        others = [process for process, row in enumerate(rows) if not row[WAITS]]
        if others and len(rows) > 1:
            names = " and ".join(map(str, others))
            waiting.append(f"process {names} {'waits' if len(others) == 1 else 'wait'} for nobody")
        return "; ".join(waiting)


def _waits(process: int, row: Sequence[int]) -> str:
    kind, stage, number = KINDS[row[KIND]], row[STAGE], row[NUMBER]
    what = {
        "activation": f"activation {number} for stage {stage}",
        "gradient": f"gradient {number} for stage {stage}",
        "tied gradient": f"the tied gradient of stage {number}",
        "output": f"output {number}",
        "order": "an order",
        "shard": "its share of a module",
    }.get(kind, "an answer")
    return f"process {process} waits for {what} from process {row[OTHER]} since step {row[STEP]}"
