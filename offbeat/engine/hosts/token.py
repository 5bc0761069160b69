"""Where the token of a run is kept: in a file of the user's alone, or in a variable."""

import os
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.transport.handshake import check_token, new_token

USUAL = Path("offbeat.token")


def token_at(place: str | Path) -> bytes:
    """The token in a file, or in the variable of `$NAME`."""
    if str(place).startswith("$"):
        name = str(place)[1:]
        if name not in os.environ:
            raise ConfigError(f"there is no variable {name}: put the run's token there")
        return check_token(os.environ[name].encode(), f"the variable {name}")
    try:
        return check_token(Path(place).read_bytes(), str(place))
    except OSError as error:
        raise ConfigError(
            f"the token of the run cannot be read from {place} ({error.strerror}): copy the file "
            "from the store's host, or name it with --token-file"
        ) from error


def write_token(place: Path) -> None:
    """A new one, in a file that is the user's alone."""
    try:
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"no token can be written to {place}: {error.strerror}") from error
    with open(handle, "w") as out:
        out.write(new_token() + "\n")
