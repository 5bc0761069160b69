"""`offbeat report`: a page of figures from run folders, also while a run is going on."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from offbeat.cli import options
from offbeat.cli.output import print_json, say
from offbeat.errors import CheckpointError
from offbeat.folder.disk import read_json
from offbeat.report.digest import digest
from offbeat.report.grid import Aim, Cell, Grid, side_by_side
from offbeat.report.page import write_page
from offbeat.report.score import read_target
from offbeat.report.verdict import verdict
from offbeat.report.words import counted

Folders = Annotated[
    list[Path],
    typer.Argument(
        help="Run folders, or the folder of a comparison; a run may still be going on.",
        metavar="RUN_DIR...",
    ),
]
Page = Annotated[Path, typer.Option(help="The page to write.", metavar="FILE.html")]
Target = Annotated[
    str | None,
    typer.Option(
        help="The score whose time is compared: 90%, or a loss of 0.35; else one all reach."
    ),
]
Files = Annotated[
    bool, typer.Option("--figures", help="Also write each figure as PNG and SVG, into figures/.")
]


def report(
    run_dirs: Folders,
    out: Page = Path("report.html"),
    target: Target = None,
    figures: Files = False,
    json: options.Json = False,
) -> None:
    """Write one page about a run, or about several side by side."""
    if target is not None:
        read_target(target)  # now, before logs are read
    grid = _gathered(run_dirs, target)
    aim = grid.aim()
    path = write_page(grid, out, files=figures)
    found = verdict(grid)
    going = [d.name for d in grid.digests() if not d.finished]
    if json:
        print_json(
            {
                "report": str(path),
                "title": grid.title,
                "score": aim and aim.score.name,
                "target": aim and aim.target,
                "verdict": found,
                "unfinished": going,
                "runs": [_row(cell, aim) for cell in grid.cells],
            }
        )
        return
    say(found.headline)
    for sentence in found.sentences:
        say(f"- {sentence}")
    if going:
        print(f"{counted(len(going), 'run')} not finished: these are the figures so far.")
    say(f"\nwritten to {path}")


def _row(cell: Cell, aim: Aim | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "discipline": cell.discipline,
        "devices": cell.devices,
        "repeat": cell.repeat,
        "failed": cell.failed or None,
    }
    if (d := cell.digest) is None:
        return row
    return row | {
        "name": d.name,
        "finished": d.finished,
        "samples_per_second": d.summary.samples_per_second,
        "accuracy": d.summary.accuracy,
        "loss": d.summary.loss,
        "metric": d.summary.metric,
        "time_to_target": None if aim is None else aim.time(d),
    }


# ---------------------------------------------------------------- which runs


def _gathered(folders: list[Path], target: str | None) -> Grid:
    found = list(dict.fromkeys(folder.resolve() for folder in folders))
    if len(found) == 1 and (found[0] / "results.json").is_file():
        return _compared(found[0], target)
    runs = [run for folder in found for run in _runs(folder)]
    return side_by_side([digest(run) for run in runs]).aimed(target)


def _runs(folder: Path) -> list[Path]:
    """A run folder itself, or those of a comparison that has no results yet."""
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist: name a run folder, as made with --out")
    if not (folder / "cells").is_dir():
        return [folder]
    runs = sorted(run for run in (folder / "cells").iterdir() if (run / "run.json").is_file())
    if not runs:
        raise CheckpointError(f"{folder} holds a comparison, but no run of it has begun")
    return runs


class _Point(msgspec.Struct):
    discipline: str
    devices: int
    repeat: int
    error: str | None = None
    folder: str | None = None


class _Results(msgspec.Struct):
    """What is read of a comparison's results: all figures are counted again from the logs."""

    title: str
    cells: list[_Point]
    settings: dict[str, str] = {}
    target: float | None = None
    target_given: bool = False


def _compared(folder: Path, target: str | None) -> Grid:
    file = folder / "results.json"
    try:
        results = msgspec.convert(read_json(file), _Results)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file} is damaged, or not of a comparison: {error}") from None
    cells = []
    for point in results.cells:
        cell = Cell(point.discipline, point.devices, point.repeat, failed=point.error or "")
        if not point.error and point.folder is not None:
            # By its last name alone, so that a file from elsewhere cannot point out of its folder.
            cell.digest = digest(folder / "cells" / Path(point.folder).name)
        cells.append(cell)
    grid = Grid(results.title, cells, None, results.settings)
    if target is None and results.target_given and grid.score() is not None:
        return grid.aimed(results.target)
    return grid.aimed(target)
