"""What every command shares: how results and failures leave the program."""

import signal
import sys
from typing import IO, Any

import msgspec

from offbeat.engine.signals import Terminated
from offbeat.report.words import visible

INTERRUPTED = 130  # what shells expect of a program that Ctrl-C stopped
TERMINATED = 128 + signal.SIGTERM  # and schedulers of one that they asked to stop
EXIT_CODES = (
    "Exit codes: 0 fine, 1 other error of offbeat, 2 bad input, 3 the run failed, "
    "4 run folder or checkpoint unusable, 5 replay differs, 130 stopped by Ctrl-C, "
    "143 stopped by SIGTERM."
)


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    # msgspec writes null where Python's own encoder would write NaN, which is not JSON.
    print(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


def stop_code(stopped: BaseException | None) -> int:
    """The exit code of a command that a signal has stopped."""
    return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED


def say(words: str, file: IO[str] | None = None) -> None:
    """A line, whatever is in it: names may come from anybody's run folder."""
    print(visible(words), file=file or sys.stdout)


def fail(message: str, code: int, as_json: bool) -> int:
    """Say what went wrong, or that the user stopped it, and return the exit code."""
    if as_json:
        print_json({"error": message, "exit_code": code})
    else:
        prefix = "" if code in (INTERRUPTED, TERMINATED) else "error: "
        say(f"{prefix}{message}", sys.stderr)
    return code
