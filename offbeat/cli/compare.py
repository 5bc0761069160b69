"""`offbeat compare`: every way of synchronising on every number of devices, and what each costs."""

import hashlib
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from offbeat.cli import options
from offbeat.cli.options import Engine
from offbeat.cli.output import fail, print_json, say, stop_code
from offbeat.cli.source import FromRecipe, FromScript, source
from offbeat.compare.display import Display
from offbeat.compare.plan import ComparisonPlan
from offbeat.compare.results import results_table
from offbeat.compare.runner import Comparison
from offbeat.compare.runner import compare as run_grid
from offbeat.compare.source import seeded
from offbeat.compare.speeds import RealSpeeds, Simulated, Speeds
from offbeat.compare.spell import read_devices, read_rates
from offbeat.config.task import Task
from offbeat.errors import ConfigError, RunError
from offbeat.report.page import write_report
from offbeat.report.tables import console
from offbeat.report.words import counted


def compare(
    recipe: options.Recipe = None,
    option: options.Option = None,
    script: options.Script = None,
    devices: options.Devices = "1,2,4",
    sync: options.Syncs = ["bsp,ssp:3,asp,local:16,asup"],  # noqa: B006
    repeat: options.Repeat = 1,
    target: options.Target = None,
    engine: options.GridEngine = None,
    emulate: options.Emulate = None,
    cluster: options.GridCluster = None,
    straggler: options.Straggler = None,
    layout: options.Layout = None,
    batch_size: options.GridBatchSize = None,
    drop_last: options.DropLast = False,
    shares: options.Shares = None,
    epochs: options.GridEpochs = None,
    lr: options.Rates = None,
    seed: options.Seed = 0,
    evaluate_every: options.EvaluateEvery = None,
    out: options.GridOut = None,
    json: options.Json = False,
) -> None:
    """Compare disciplines over numbers of devices, and write a report.

    Stopped, the same command goes on with the cells that are missing.
    """
    simulated = engine is Engine.SIM or (engine is None and cluster is not None)
    plan = ComparisonPlan(
        sync=sync,
        devices=read_devices(devices),
        on=_speeds(simulated, emulate, cluster, straggler),
        layout=layout,
        batch_size=batch_size,
        drop_last=drop_last,
        shares=shares,
        epochs=epochs,
        evaluate_every=evaluate_every,
        repeat=repeat,
        seed=seed,
        rates=read_rates(lr or ()),
        target=target,
    )
    what = MadeComparison(recipe, tuple(option or ()), script, seed)
    folder = out or Path("runs") / f"compare-{what.short}"
    display = Display(virtual=simulated)
    try:
        # What a user's script prints stays out of the JSON.
        with display, redirect_stdout(sys.stderr) if json else nullcontext():
            done = run_grid(what, plan, folder, [display])
            display.close()
            page, note = _report(done)
    except KeyboardInterrupt as stopped:
        raise typer.Exit(_stopped(display, stop_code(stopped), json)) from None
    if json:
        print_json(done.results | {"folder": str(folder), "report": page and str(page)})
    else:
        _show(done, page, note)
    if done.failed:
        raise typer.Exit(RunError.exit_code)


def _speeds(
    simulated: bool, emulate: str | None, cluster: str | None, straggler: float | None
) -> Speeds:
    slower = 1.0 if straggler is None else straggler
    if not simulated:
        if cluster is not None:
            raise ConfigError("--cluster is simulated: add --engine sim, or use --emulate TIMES")
        return RealSpeeds(emulate, slower)
    if emulate is not None:
        raise ConfigError("--emulate is for real workers: write --cluster 20ms with --engine sim")
    return Simulated(cluster, slower)


def _stopped(display: Display, code: int, as_json: bool) -> int:
    """Say how far it came and how to go on."""
    command = shlex.join(["offbeat", *sys.argv[1:]])
    how = f"go on with the same command:\n  {command}"
    return fail(f"stopped after {display.ended} of {display.cells} cells; {how}", code, as_json)


# ---------------------------------------------------------------- the task


@dataclass(frozen=True)
class MadeComparison:
    """A recipe or a script's function, made anew for every seed."""

    recipe: str | None
    options: tuple[str, ...]
    script: str | None
    first: int

    def _source(self, seed: int) -> FromRecipe | FromScript:
        return source(self.recipe, self.options, self.script, seed)

    @property
    def name(self) -> str:
        return str(self._source(self.first))

    @property
    def short(self) -> str:
        """For the name of a folder."""
        found = self._source(self.first)
        return found.file.stem if isinstance(found, FromScript) else found.name

    def make(self, seed: int) -> Task:
        return seeded(seed, self._source(seed).make)

    def origin(self, seed: int) -> dict[str, Any]:
        return self._source(seed).origin

    def mark(self) -> dict[str, Any]:
        found = self._source(self.first)
        if isinstance(found, FromRecipe):
            return {"task": found.name, "options": ", ".join(self.options)}
        # Its name is not enough: a script that has been changed makes other runs.
        content = hashlib.sha256(found.file.read_bytes()).hexdigest()[:12]
        return {"task": found.text, "the script's content": content}

    def blame(self, error: Exception) -> None:
        self._source(self.first).blame(error)


# ---------------------------------------------------------------- what came of it


def _report(done: Comparison) -> tuple[Path | None, str]:
    """The page, or why there is none."""
    if not done.grid.digests():
        return None, "no report: every cell failed"
    try:
        return write_report(done.grid, done.folder), ""
    except ConfigError as error:  # results are there, and figures can be drawn later
        return None, f"no report: {error}"


def _show(done: Comparison, page: Path | None, note: str) -> None:
    screen = console(sys.stdout)
    settings = done.grid.settings
    screen.print(f"{settings['task']}, {settings['engine']}", markup=False)
    words = f"{counted(done.plan.epochs or 1, 'epoch')}, batch size {done.plan.batch_size}"
    if done.plan.repeat > 1:
        words += f", means of {done.plan.repeat} repeats"
    screen.print(words, markup=False)
    screen.print()
    screen.print(results_table(done.grid))
    told = done.failed | {p: f"not possible: {why}" for p, why in done.impossible.items()}
    for point, why in told.items():
        screen.print(f"{point}: {why}", markup=False)
    # Paths are printed unbroken, so that they can be copied.
    print(f"\nresults: {done.folder / 'results.json'}, {done.folder / 'results.csv'}")
    say(note if page is None else f"report:  {page}")
    if done.failed:
        print("the same command tries failed cells again", file=sys.stderr)
