"""A listener that starts the page's web server and keeps it supplied with pictures of the run."""

import importlib.util
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from offbeat.errors import ConfigError
from offbeat.log.log import Listener
from offbeat.log.records import Entry
from offbeat.watch.state import RunState

EVERY = 0.25  # real seconds between two pictures
SHARE = 250  # times as long as it takes to draw one, at least: thousands of workers take a while
AT_THE_END = 5.0  # seconds that open pages have to take the last picture
PROGRAM = Path(__file__).with_name("serve.py")
NEEDED = ("starlette", "uvicorn")


class Watch(Listener):
    """Shows a run in a browser; its `address` is told on standard error when the run begins.

    Pictures go through a pipe that never makes the run wait: while the server has not taken the
    last one, no other is drawn. There is no thread here, because the launcher forks.
    """

    def __init__(self, title: str = "", virtual: bool = False, file: IO[str] | None = None):
        """`virtual` says that the run's seconds are simulated."""
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"the live page needs {missing[0]}: pip install 'offbeat[watch]', or leave "
                "watch out"
            )
        self.title, self.virtual, self.file = title, virtual, file
        self.address: str | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe = -1
        self.unsent = b""
        self.state: RunState | None = None
        self.store: Any = None
        self.samples = 0
        self.due = 0.0  # when the next picture is drawn
        self.heard = 0.0  # when the last record came
        self.overlaps = False  # whether workers compute while they exchange
        self.encoder = msgspec.json.Encoder()

    # ------------------------------------------------------------ a listener

    def describe(self, settings: Mapping[str, Any], applied: int | None) -> None:
        self.overlaps = settings.get("overlap") is True

    def begin(self, store: Any, samples: int) -> None:
        self.store, self.samples = store, samples
        workers = store.cells.shape[1]
        self.state = RunState(workers, self.title, self.virtual, self.overlaps)
        self.heard = time.monotonic()
        self._start()
        self._show(self.heard)

    def see(self, record: Entry) -> None:
        assert self.state is not None
        self.state.see(record)
        self.heard = now = time.monotonic()
        if now >= self.due:
            self._show(now)

    def idle(self) -> None:
        now = time.monotonic()
        if now >= self.due:
            self._show(now)

    def end(self) -> None:
        """Send the last picture, and return when the open pages have it or had time to take it."""
        store, process, self.process = self.store, self.process, None
        if process is None:
            self.store = None
            return
        try:
            until = time.monotonic() + AT_THE_END
            done = store.applied + store.given_up >= self.samples
            self.unsent += self._picture(0.0, "finished" if done else "stopped")
            while self._send() and time.monotonic() < until:
                select.select([], [self.pipe], [], max(0.0, until - time.monotonic()))
        finally:
            self.store = None  # it may hold the run's memory
            os.close(self.pipe)
            self.pipe, self.unsent = -1, b""
            try:
                process.wait(AT_THE_END)
            except BaseException:  # it hangs, or a second Ctrl-C: in any case it goes
                process.kill()
                process.wait()
                if not isinstance(sys.exception(), subprocess.TimeoutExpired):
                    raise

    # ------------------------------------------------------------ pictures

    def _show(self, now: float) -> None:
        began = time.process_time()
        if self.process is not None and not self._send():
            assert self.state is not None
            passed = now - self.heard if self.state.began and not self.virtual else 0.0
            self.unsent = self._picture(passed, "")
            self._send()
        self.due = now + max(EVERY, SHARE * (time.process_time() - began))

    def _picture(self, passed: float, over: str) -> bytes:
        """How things stand `passed` seconds after the last record."""
        assert self.state is not None
        now = self.state.time + passed
        applied, given_up = self.store.applied, self.store.given_up
        cells = self.store.cells
        picture = self.state.picture(now, applied, given_up, self.samples, over, cells)
        return self.encoder.encode(picture) + b"\n"

    def _send(self) -> bool:
        """Write what the pipe takes now; True while something is left."""
        with suppress(BlockingIOError):
            try:
                while self.unsent:
                    self.unsent = self.unsent[os.write(self.pipe, self.unsent) :]
            except BrokenPipeError:
                self._died()
        return bool(self.unsent)

    # ------------------------------------------------------------ the server's process

    def _start(self) -> None:
        """Listen here, so that the address is known at once, and leave the rest to the server.

        The token goes through the pipe: arguments of a process can be read by everybody.
        """
        token = secrets.token_urlsafe(24)
        reading, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=16) as listening:
                port = listening.getsockname()[1]
                self.process = subprocess.Popen(
                    # A file and not a module of this package, which would bring torch with it.
                    [sys.executable, "-P", str(PROGRAM), str(listening.fileno()), str(os.getpid())],
                    stdin=reading,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[listening.fileno()],
                    start_new_session=True,  # Ctrl-C is for the run, which then ends this
                )
        finally:
            os.close(reading)
            if self.process is None:
                os.close(self.pipe)
        self.address = f"http://127.0.0.1:{port}/{token}/"
        self.unsent = token.encode() + b"\n"
        self._send()
        print(f"watch: {self.address}", file=self.file or sys.stderr, flush=True)

    def _died(self) -> None:
        """The run goes on without its page."""
        self.unsent = b""
        if self.process is not None:
            process, self.process = self.process, None
            os.close(self.pipe)
            process.kill()
            print(
                f"watch: the page's server has ended ({process.wait()}); the run goes on",
                file=self.file or sys.stderr,
                flush=True,
            )
