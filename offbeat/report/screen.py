"""The lower lines of a terminal for a display: what anybody prints meanwhile stays above them.

Workers are forked and write to the same terminal as the launcher. A display that moves the cursor
would erase their lines. So while it is up, standard output and error of this process, and of every
process that is started meanwhile, are a pipe. A thread reads it and prints above the display.
"""

import contextlib
import fcntl
import io
import math
import os
import re
import secrets
import shutil
import sys
import threading
from typing import IO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType

_ROOM = 1 << 20  # bytes of the pipe, if the system allows: who prints rarely waits
_LONGEST = 1 << 16  # bytes of a line that has no end yet
# Colours may pass; what moves the cursor or clears would go astray between two pictures.
_MOVES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-ln-~]|\x1b[78cDEM]")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def can_show(file: IO[str]) -> bool:
    """Whether a display can be put there: a terminal that can move its cursor."""
    return file.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


class Screen:
    """A part of the terminal behind `file`, from `open` to `close`."""

    def __init__(self, file: IO[str]):
        self.file = file
        known = Console(file=file)
        self.console = Console(
            file=io.StringIO(),
            force_terminal=True,
            color_system=known.color_system,  # type: ignore[arg-type]
            highlight=False,
        )
        self.lock = threading.Lock()
        self.lines: list[str] = []  # of the picture
        self.drawn: list[int] = []  # columns of each line that is on the screen
        self.pending = b""  # a line that has no end yet
        self.up = True
        self.terminal: int | None = None  # a handle of our own; None where the file has none
        self.kept: dict[int, int] = {}  # standard handles as they were
        self.write_end: int | None = None
        self.mark = b""
        self.drained = threading.Event()
        with contextlib.suppress(OSError, io.UnsupportedOperation):
            self.terminal = os.dup(file.fileno())
            self._take_over(self.terminal)

    # ------------------------------------------------------------ the display

    def show(self, picture: RenderableType) -> None:
        """Put `picture` where the last one was."""
        columns, rows = self._size()
        self.console.size = (columns - 1, rows)
        with self.console.capture() as caught:
            self.console.print(picture)
        with self.lock:
            self.lines = caught.get().splitlines()[: rows - 2]
            self._draw(b"")

    def above(self, words: bytes) -> None:
        """Print whole lines above the display."""
        with self.lock:
            self._draw(words)

    def close(self) -> None:
        """Take the display away when all that was printed so far stands where it was."""
        if not self.up:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for handle, before in self.kept.items():
            os.dup2(before, handle)
            os.close(before)
        self.kept = {}
        if self.write_end is not None:
            # Whatever was printed before this lies before it in the pipe. There may be no end of
            # the pipe to wait for: something that a script started may hold it open for ever.
            os.write(self.write_end, self.mark)
            os.close(self.write_end)
            self.write_end = None
            self.drained.wait()
        else:
            self._end()

    def _end(self) -> None:
        with self.lock:
            self.lines = []
            rest = self.pending + b"\n" if self.pending else b""
            self.pending = b""
            self._draw(rest)
            self.up = False

    def _draw(self, words: bytes) -> None:
        """In one go: the old picture goes, `words` come, the new picture stands below them."""
        columns, _ = self._size()
        # A window that has become narrower shows a line in several rows.
        rows = sum(max(1, math.ceil(width / columns)) for width in self.drawn)
        erase = f"\x1b[{rows}A\r\x1b[J" if rows else ""
        shown = [*self._unfinished(columns - 1), *self.lines]
        self.drawn = [cell_len(_COLOURS.sub("", line)) for line in shown]
        self._write(erase.encode() + words + "".join(f"{line}\n" for line in shown).encode())

    def _unfinished(self, columns: int) -> list[str]:
        """The beginning of a line, such as a question or a bar of somebody else's."""
        text = _last(_MOVES.sub(b"", self.pending)).decode(errors="replace")
        text = "".join(c for c in _COLOURS.sub("", text) if c.isprintable())
        return [set_cell_size(text, min(columns, cell_len(text)))] if text else []

    def _size(self) -> tuple[int, int]:
        columns = rows = 0
        if self.terminal is None:
            columns, rows = shutil.get_terminal_size()
        else:
            with contextlib.suppress(OSError):
                columns, rows = os.get_terminal_size(self.terminal)
        return columns or 80, rows or 24

    def _write(self, data: bytes) -> None:
        if self.terminal is None:
            self.file.write(data.decode(errors="replace"))
            self.file.flush()
            return
        view = memoryview(data)
        with contextlib.suppress(OSError):  # a terminal that has been closed is no reason to stop
            while view:
                view = view[os.write(self.terminal, view) :]

    # ------------------------------------------------------------ what others print

    def _take_over(self, terminal: int) -> None:
        """Whatever would go to this terminal goes through a pipe from now on."""
        mine = os.fstat(terminal).st_rdev
        handles = [n for n in (1, 2) if _is(n, mine)]
        if not handles:
            return
        read_end, self.write_end = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, _ROOM)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for handle in handles:
            self.kept[handle] = os.dup(handle)
            os.dup2(self.write_end, handle)
        self.mark = b"\0" + secrets.token_hex(16).encode() + b"\0"
        # Nothing here may use what a forked child uses too: a lock that this thread holds at the
        # moment of a fork is held for ever there. Only its own handles, and no printing.
        thread = threading.Thread(target=self._read, args=(read_end,), daemon=True)
        thread.name = "offbeat screen"
        thread.start()

    def _read(self, read_end: int) -> None:
        held = b""
        while data := os.read(read_end, 1 << 16):
            if not self.up:  # of a process that outlives the run
                self._write(data)
                continue
            held += data
            if self.mark in held:
                before, _, after = held.partition(self.mark)
                self._printed(before)
                self._end()
                self.drained.set()
                self._write(after)
            else:
                # The mark is written in one go, but may be read in two.
                cut = (
                    held.rfind(self.mark[:1]) if self.mark[:1] in held[-len(self.mark) :] else None
                )
                ready, held = (held, b"") if cut is None else (held[:cut], held[cut:])
                self._printed(ready)
        os.close(read_end)

    def _printed(self, data: bytes) -> None:
        """Somebody printed: whole lines go up, the rest waits for its end."""
        whole, newline, rest = (self.pending + data).rpartition(b"\n")
        if len(rest) > _LONGEST:
            whole, newline, rest = whole + newline + rest, b"\n", b""
        with self.lock:
            self.pending = _last(rest)
            lines = whole.split(b"\n") if newline else []
            self._draw(b"".join(_MOVES.sub(b"", line) + b"\n" for line in lines))


def _is(handle: int, device: int) -> bool:
    try:
        return os.isatty(handle) and os.fstat(handle).st_rdev == device
    except OSError:
        return False


def _last(line: bytes) -> bytes:
    """What a terminal still shows of a line that was written over itself, as bars do it."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]
