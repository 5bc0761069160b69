"""`offbeat store`: be the store of a run whose workers come over the network."""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from offbeat.cli import network, options
from offbeat.cli.options import trackers
from offbeat.cli.playing import play
from offbeat.cli.run import show
from offbeat.config.run_config import USUAL
from offbeat.engine.hosts.listener import Security, listen
from offbeat.engine.hosts.scripts import StoreHost
from offbeat.engine.script import Script
from offbeat.errors import ConfigError
from offbeat.report.live import Progress
from offbeat.report.words import counted
from offbeat.transport.dial import Address
from offbeat.transport.tls import Certificate, store_context
from offbeat.watch import Watch


def store(
    script: Annotated[Path, typer.Argument(help="What `python` would run.", metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Everything behind it is the script's.", metavar="[ARGUMENTS]..."),
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            "--listen",
            help="Address of this machine that workers can reach.",
            metavar="HOST:PORT",
            rich_help_panel=network.PANEL,
        ),
    ] = "127.0.0.1",
    token_file: network.TokenFile = None,
    token_variable: network.TokenVariable = None,
    tls: network.Tls = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            help="Of this store, with its key; else one is made.",
            metavar="CERT.pem,KEY.pem",
            rich_help_panel=network.PANEL,
        ),
    ] = None,
    sync: Annotated[
        str | None, options.training("bsp, ssp:3, asp, local:16, ...; else the script's.", "SYNC")
    ] = None,
    workers: Annotated[
        str,
        options.training(
            "How many there are, or how many to begin with and at most: 2:8.",
            "N|N:M",
            "-n",
            "--workers",
        ),
    ] = str(USUAL),
    patience: Annotated[
        float | None, options.training("After so long a silent worker is lost.", "SECONDS")
    ] = None,
    overlap: Annotated[
        bool, options.training("Compute on while a gradient is under way.", None, "--overlap")
    ] = False,
    threads: Annotated[int | None, options.training("Of each worker.")] = None,
    via: options.Meeting = None,
    codec: options.Codec = None,
    pull_codec: options.PullCodec = None,
    shards: Annotated[int | None, options.training("Parts of the store, each a process.")] = None,
    shares: options.Shares = None,
    layout: options.Layout = None,
    seed: Annotated[int | None, options.training("Of the order; else the script's.")] = None,
    out: options.Out = None,
    resume: options.Resume = False,
    checkpoint_every: options.CheckpointEvery = None,
    tensorboard: options.TensorBoard = None,
    csv: options.CSV = None,
    watch: options.Watch = False,
    json: options.Json = False,
) -> None:
    """Be the store of a run: workers come with `offbeat work --at`, from any host."""
    what = Script(script, tuple(arguments or ()))
    if not script.is_file():
        raise ConfigError(f"there is no file {script}: write offbeat store [OPTIONS] train.py")
    begin, most = options.counts(workers)
    asked = options.asked(locals())
    for name in ("workers", "watch"):
        asked.pop(name, None)
    token = network.token_from(token_file, token_variable, make=True)
    address = Address.read(at)
    encrypts = not address.stays_here if tls is None else tls
    if certificate is not None and not encrypts:
        raise ConfigError("--certificate is for encrypted links: add --tls, or leave it out")
    security = Security(token)
    if encrypts:
        own = None if certificate is None else Certificate.of(certificate)
        security = Security(token, *store_context(own))
    listening = listen(address)
    bound = Address(address.host, listening.getsockname()[1])

    def ready() -> None:
        where = f"--token-variable {token_variable}" if token_variable else ""
        where = where or (f"--token-file {token_file}" if token_file else "")
        command = " ".join(filter(None, ("offbeat work --at", str(bound), where, str(script))))
        waits = counted(begin or most, "worker")
        print(f"waiting for {waits}; on their hosts: {command}", file=sys.stderr, flush=True)

    others = trackers(tensorboard, csv)
    if watch:
        others.append(Watch(f"{sync}, {script.name}" if sync else script.name))
    with listening, Progress(f"{sync or script.name}") as progress:
        torch.set_num_threads(1)
        where = StoreHost(
            most, begin, asked, listening, security, script, (progress, *others), ready
        )
        result = play(what, progress, where, json)
    assert result is not None
    show(result, what, json)
