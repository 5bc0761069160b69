"""`offbeat layout`: what a split of a model over processes would cost, before any is started."""

import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offbeat.cli import options
from offbeat.cli.layout_run import sample_of, show_run
from offbeat.cli.output import print_json
from offbeat.cli.source import source
from offbeat.errors import ConfigError
from offbeat.report.tables import console, rate, seconds, share, size
from offbeat.report.words import counted
from offbeat.split.layout import Layout
from offbeat.split.plan.explain import Explanation, explain
from offbeat.split.plan.predict import StageFigures

HOW = "Predicted from blocks measured one by one in this process; nothing else was started."
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}

_RUN_DIR = typer.Argument(help="Or the folder of a run that had one.", metavar="[RUN_DIR]")
_LAYOUT = typer.Option("--layout", help="How a replica is split.", metavar="pp=2,microbatches=8")
_SPEEDS = typer.Option(
    help="Of a replica's processes in the order of their stages; 1 is as fast as here.",
    metavar="2,1,...",
)
_BANDWIDTH = typer.Option(help="Of the links between processes; else they cost nothing.")
_THREADS = typer.Option(help="Of arithmetic in each process; else cores over processes.")
_MEMORY = typer.Option(help="The most that one process may hold.", metavar="500MB")


def layout(
    run_dir: Annotated[Path | None, _RUN_DIR] = None,
    layout: Annotated[str | None, _LAYOUT] = None,
    recipe: options.Recipe = None,
    option: options.Option = None,
    script: options.Script = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    speeds: Annotated[str | None, _SPEEDS] = None,
    bandwidth: Annotated[str, _BANDWIDTH] = "inf",
    memory: Annotated[str | None, _MEMORY] = None,
    threads: Annotated[int | None, _THREADS] = None,
    json: options.Json = False,
) -> None:
    """Predict time, idle share, memory and communication of a model split over processes.

    With the folder of a run that was split: what was predicted beside what was measured.
    """
    if run_dir is not None:
        if layout is not None or speeds is not None or memory is not None:
            raise ConfigError(f"{run_dir} has its own layout: leave --layout and machines out")
        show_run(run_dir, script, json)
        return
    if layout is None:
        raise ConfigError("which layout? Write --layout pp=2, or the folder of a run that has one")
    asked = Layout.parse(layout)
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads must be at least 1, not {threads}")
    machines: dict[str, Any] = {"bandwidth": bandwidth}
    if speeds is not None:
        machines["speeds"] = _numbers(speeds)
    if memory is not None:
        machines["memory"] = _bytes(memory)
    origin = source(recipe, option or [], script, seed)
    task = origin.make()
    before = torch.get_num_threads()
    threads = threads or max(1, before // asked.processes)
    torch.set_num_threads(threads)
    try:
        sample = sample_of(task, task.batch_size if batch_size is None else batch_size)
        found = explain(asked, task.model, sample, optimizer=task.optimizer, **machines)
    except Exception as error:
        origin.blame(error)
        raise
    finally:
        torch.set_num_threads(before)
    if json:
        print_json(asdict(found) | {"threads": threads, "note": HOW})
        return
    screen = console(sys.stdout)
    screen.print(f"{found.layout} for {origin}", soft_wrap=True, markup=False)
    screen.print()
    screen.print(shown(found, asked, threads))


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--speeds {text} are no numbers: write for example 2,1,1,1") from None


def _bytes(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*(B|kB|MB|GB)?\s*", text)
    if match is None:
        raise ConfigError(f"--memory {text} is no size: write for example 500MB or 2GB")
    return float(match[1]) * UNITS[match[2] or "B"]


# ---------------------------------------------------------------- as words


def shown(found: Explanation, asked: Layout, threads: int) -> RenderableType:
    """An explanation in 80 columns."""
    lines = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    lines.add_column(style="bold")
    lines.add_column()
    for name, words in _figures(found, asked, threads):
        lines.add_row(name, Text(words))
    return Group(lines, Text(""), _processes(found, asked.tp), Text(""), Text(HOW))


def _figures(found: Explanation, asked: Layout, threads: int) -> Iterable[tuple[str, str]]:
    replicas = f"{asked.replicas} replicas × " if asked.replicas > 1 else ""
    count = asked.pp * asked.tp
    processes = f"{count} process{'es' if count > 1 else ''}"
    each = f"{threads} thread{'s' if threads > 1 else ''} each"
    yield "processes", f"{replicas}{processes}, {each}"
    pieces = f" in {found.microbatches} microbatches" if found.microbatches > 1 else ""
    yield "batch", f"{counted(found.batch_size, 'sample')}{pieces}"
    yield (
        "step",
        f"{seconds(found.seconds)} s, {rate(found.samples_per_second)} samples/s; "
        f"one process alone {seconds(found.alone)} s",
    )
    yield "idle", f"{share(found.idle_share)} of the processes' time"
    if found.split:
        yield "split", "+".join(found.split)
    if found.better is not None:
        yield (
            "better",
            f"split={'+'.join(found.better.split)} saves {share(found.better.saved)}: "
            f"{seconds(found.better.seconds)} s",
        )
    elif found.split:
        yield "better", "no split found that is faster"
    for note in found.notes:
        yield "note", note


def _processes(found: Explanation, sharing: int) -> Table:
    """A row for each process, or for all that share the same stages and are alike."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("\nprocess", no_wrap=True)
    table.add_column("\nblocks", overflow="fold")
    for name in ("\ncomputes", "\nidle", "\nweights", "\nmemory", "to\nothers", "to the\nstore"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, process in enumerate(found.per_process):
        mine = [stage for stage in found.stages if stage.process == number]
        first = number * sharing
        table.add_row(
            str(first) if sharing == 1 else f"{first}-{first + sharing - 1}",
            Text("\n".join(_blocks(stage) for stage in mine)),
            f"{seconds(process.busy)} s",
            share(process.idle_share),
            size(process.memory.parameters),
            size(process.memory.total),
            size(process.sent),
            size(process.exchanged),
        )
    return table


def _blocks(stage: StageFigures) -> str:
    if stage.blocks == 1:
        return stage.first
    return f"{stage.first} … {stage.last}"
