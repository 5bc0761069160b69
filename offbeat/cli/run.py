"""`offbeat run`: train with a script's own loop, on this machine or on a simulated cluster."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from offbeat.cli import options
from offbeat.cli.options import Engine, Via, trackers
from offbeat.cli.output import print_json
from offbeat.cli.playing import blamed, play
from offbeat.cli.replay import show as show_replay
from offbeat.config.checks import at_least
from offbeat.config.run_config import USUAL
from offbeat.config.units import emulated
from offbeat.engine.result import Run
from offbeat.engine.script import Script
from offbeat.engine.script_hosts import LaunchedHost
from offbeat.engine.sim.cluster import Cluster
from offbeat.engine.sim.scripts import replay_script, simulate_script
from offbeat.errors import ConfigError
from offbeat.folder.checkpoint import RunFolder
from offbeat.report.live import Progress
from offbeat.report.tables import console, run_table
from offbeat.report.words import counted
from offbeat.split.layout import in_halves, replicas_of
from offbeat.watch import Watch


def run(
    script: Annotated[Path, typer.Argument(help="What `python` would run.", metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Everything behind it is the script's.", metavar="[ARGUMENTS]..."),
    ] = None,
    sync: Annotated[
        str | None,
        options.training("bsp, ssp:3, asp, local:16, ...; else the script's.", "DISCIPLINE"),
    ] = None,
    engine: Annotated[
        Engine | None, options.training("Processes here (local) or virtual time (sim).")
    ] = None,
    workers: options.Workers = None,
    cluster: options.Cluster = None,
    emulate: Annotated[
        str | None, options.training("Least time of each worker's step: 20ms,20ms,80ms.", "TIMES")
    ] = None,
    patience: Annotated[
        float | None, options.training("After so long a silent worker is lost.", "SECONDS")
    ] = None,
    via: Annotated[
        Via | None,
        options.training("Where contributions meet: in the store, or among the workers."),
    ] = None,
    codec: options.Codec = None,
    pull_codec: options.PullCodec = None,
    shards: Annotated[
        int | None, options.training("Parts of the store, each with a process; else the script's.")
    ] = None,
    shares: options.Shares = None,
    layout: options.Layout = None,
    seed: Annotated[int | None, options.training("Of order and times; else the script's.")] = None,
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
        with blamed(what, Progress(), json):
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
            with blamed(what, progress, json):
                result = simulate_script(what, place, asked, [progress, *others])
        else:
            if workers is None:
                workers = _named(None, emulate) or USUAL
            if emulate is not None:
                asked["emulate"] = emulated(emulate, workers)
            launched = LaunchedHost(at_least("workers", workers, 1), asked, (progress, *others))
            torch.set_num_threads(1)  # until the workers are there, who then share the cores
            played = play(what, progress, launched, json)
            assert played is not None
            result = played
    show(result, what, json)


def _named(cluster: str | None, emulate: str | None) -> int | None:
    """How many workers a cluster or a list of times is for."""
    if cluster is not None:
        return len(Cluster.read(cluster))
    return emulate.count(",") + 1 if emulate is not None and "," in emulate else None


def show(result: Run, script: Script, as_json: bool) -> None:
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
