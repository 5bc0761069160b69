"""What the processes of a run are called, and how it is told that one has failed."""

import os
import signal
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.engine.orders import TESTER
from offbeat.engine.process import LastWords
from offbeat.errors import RunError

RESTARTS = 3  # deaths in a row, without any work between them, that a process is forgiven
SERVER = -2  # its number among the children, with its hands behind it: -3, -4, ...


class Told(RunError):
    """What a process of the run has failed of, with the line if that is the user's."""


def failed(
    number: int, words: LastWords | None, status: int | None = None, patience: float | None = None
) -> RunError:
    """In words: who failed, of what, and what to do; `patience` with one that was silent."""
    name = who(number)
    if words is not None and words.ours:  # it says itself whom it is about
        return Told(f"{where(words.trace, '{}: ')}{words.message}")
    if words is not None:
        return Told(f"{name} failed: {words.message}{where(words.trace)}")
    how = f"was killed by {signal.Signals(-status).name}" if status and status < 0 else "ended"
    remedy = "if the machine ran out of memory, use fewer workers or smaller batches"
    if patience is not None:
        how = f"was silent for longer than patience ({patience:g} s)"
        remedy = "look for what holds it up; if it waits for something slow, pass a larger patience"
    elif status == 0:
        how = "ended with exit status 0"
        remedy = "look in your code, and in what it calls, for os._exit(0)"
    return Told(f"{name} {how} {RESTARTS + 1} times in a row without any work; {remedy}")


@contextmanager
def startable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{name} could not be started ({error.strerror}): use fewer workers, or "
            "raise the limits on processes and memory (ulimit -a shows them)"
        ) from error


def hand_number(hand: int) -> int:
    """The number of the first, second, ... hand of the server among the processes."""
    return SERVER - hand


def name_of(number: int) -> str:
    """What `ps` and `top` show."""
    if number < SERVER:
        return f"offbeat hand {SERVER - number}"
    return {SERVER: "offbeat server", TESTER: "offbeat tester"}.get(number, f"offbeat {number}")


def who(number: int) -> str:
    if number < SERVER:
        return f"hand {SERVER - number} of the server"
    return {SERVER: "the server", TESTER: "the test process"}.get(number, f"worker {number}")


def where(trace: str, form: str = " ({})") -> str:
    """The last line of a traceback that is the user's own, put into `form`."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    others = (here, "site-packages", sysconfig.get_path("stdlib") + os.sep)
    found = ""
    for line in trace.splitlines():
        line = line.strip()
        if line.startswith('File "') and not any(other in line for other in others):
            found = line
    if not found:
        return ""
    file, _, rest = found.removeprefix('File "').partition('", line ')
    return form.format(f"{file} line {rest.partition(',')[0]}")
