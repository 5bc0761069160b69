"""What the processes of split replicas told at the end of a run, added up."""

from collections.abc import Mapping, Sequence

from offbeat.report.summary import LayoutFigures, ProcessFigures
from offbeat.split.plan.cut import Cut


def layout_figures(
    cut: Cut | None, workers: int, words: Sequence[Mapping[str, float]] = ()
) -> LayoutFigures | None:
    """The figures of a run whose replicas are cut so; `words` are those of each worker."""
    if cut is None:
        return None
    each = cut.layout.pp * cut.layout.tp
    found = LayoutFigures(str(cut.layout), workers * each)
    if cut.predicted is not None:
        found.predicted_seconds, found.predicted_idle_share = cut.predicted
    told = [word for word in words if all(f"{process}/steps" in word for process in range(each))]
    if told:
        found.per_process = [_process(number, told) for number in range(each)]
        found.measure()
    return found


def _process(number: int, words: Sequence[Mapping[str, float]]) -> ProcessFigures:
    return ProcessFigures(
        steps=int(sum(word[f"{number}/steps"] for word in words)),
        busy=sum(word[f"{number}/busy"] for word in words),
        total=sum(word[f"{number}/total"] for word in words),
        nbytes=int(max(word[f"{number}/nbytes"] for word in words)),
    )
