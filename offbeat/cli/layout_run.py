"""`offbeat layout RUN_DIR`: what a split was predicted to take, what it took, and a better one."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table
from rich.text import Text

from offbeat.cli.output import print_json
from offbeat.cli.source import origin_of, recorded
from offbeat.config.describe import recorded_optimizer, settings_of
from offbeat.config.task import Task
from offbeat.data.lease import Lease
from offbeat.data.loader import in_order
from offbeat.errors import CheckpointError, ConfigError
from offbeat.folder.checkpoint import RunFolder
from offbeat.model.objective import BatchLoss
from offbeat.report.digest import digest
from offbeat.report.summary import LayoutFigures
from offbeat.report.tables import console, processes_table, seconds, share
from offbeat.split.plan.explain import Explanation, explain


def sample_of(task: Task, count: int) -> Any:
    """The inputs of the first batch of a task."""
    reader = in_order(task.data)
    if not 1 <= count <= len(reader):
        raise ConfigError(
            f"--batch-size must be from 1 to the {len(reader)} samples of the data, not {count}"
        )
    batch = reader.read(Lease(0, 0, count))
    if isinstance(task.loss, BatchLoss) or not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigError(
            "the task's batches are not (inputs, target), so it is not known what the model takes: "
            "use ob.explain(layout, model, sample) in Python"
        )
    return batch[0]


def show_run(run_dir: Path, script: str | None, json: bool) -> None:
    """Print the figures of a finished run; its model is measured anew if it can be made."""
    place = RunFolder(run_dir)
    figures = digest(run_dir).summary.layout
    if figures is None:
        raise ConfigError(
            f"{run_dir} is no finished run of split replicas: name one that had --layout"
        )
    now, note = _explained(place, script)
    if json:
        found = {"folder": str(run_dir), "layout": msgspec.to_builtins(figures)}
        better = asdict(now.better) if now is not None and now.better is not None else None
        told = None if now is None else {"seconds": now.seconds, "idle_share": now.idle_share}
        print_json(found | {"now": told, "better": better, "note": note})
        return
    screen = console(sys.stdout)
    screen.print(f"{figures.layout} in {run_dir}", soft_wrap=True, markup=False)
    screen.print()
    lines = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    lines.add_column(style="bold")
    lines.add_column()
    for name, words in _lines(figures, now, note):
        lines.add_row(name, Text(words))
    screen.print(lines)
    if figures.per_process:
        screen.print()
        screen.print(processes_table(figures))


def _explained(place: RunFolder, script: str | None) -> tuple[Explanation | None, str]:
    """What the layout is predicted to take by what the model takes here and now, or why not."""
    config, told = place.config(), settings_of(place)
    if "loop" in origin_of(config, place.path):
        return None, "only its own script can make the model, so no better split was looked for"
    if told.layout is None:
        raise CheckpointError(f"{place.config_file} names no layout: it is damaged")
    origin = recorded(config, place.path, script)
    task = origin.make()
    known = told.optimizer is not None and told.optimizer.get("settings") is not None
    before = torch.get_num_threads()
    torch.set_num_threads(told.threads)
    try:
        return explain(
            told.layout,
            task.model,
            sample_of(task, told.batch_size),
            optimizer=recorded_optimizer(told, place) if known else task.optimizer,
        ), ""
    except Exception as error:
        origin.blame(error)
        raise
    finally:
        torch.set_num_threads(before)


def _lines(figures: LayoutFigures, now: Explanation | None, note: str) -> list[tuple[str, str]]:
    rows = []
    for name, step, idle in (
        ("measured", figures.seconds, figures.idle_share),
        ("predicted", figures.predicted_seconds, figures.predicted_idle_share),
        *([("predicted now", now.seconds, now.idle_share)] if now is not None else ()),
    ):
        if step is not None and idle is not None:
            rows.append((name, f"{seconds(1000 * step)} ms a step, {share(idle)} of it idle"))
    if now is not None and now.better is not None:
        words = f"split={'+'.join(now.better.split)} saves {share(now.better.saved)}"
        rows.append(("better", f"{words}: {seconds(1000 * now.better.seconds)} ms"))
    elif now is not None:
        rows.append(("better", "no split found that is faster"))
    return [*rows, ("note", note)] if note else rows
