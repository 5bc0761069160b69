"""`offbeat run`: train with a script's own loop, on this machine or on a simulated cluster."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from offbeat.cli import options
from offbeat.cli.options import Engine, Via
from offbeat.cli.output import fail, print_json, stop_code
from offbeat.cli.replay import show as show_replay
from offbeat.cli.source import described, line_in
from offbeat.cli.trackers import trackers
from offbeat.config.checks import at_least
from offbeat.config.run_config import USUAL
from offbeat.config.units import emulated
from offbeat.engine.result import Run
from offbeat.engine.script import Script, host
from offbeat.engine.script_hosts import Finished, LaunchedHost
from offbeat.engine.sim.cluster import Cluster
from offbeat.engine.sim.scripts import replay_script, simulate_script
from offbeat.engine.spawn import ProcessFailed
from offbeat.errors import ConfigError, OffbeatError, RunError
from offbeat.folder.checkpoint import RunFolder
from offbeat.report.live import Progress
from offbeat.report.tables import console, run_table, share
from offbeat.report.words import counted
from offbeat.split.layout import in_halves, replicas_of
from offbeat.watch import Watch


def _training(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=options.TRAINING, **more)


def run(
    script: Annotated[Path, typer.Argument(help="What `python` would run.", metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Everything behind it is the script's.", metavar="[ARGUMENTS]..."),
    ] = None,
    sync: Annotated[
        str | None,
        _training("bsp, ssp:3, asp, local:16, ...; else the script's.", metavar="DISCIPLINE"),
    ] = None,
    engine: Annotated[
        Engine | None, _training("Processes here (local) or virtual time (sim).")
    ] = None,
    workers: options.Workers = None,
    cluster: options.Cluster = None,
    emulate: Annotated[
        str | None, _training("Least time of each worker's step: 20ms,20ms,80ms.", metavar="TIMES")
    ] = None,
    patience: Annotated[
        float | None, _training("After so long a silent worker is lost.", metavar="SECONDS")
    ] = None,
    via: Annotated[
        Via | None, _training("Where contributions meet: in the store, or among the workers.")
    ] = None,
    codec: options.Codec = None,
    shards: Annotated[
        int | None, _training("Parts of the store, each with a process; else the script's.")
    ] = None,
    layout: options.Layout = None,
    seed: Annotated[int | None, _training("Of order and times; else the script's.")] = None,
    out: options.Out = None,
    resume: options.Resume = False,
    checkpoint_every: options.CheckpointEvery = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Run the log of this folder again, and compare.",
            metavar="DIR",
            rich_help_panel=options.FOLDER,
        ),
    ] = None,
    tensorboard: options.TensorBoard = None,
    csv: options.CSV = None,
    watch: options.Watch = False,
    json: options.Json = False,
) -> None:
    """Train with a script's own loop: `with ob.join() as run`."""
    what = Script(script, tuple(arguments or ()))
    if not script.is_file():
        raise ConfigError(f"there is no file {script}: write offbeat run [OPTIONS] train.py")
    asked = options.asked(locals())
    if replay is not None:
        if asked or tensorboard or csv:
            raise ConfigError("--replay takes every setting from its folder: leave the others out")
        with _script(what, Progress(), json):
            found = replay_script(what, RunFolder(replay))
        show_replay(found, replay, json)
        return
    if layout is not None:
        workers = replicas_of(in_halves(layout), workers or _named(cluster, emulate))
    # Where it runs is settled here; the rest wins over what the script says.
    for name in ("engine", "workers", "cluster", "watch"):
        asked.pop(name, None)
    sim = engine is Engine.SIM or (engine is None and cluster is not None)
    if sim and (emulate or patience or via):
        word = "emulate" if emulate else "patience" if patience else "via"
        raise ConfigError(
            f"--{word} is for real workers: "
            + ("leave it out" if word == "via" else "write it into the --cluster of --engine sim")
        )
    if not sim and cluster is not None:
        raise ConfigError("--cluster is simulated: add --engine sim, or use --emulate TIMES")
    others = trackers(tensorboard, csv)
    if watch:
        others.append(Watch(f"{sync}, {script.name}" if sync else script.name, virtual=sim))
    with Progress(f"{sync or script.name}", virtual=sim) as progress:
        if sim:
            place = options.cluster_of(cluster, workers)
            with _script(what, progress, json):
                result = simulate_script(what, place, asked, [progress, *others])
        else:
            if workers is None:
                workers = _named(None, emulate) or USUAL
            if emulate is not None:
                asked["emulate"] = emulated(emulate, workers)
            launched = LaunchedHost(at_least("workers", workers, 1), asked, (progress, *others))
            result = _local(what, progress, launched, json)
    _show(result, what, json)


def _named(cluster: str | None, emulate: str | None) -> int | None:
    """How many workers a cluster or a list of times is for."""
    if cluster is not None:
        return len(Cluster.read(cluster))
    return emulate.count(",") + 1 if emulate is not None and "," in emulate else None


def _local(script: Script, progress: Progress, launched: LaunchedHost, as_json: bool) -> Run:
    """Play the script here; it forks at its first batch, and only the launcher comes back."""
    torch.set_num_threads(1)  # until the workers are there, who then share the cores
    mark = host.set(launched)
    try:
        with script.as_program(), _script(script, progress, as_json):
            module = script.module()
            sys.modules["__main__"] = module
            try:
                script.play(module)
            except Finished as finished:
                return finished.result
            except BaseException as error:
                launched.ended(error)
                raise
            launched.ended(None)
            raise ConfigError(
                f"{script.path} ended without a loop: write "
                "for x, y in run.batches(dataset, batch_size=32) inside with ob.join() as run"
            )
    finally:
        host.reset(mark)


@contextmanager
def _script(script: Script, progress: Progress, as_json: bool) -> Iterator[None]:
    """What goes wrong in a script is told with its line; its prints stay out of the JSON."""
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            yield
    except KeyboardInterrupt as stopped:
        progress.end()
        raise typer.Exit(_stopped(progress, stop_code(stopped), as_json)) from None
    except SyntaxError as error:
        raise ConfigError(f"{error.filename} line {error.lineno}: {error.msg}") from error
    except SystemExit as leaving:
        progress.end()
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        raise typer.Exit(code if isinstance(code, int) else int(code is not None)) from None
    except Exception as error:
        progress.end()
        _blame(error, script, began=progress.store is not None)


def _blame(error: Exception, script: Script, began: bool) -> NoReturn:
    where = line_in(script.path, error)
    if where is None or isinstance(
        error, ProcessFailed
    ):  # a worker's error does not lie where it was told
        raise error
    at = f"{script.path} line {where}"
    if isinstance(error, OffbeatError):
        raise type(error)(f"{at}: {error}") from error
    kind = RunError if began else ConfigError
    raise kind(f"{at}: {described(error)}") from error


def _show(result: Run, script: Script, as_json: bool) -> None:
    figures = result.summary()
    if as_json:
        folder = result.folder and str(result.folder)
        print_json({"script": str(script.path), "summary": figures.to_dict(), "folder": folder})
        return
    screen = console(sys.stdout)
    kind = "simulated worker" if figures.engine == "sim" else "worker"
    workers = counted(figures.workers, kind)
    screen.print(f"{figures.discipline} on {workers}, {script.path.name}", markup=False)
    screen.print()
    screen.print(run_table(figures))
    if result.folder is not None:
        command = shlex.join(
            ["offbeat", "run", "--replay", str(result.folder), str(script.path), *script.arguments]
        )
        print(f"\nkept in {result.folder}; to check it: {command}")


def _stopped(progress: Progress, code: int, as_json: bool) -> int:
    if progress.store is None:
        return fail("stopped before the run began", code, as_json)
    done = share(progress.done)
    return fail(
        f"stopped with {done} done; a run with --out goes on with the same command and --resume",
        code,
        as_json,
    )
