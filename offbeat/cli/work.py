"""`offbeat work`: be a worker of a run whose store is on another host."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli import network, options
from offbeat.cli.output import fail
from offbeat.cli.playing import play
from offbeat.config.checks import at_least
from offbeat.config.units import duration
from offbeat.engine.hosts.scripts import WorkHost
from offbeat.engine.hosts.supervisor import Place, supervise
from offbeat.engine.script import Script
from offbeat.errors import ConfigError, OffbeatError
from offbeat.report.live import Progress


def work(
    script: Annotated[Path, typer.Argument(help="What `python` would run.", metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Everything behind it is the script's.", metavar="[ARGUMENTS]..."),
    ] = None,
    at: network.At = "127.0.0.1",
    token_file: network.TokenFile = None,
    token_variable: network.TokenVariable = None,
    tls: network.Tls = None,
    authority: network.Authority = None,
    workers: Annotated[
        int, options.training("How many work on this host.", "N", "-n", "--workers")
    ] = 1,
    emulate: Annotated[
        str | None, options.training("Least time of this worker's step: 80ms.", "TIME")
    ] = None,
    device: options.Device = None,
) -> None:
    """Be a worker of a run: its store says how it is done, the script here computes."""
    what = Script(script, tuple(arguments or ()))
    if not script.is_file():
        raise ConfigError(f"there is no file {script}: write offbeat work --at HOST:PORT train.py")
    token = network.token_from(token_file, token_variable)
    dialer = network.dialer(at, token, tls, authority)
    least = None if emulate is None else duration(emulate)
    at_least("-n", workers, 1)

    def played(place: Place) -> int:
        try:
            play(what, Progress(script.name), WorkHost(dialer, script, least, place, device), False)
        except OffbeatError as error:
            return fail(str(error), error.exit_code, False)
        except typer.Exit as leaving:
            return leaving.exit_code
        return 0

    code = supervise(workers, played)
    if code:
        raise typer.Exit(code)
