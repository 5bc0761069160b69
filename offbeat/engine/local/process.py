"""Child processes that never outlive their parent, and that leave last words when they fail."""

import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import msgspec
import torch

from offbeat.engine.signals import leave_to_parent
from offbeat.engine.spawn import LastWords, Role
from offbeat.errors import OffbeatError, RunError

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_OMP_PAUSE_HARD = 2
# What glibc's mallopt is told, and its numbers for that.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT = 1 << 30  # bytes
GOODBYE = b"\n"  # the last byte of a child that has come to its end
_MOST = 60_000  # bytes of last words: what a pipe takes without a reader


class Child:
    """A forked process, with a handle that becomes readable when it is gone."""

    def __init__(self, pid: int, words: int):
        self.pid, self.words = pid, words
        self.handle = os.pidfd_open(pid)
        self.status: int | None = None  # as `os.waitstatus_to_exitcode` has it, once it is gone
        self.well = False  # whether it came to its end and said so

    def kill(self) -> None:
        if self.status is None:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def forget(self) -> None:
        """Close the handles; the process is another's to watch."""
        os.close(self.handle)
        os.close(self.words)

    def reap(self) -> LastWords | None:
        """Wait for its end and read what it left; None if it was killed or ended well."""
        if self.status is not None:
            return None
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        os.close(self.handle)
        os.set_blocking(self.words, False)  # a grandchild may still hold the other end
        with os.fdopen(self.words, "rb") as pipe:
            left = pipe.read() or b""
        # Others may end a process with status 0 too: a user's os._exit(0), a library's exit.
        self.well = self.status == 0 and left == GOODBYE
        left = left.removesuffix(GOODBYE)
        return msgspec.json.decode(left, type=LastWords) if left else None


class ForkSpawner:
    """Starts processes on this machine by forking: whatever a role needs is there already."""

    def start(self, role: Role, main: Callable[[], None]) -> Child:
        with startable(role.title):
            return fork(role.name, main, role.threads)


@contextmanager
def startable(name: str) -> Iterator[None]:
    """What the system says when it has no room for another process, with a remedy."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{name} could not be started ({error.strerror}): use fewer workers, or "
            "raise the limits on processes and memory (ulimit -a shows them)"
        ) from error


def fork(name: str, main: Callable[[], None], threads: int = 1) -> Child:
    """Run `main` in a child that dies with its parent and does not hear Ctrl-C or SIGTERM.

    `name`, of at most 15 letters, is what `ps` and `top` show.

    Forked, so that models, losses and datasets from a notebook or with lambdas need no pickling.
    """
    child, inside = branch(name)
    if inside is None:
        assert child is not None
        return child
    inside.finish(lambda: in_fresh_thread(main, threads))


def branch(name: str) -> tuple[Child | None, "Inside | None"]:
    """Fork here: the parent gets a Child, the child goes on from this line with an Inside."""
    read, write = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    send_helpers_home()
    with warnings.catch_warnings():
        # Threads of the parent are not there in the child, and it never waits for one of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
    if pid:
        os.close(write)
        return Child(pid, read), None
    os.close(read)
    gc.freeze()  # what was there before the fork is not searched for garbage again, nor copied
    leave_to_parent()
    be_child(parent, name)
    return None, Inside(write)


def be_child(parent: int, name: str) -> None:
    """In a forked process that computes: it dies with its parent, and keeps what it frees."""
    _keep_freed_memory()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_NAME, name.encode()[:15])
    prctl(_PR_SET_TIMERSLACK, 1)  # nanoseconds: an emulated step ends when it should
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def send_helpers_home() -> None:
    """End OpenMP's helper threads of this thread; they come again when there is work for them.

    A child, or another thread, would count them as there, find the machine overbooked, and put its
    own helpers to sleep between any two operations, which makes every step a third slower.
    """
    with open("/proc/self/maps") as file:
        found = {line.split()[-1] for line in file if "libgomp" in line}
    for library in found:
        pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
        if pause is not None:
            pause(_OMP_PAUSE_HARD)


def _keep_freed_memory() -> None:
    """Let what one step frees be there for the next, where the C library can be told so.

    Otherwise large activations and gradients go back to the system at every step, and thousands of
    pages are fetched and cleared again; most of all in a thread with a heap of its own, so a new
    one gets the first one's.
    """
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    if tell is not None:
        tell(_M_ARENA_MAX, 1)
        tell(_M_MMAP_THRESHOLD, _KEPT)
        tell(_M_TRIM_THRESHOLD, _KEPT)


def compute_steadily() -> None:
    """Tell the system that this thread computes, and need not run the moment it is woken.

    The answer to a push wakes a worker on the core of the thread that sent it. That thread would be
    pushed aside at once, with the lock in its hands, and everybody else would wait for a step.
    """
    with suppress(OSError):  # where it is not allowed, all goes on, if more slowly
        policy = os.SCHED_BATCH | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(0))


def last_words(error: BaseException, late: bool = False) -> LastWords:
    """Why a process ends itself."""
    trace = "".join(traceback.format_exception(error))
    name = "" if isinstance(error, OffbeatError) else f"{type(error).__name__}: "
    ours = isinstance(error, OffbeatError)
    return LastWords(f"{name}{error}"[:2000], trace[-20_000:], ours, late)


class Inside:
    """What a forked child knows of itself."""

    def __init__(self, words: int):
        self.words = words

    def finish(self, main: Callable[[], None]) -> NoReturn:
        """Run `main` and end this process, whatever happens; a failure is told to the parent."""
        status = 1
        try:
            main()
            status = 0
        except BaseException as error:
            self.tell(error)
        finally:
            self.leave(status)

    def tell(self, error: BaseException, late: bool = False) -> None:
        """Leave last words for the parent."""
        words = last_words(error, late)
        left = msgspec.json.encode(words)
        if len(left) > _MOST:
            words.trace = ""
            left = msgspec.json.encode(words)
        os.write(self.words, left)

    def leave(self, status: int) -> NoReturn:
        """End this process here, and let the parent know that it meant to."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # a closed terminal is no reason to stay
        with suppress(OSError):  # nobody is there to hear it
            os.write(self.words, GOODBYE)
        os._exit(status)


def in_fresh_thread(main: Callable[[], None], threads: int) -> None:
    """Run `main` in a new thread that computes with `threads` threads.

    OpenMP keeps one pool of helpers per thread, and a forked main thread remembers a pool whose
    threads were not forked with it; waiting for them would be waiting for ever.
    """
    failed: list[BaseException] = []

    def body() -> None:
        try:
            torch.set_num_threads(threads)
            main()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body, name="offbeat")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
