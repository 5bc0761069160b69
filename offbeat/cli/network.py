"""The flags of commands that reach other hosts: where, with which token, how encrypted."""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.engine.hosts.token import USUAL, token_at, write_token
from offbeat.errors import ConfigError
from offbeat.transport.dial import Address, Dialer

PANEL = "Network"


def _flag(*names: str, help: str, metavar: str | None = None) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(
        *names, help=help, metavar=metavar, rich_help_panel=PANEL
    )
    return found


TokenFile = Annotated[
    Path | None,
    _flag(help="A file with the run's token; else ./offbeat.token.", metavar="FILE"),
]
TokenVariable = Annotated[
    str | None,
    _flag(help="The environment variable that has the token.", metavar="NAME"),
]
Tls = Annotated[
    bool | None,
    _flag("--tls/--no-tls", help="Encrypt; else where the link leaves this machine."),
]
StoreAt = Annotated[
    str | None, _flag("--at", help="Look at the way to a store, not at this machine alone.")
]
At = Annotated[str, _flag(help="Where the store listens: 192.168.1.5:7077.", metavar="HOST:PORT")]
Authority = Annotated[
    Path | None,
    _flag(help="PEM file of who signed the store's certificate.", metavar="FILE"),
]


def token_from(file: Path | None, variable: str | None, make: bool = False) -> bytes:
    """The token from where the user says it is; with `make` a new one if the file is not there."""
    if variable is not None:
        if file is not None:
            raise ConfigError("a token is in a file or in a variable: name one of them")
        return token_at(f"${variable}")
    place = file or USUAL
    if make and not place.exists():
        write_token(place)
    return token_at(place)


def dialer(at: str, token: bytes, tls: bool | None, authority: Path | None) -> Dialer:
    """How a store is reached."""
    found = Dialer(Address.read(at), token, tls, authority)
    if authority is not None and not found.encrypts:
        raise ConfigError("--authority is for encrypted links: add --tls, or leave it out")
    return found


def token(
    file: Annotated[Path, typer.Argument(help="Where to write it.", metavar="[FILE]")] = USUAL,
) -> None:
    """Make a token for runs on several hosts: whoever has it may take part in them."""
    write_token(file)
    print(f"wrote {file}: copy it to every host of the run, and show it to nobody else")
