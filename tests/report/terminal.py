"""A small terminal for tests: a program runs on a pseudo-terminal, and its screen can be read."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PART = re.compile(r"\x1b\[([0-9;?]*)([@-~])|\x1b[78]|[\x00-\x1f]|[^\x00-\x1f\x1b]+")


class Emulated:
    """Lines with a cursor: text wraps, lines scroll out at the top and are kept."""

    def __init__(self, columns: int = 80, rows: int = 24):
        self.columns, self.rows = columns, rows
        self.lines: list[str] = [""]
        self.row = self.column = 0  # of the cursor; rows count from the very first line

    @property
    def top(self) -> int:
        return max(0, len(self.lines) - self.rows)

    def feed(self, text: str) -> None:
        for part in _PART.finditer(text):
            if part[2]:
                self._control(part[1], part[2])
            elif part[0] == "\r":
                self.column = 0
            elif part[0] == "\n":
                self._down()
            elif part[0] >= " ":
                for letter in part[0]:
                    self._put(letter)

    def _put(self, letter: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _control(self, numbers: str, letter: str) -> None:
        if letter == "A":  # up, but never out of the window
            self.row = max(self.top, self.row - int(numbers or 1))
        elif letter == "J":
            assert numbers in ("", "0")
            self.lines[self.row] = self.lines[self.row][: self.column]
            self.lines[self.row + 1 :] = [""] * (len(self.lines) - self.row - 1)
        elif letter == "K":
            kept = 0 if numbers == "2" else self.column
            self.lines[self.row] = self.lines[self.row][:kept]
        else:
            assert letter in "mhl", f"unknown: ESC [ {numbers} {letter}"

    @property
    def text(self) -> str:
        """All that a user sees, with what has scrolled out above."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


def played(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    seen: Callable[[str, "subprocess.Popen[bytes]"], None] = lambda text, process: None,
) -> tuple[int, str, str]:
    """Exit code, final screen, and everything that was written; `seen` is called as it comes."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    raw = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # the last one has closed it
            break
        if not data:
            break
        raw += data
        seen(raw.decode(errors="replace"), process)
    os.close(master)
    screen = Emulated()
    written = raw.decode(errors="replace")
    screen.feed(written)
    return process.wait(), screen.text, written
