"""`offbeat run`: train with a script's own loop, on this machine or on a simulated cluster."""

import shlex
import sys
from enum import StrEnum
from json import loads
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from offbeat.cli import options
from offbeat.cli.options import trackers
from offbeat.cli.output import print_json
from offbeat.cli.playing import Where, blamed, play
from offbeat.cli.replay import show as show_replay
from offbeat.config.checks import at_least
from offbeat.config.run_config import USUAL, OnRay
from offbeat.config.units import emulated
from offbeat.engine.ray.scripts import RayHost
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


class ScriptEngine(StrEnum):
    LOCAL = "local"
    RAY = "ray"
    SIM = "sim"


class Placement(StrEnum):
    SPREAD = "spread"
    PACK = "pack"


def on_ray(help: str, metavar: str | None = None, *names: str) -> Any:
    """An option of a Ray cluster."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel="Ray cluster")


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
        ScriptEngine | None,
        options.training("Processes here (local), a Ray cluster (ray) or virtual time (sim)."),
    ] = None,
    workers: Annotated[
        str | None,
        options.training(
            "Workers, 4 unless given; on Ray also how many to begin with and at most: 2:8.",
            "N|N:M",
            "-n",
            "--workers",
        ),
    ] = None,
    cluster: options.Cluster = None,
    emulate: Annotated[
        str | None, options.training("Least time of each worker's step: 20ms,20ms,80ms.", "TIMES")
    ] = None,
    patience: Annotated[
        float | None, options.training("After so long a silent worker is lost.", "SECONDS")
    ] = None,
    via: options.Meeting = None,
    codec: options.Codec = None,
    pull_codec: options.PullCodec = None,
    shards: Annotated[
        int | None, options.training("Parts of the store, each with a process; else the script's.")
    ] = None,
    shares: options.Shares = None,
    layout: options.Layout = None,
    device: options.Device = None,
    seed: Annotated[int | None, options.training("Of order and times; else the script's.")] = None,
    address: Annotated[
        str | None,
        on_ray("Of the cluster: auto or HOST:6379. Without it one is found, or started here."),
    ] = None,
    worker_resources: Annotated[
        str | None,
        on_ray('What each worker gets: \'{"CPU": 2, "GPU": 1}\', one CPU unless given.', "JSON"),
    ] = None,
    placement: Annotated[
        Placement | None, on_ray("Workers on many hosts (spread), or on few (pack).")
    ] = None,
    wait: Annotated[
        float | None, on_ray("How long to wait for room for the workers.", "SECONDS")
    ] = None,
    tls: Annotated[
        bool | None,
        on_ray("Encrypt links; else those that leave this machine.", None, "--tls/--no-tls"),
    ] = None,
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
    begin, count = (None, None) if workers is None else options.counts(workers)
    if layout is not None:
        count = replicas_of(in_halves(layout), count or _named(cluster, emulate))
    # Where it runs is settled here; the rest wins over what the script says.
    for name in ("engine", "workers", "cluster", "watch"):
        asked.pop(name, None)
    sim = engine is ScriptEngine.SIM or (engine is None and cluster is not None)
    ray = engine is ScriptEngine.RAY
    of_ray: dict[str, Any] = {
        "address": address,
        "worker_resources": worker_resources,
        "wait": wait,
        "tls": tls,
    }
    of_ray["placement"] = placement and placement.value
    of_ray = {name: value for name, value in of_ray.items() if value is not None}
    if not ray and (of_ray or begin is not None):
        word = f"--{next(iter(of_ray)).replace('_', '-')}" if of_ray else f"-n {workers}"
        raise ConfigError(f"{word} is for a Ray cluster: add --engine ray, or leave it out")
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
            place = options.cluster_of(cluster, count)
            with blamed(what, progress, json):
                result = simulate_script(what, place, asked, [progress, *others])
        else:
            if count is None:
                count = _named(None, emulate) or USUAL
            if emulate is not None:
                asked["emulate"] = emulated(emulate, count)
            where: Where = LaunchedHost(at_least("workers", count, 1), asked, (progress, *others))
            if ray:
                if worker_resources is not None:
                    of_ray["worker_resources"] = resources(worker_resources)
                at = OnRay(begin=begin, **of_ray)
                where = RayHost(count, at, asked, what, (progress, *others))
            torch.set_num_threads(1)  # until the workers are there, who then share the cores
            played = play(what, progress, where, json)
            assert played is not None
            result = played
    show(result, what, json)


def resources(text: str) -> dict[str, float]:
    """What each worker is to get, as JSON says it."""
    try:
        found = loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f'--worker-resources takes JSON such as \'{{"CPU": 2, "GPU": 1}}\', not {text!r}'
        )
    return found


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
