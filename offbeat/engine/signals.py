"""What signals mean to a run: the first Ctrl-C or SIGTERM asks for a stop, the next one stops."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from offbeat.errors import ConfigError

Ask = Callable[[int], None]


class Terminated(KeyboardInterrupt, SystemExit):
    """SIGTERM: stopped as by Ctrl-C; whoever does not catch it ends with the code of that signal.

    Schedulers ask with SIGTERM before they kill, and know 143 as the answer to it.
    """

    def __init__(self, *what: object):
        super().__init__(*what)
        self.code = 128 + signal.SIGTERM


def stopped_by(number: int) -> KeyboardInterrupt:
    """What to raise where this signal has stopped a run."""
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def heard(ask: Ask, once: bool = True) -> Iterator[None]:
    """While this lasts the first Ctrl-C or SIGTERM goes to `ask`, the next one stops at once.

    Not `once`: all of them go to `ask`, for a process that is sent one by several others.

    A program that has a handler for SIGTERM, or ignores it, has decided what that means and keeps
    it. Only the main thread may have handlers; elsewhere a run is not stopped by signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = os.getpid()
    before: dict[int, Any] = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        before[signal.SIGTERM] = signal.SIG_DFL

    def first(number: int, frame: Any) -> None:
        if os.getpid() != mine:  # forked a moment ago: the signal is for the one who forked it
            return
        if once:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            if signal.SIGTERM in before:
                signal.signal(signal.SIGTERM, at_once)
        ask(number)

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        if os.getpid() == mine:  # one that was forked meanwhile has set its own
            for number, handler in before.items():
                signal.signal(number, handler)


def at_once(number: int, frame: Any) -> None:
    """A handler that ends whatever is under way."""
    raise stopped_by(number)


def leave_to_parent() -> None:
    """In a forked child: signals that a shell or scheduler sends to all are for the launcher.

    SIGTERM is not ignored but heard and left at that, so that programs started from here get it as
    usual, and so does whatever is forked from here.
    """
    mine = os.getpid()

    def nothing(number: int, frame: Any) -> None:
        if os.getpid() != mine:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, nothing)
    keep_children()


def keep_children() -> None:
    """From here on a child that ends waits to be asked how, also where SIGCHLD was ignored."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def children_kept() -> Iterator[None]:
    """The same while this lasts.

    A process may inherit that from whoever started it; the system then throws away how its
    children end.
    """
    if signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "this program ignores SIGCHLD, and so cannot know how its processes end: call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) in the main thread before"
        )
    mine = os.getpid()
    keep_children()
    try:
        yield
    finally:
        if os.getpid() == mine:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
