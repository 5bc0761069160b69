"""`offbeat simulate`: train on a simulated cluster, or only ask what that would cost."""

import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from offbeat.cli import options
from offbeat.cli.options import Nonfinite, trackers
from offbeat.cli.output import fail, print_json, stop_code
from offbeat.cli.source import check_folder, optimizer_for, source
from offbeat.engine.result import Run
from offbeat.engine.sim.cost import estimate
from offbeat.errors import ConfigError
from offbeat.report.live import Progress
from offbeat.report.summary import Summary
from offbeat.report.tables import console, run_table, seconds, share
from offbeat.report.words import counted
from offbeat.split.layout import replicas_of
from offbeat.train import train
from offbeat.watch import Watch


def simulate(
    context: typer.Context,
    recipe: options.Recipe = None,
    option: options.Option = None,
    script: options.Script = None,
    sync: options.Sync = "bsp",
    cluster: options.Cluster = None,
    workers: options.Workers = None,
    batch_size: options.BatchSize = None,
    drop_last: options.DropLast = False,
    shares: options.Shares = None,
    epochs: options.Epochs = None,
    lr: options.Rate = None,
    codec: options.Codec = None,
    pull_codec: options.PullCodec = None,
    layout: options.Layout = None,
    device: options.Device = None,
    shards: options.Shards = 1,
    seed: options.Seed = 0,
    evaluate_every: options.EvaluateEvery = None,
    nonfinite: options.OnNonfinite = Nonfinite.STOP,
    out: options.Out = None,
    resume: options.Resume = False,
    checkpoint_every: options.CheckpointEvery = None,
    tensorboard: options.TensorBoard = None,
    csv: options.CSV = None,
    watch: options.Watch = False,
    cost_only: options.CostOnly = False,
    steps: options.Steps = None,
    model_bytes: options.ModelBytes = None,
    json: options.Json = False,
) -> None:
    """Train on a simulated cluster: real gradients, virtual time."""
    asked = options.asked(locals())
    place = options.cluster_of(cluster, replicas_of(layout, workers, cluster is not None))
    title = f"{sync}, {counted(len(place), 'worker')}"
    watches = [Watch(title, virtual=True)] if watch else []
    with Progress(title, virtual=True) as progress:
        if cost_only:
            _refuse_given(context, _TRAINING_ONLY, "has no effect with --cost-only: leave it out")
            figures = estimate(
                place,
                asked["discipline"],
                steps=100 if steps is None else steps,
                batch_size=32 if batch_size is None else batch_size,
                model_bytes=model_bytes or 0,
                shares=shares,
                seed=seed,
                listeners=[progress, *watches],
            )
            progress.end()
            _show(figures, None, "cost only", json)
            return
        _refuse_given(context, ("steps", "model_bytes"), "needs --cost-only: add it")
        origin = source(recipe, option or (), script, seed)
        if resume and out is None:
            raise ConfigError("--resume needs --out DIR, the folder of the run to go on with")
        if out is not None:
            check_folder(out, origin, resume)
        task = origin.make()
        asked |= {
            "optimizer": optimizer_for(task, asked["discipline"], sync, lr),
            "batch_size": task.batch_size if batch_size is None else batch_size,
            "cluster": place,
            "workers": len(place),
            "test": task.test,
            "listeners": [progress, *trackers(tensorboard, csv), *watches],
            "watch": False,
            "origin": origin.origin,
        }
        try:
            run = train(task.model, task.data, task.loss, **asked)
        except KeyboardInterrupt as stopped:
            progress.end()
            raise typer.Exit(_stopped(progress, out, stop_code(stopped), json)) from None
        except Exception as error:
            origin.blame(error)
            raise
    _show(run.summary(), run, str(origin), json)


_TRAINING_ONLY = (
    *("recipe", "option", "script", "epochs", "lr", "codec", "layout", "out", "resume"),
    *("evaluate_every", "checkpoint_every", "tensorboard", "csv", "drop_last", "device"),
)


def _refuse_given(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """A flag that would be ignored is a mistake worth naming."""
    for name in names:
        if context.params.get(name):
            raise ConfigError(f"--{name.replace('_', '-')} {why}")


def _show(figures: Summary, run: Run | None, what: str, as_json: bool) -> None:
    if as_json:
        result: dict[str, Any] = {"task": what, "summary": figures.to_dict()}
        if run is not None:
            result |= {"tests": run.history.tests, "folder": run.folder and str(run.folder)}
        print_json(result)
        return
    screen = console(sys.stdout)
    workers = counted(figures.workers, "simulated worker")
    screen.print(f"{figures.discipline} on {workers}, {what}", markup=False)
    screen.print()
    screen.print(run_table(figures))
    if run is not None and run.folder is not None:
        # A path is printed unbroken, so that it can be copied.
        command = shlex.join(["offbeat", "replay", str(run.folder)])
        print(f"\nkept in {run.folder}; to check it: {command}")


def _stopped(progress: Progress, out: Path | None, code: int, as_json: bool) -> int:
    """Say where a run was stopped and how to go on with it."""
    if progress.store is None:
        return fail("stopped before the run began", code, as_json)
    version, when = progress.store.version, seconds(progress.time)
    where = f"stopped at version {version} ({share(progress.done)} done, {when} virtual s)"
    if out is None:
        lesson = "nothing was kept: with --out DIR a run can be resumed"
        return fail(f"{where}; {lesson}", code, as_json)
    words = [word for word in sys.argv[1:] if word != "--resume"]
    command = shlex.join(["offbeat", *words, "--resume"])
    return fail(f"{where}; go on with:\n  {command}", code, as_json)
