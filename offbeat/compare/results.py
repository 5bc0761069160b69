"""The figures of every cell as JSON and CSV, and as a table for a terminal."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from offbeat.compare.plan import ComparisonPlan, Point
from offbeat.folder.disk import write_json
from offbeat.report import grid as figure
from offbeat.report.digest import RunDigest
from offbeat.report.grid import Aim, Cell, CellGroup, Grid, Spread
from offbeat.report.score import ACCURACY, Score
from offbeat.report.tables import rate, seconds, share

_COUNTED = (
    *(
        "seconds",
        "updates",
        "samples",
        "samples_per_second",
        "accuracy",
        "loss",
        "metric",
        "train_loss",
    ),
    *("staleness_mean", "staleness_max", "wait_share", "bytes_sent", "bytes_received"),
    *("dropped", "refused", "lost", "skipped", "parameter_hash"),
)

_NAME = 10  # letters of a score in the head of a column


def write_results(
    out: Path,
    grid: Grid,
    plan: ComparisonPlan,
    folders: Mapping[Point, Path],
    impossible: Mapping[Point, str],
) -> dict[str, Any]:
    """Write results.json and results.csv; returns what is in the first."""
    aim, score = grid.aim(), grid.score()
    alone = {
        (group.discipline, group.devices): span.mean
        for group in grid.groups()
        if group.devices == 1 and (span := group.span(figure.speed)) is not None
    }
    cells = []
    for point, cell in zip(plan.points(), grid.cells, strict=True):
        row: dict[str, Any] = {
            "discipline": point.discipline,
            "devices": point.devices,
            "repeat": point.repeat,
            "seed": plan.seed + point.repeat,
            "state": _state(cell, point in impossible),
            "error": cell.failed or None,
            "folder": str(folders[point]) if point not in impossible else None,
        }
        cells.append(row | _figures(cell.digest, aim, alone.get((point.discipline, 1))))
    results = {
        "title": grid.title,
        "settings": grid.settings,
        "score": score and {"name": score.name, "higher_is_better": score.higher},
        "target": aim and aim.target,
        "target_given": plan.target is not None,
        "virtual": any(d.virtual for d in grid.digests()),
        "cells": cells,
    }
    write_json(out / "results.json", results)
    _write_csv(out / "results.csv", cells)
    return results


def _state(cell: Cell, impossible: bool) -> str:
    if impossible:
        return "impossible"
    return "failed" if cell.digest is None else "finished"


def _figures(digest: RunDigest | None, aim: Aim | None, alone: float | None) -> dict[str, Any]:
    """Of a cell, or the same names without figures; `alone` is the speed of one device."""
    if digest is None:
        return dict.fromkeys(_figures_of_none)
    summary = digest.summary
    return {name: getattr(summary, name) for name in _COUNTED} | {
        "seconds_to_target": None if aim is None else aim.time(digest),
        "best_accuracy": figure.best_accuracy(digest),
        "best_kept": None if aim is None else digest.best(aim.score.kind),
        "ideal_samples_per_second": digest.ideal,
        "efficiency": figure.efficiency(digest),
        "speedup": summary.samples_per_second / alone if alone else None,
        "compute_seconds": _mean(digest, "compute"),
        "wait_seconds": _mean(digest, "wait"),
        "communication_seconds": _mean(digest, "communication"),
        "memory_worker": figure.memory(digest),
        "memory_store": summary.memory.get("store"),
    }


_figures_of_none = (
    *_COUNTED,
    *("seconds_to_target", "best_accuracy", "best_kept"),
    *("ideal_samples_per_second", "efficiency", "speedup"),
    *("compute_seconds", "wait_seconds", "communication_seconds", "memory_worker", "memory_store"),
)


def _mean(digest: RunDigest, name: str) -> float:
    """Seconds of a worker, on average."""
    each = digest.summary.per_worker
    return float(sum(getattr(worker, name) for worker in each) / len(each))


def _write_csv(path: Path, cells: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(cells[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    draft = path.with_name(f".{path.name}")
    draft.write_text(text.getvalue())
    draft.replace(path)


# ---------------------------------------------------------------- a table


def results_table(grid: Grid) -> Table:
    """One row for each discipline and number of devices, means over repeats, in 80 columns."""
    aim, score = grid.aim(), grid.score() or ACCURACY
    virtual = any(d.virtual for d in grid.digests())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column("\ndiscipline", overflow="fold")
    per = "samples/s\n(virtual)" if virtual else "\nsamples/s"
    reached = "" if aim is None else f"s to\n{aim.bare}"
    name = score.name if len(score.name) <= _NAME else f"{score.name[: _NAME - 1]}…"
    names = ("\ndevices", per, "of\nideal", f"final\n{name}", reached)
    for name in (*names, "stale-\nness", "wait\nshare", "exchange\ns/worker"):
        table.add_column(name, justify="right", no_wrap=True)
    groups = {(group.discipline, group.devices): group for group in grid.groups()}
    soonest = _soonest(list(groups.values()), aim)
    before = ""
    for cell in (cell for cell in grid.cells if cell.repeat == 0):
        name = cell.discipline if cell.discipline != before else ""
        if name and before:
            table.add_section()
        before = cell.discipline
        group = groups.get((cell.discipline, cell.devices))
        if group is None:
            table.add_row(name, str(cell.devices), Text(_why(cell), style="red"))
        else:
            table.add_row(name, str(cell.devices), *_row(group, score, aim, soonest))
    return table


def _why(cell: Cell) -> str:
    return "not possible" if cell.failed.startswith("not possible") else "failed"


def _soonest(groups: list[CellGroup], aim: Aim | None) -> float | None:
    spans = [span for group in groups if (span := group.time_to(aim)) is not None]
    return min((span.mean for span in spans), default=None)


def _row(
    group: CellGroup, score: Score, aim: Aim | None, soonest: float | None
) -> list[str | Text]:
    reached = group.time_to(aim)
    time = "-" if aim is None else "never" if reached is None else seconds(reached.mean)
    best = reached is not None and reached.mean == soonest
    efficiency = group.span(figure.efficiency)
    final = group.final(score)
    return [
        rate(_known(group.span(figure.speed))),
        "-" if efficiency is None else share(efficiency.mean),
        score.write(None if final is None else final.mean),
        Text(time, style="bold" if best else ""),
        f"{_known(group.span(figure.staleness)):.2f}",
        share(_known(group.span(figure.waiting))),
        seconds(_known(group.span(figure.communication))),
    ]


def _known(span: Spread | None) -> float:
    return 0.0 if span is None else span.mean
