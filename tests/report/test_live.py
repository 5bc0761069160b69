"""The progress display: what it says, how seldom it speaks, and that the cursor stays."""

import io

import pytest

import offbeat as ob
from offbeat import board
from offbeat.board import Row, State
from offbeat.report import live
from offbeat.report.live import Progress, state_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Real time as the display sees it: `tick` seconds pass between two looks."""

    def __init__(self, tick: float):
        self.now, self.tick = 0.0, tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def eighty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def watched(
    monkeypatch: pytest.MonkeyPatch,
    file: io.StringIO,
    tick: float,
    cluster: str = "20ms,80ms",
    steps: int = 10,
) -> Progress:
    monkeypatch.setattr(live, "time", Clock(tick))
    progress = Progress("a run", file)
    ob.estimate(cluster, "ssp:1", steps=steps, listeners=[progress])
    return progress


def test_a_short_run_says_nothing_outside_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    watched(monkeypatch, file, tick=1e-6)
    assert file.getvalue() == ""


def test_plain_lines_come_every_couple_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    progress = watched(monkeypatch, file, tick=0.5)
    lines = file.getvalue().splitlines()
    assert len(lines) == progress.due // live.LINES - 1
    assert "\x1b" not in file.getvalue()
    assert max(map(len, lines)) <= 80
    assert "virtual s" in lines[0]
    shares = [int(line.split()[0]) for line in lines]
    assert shares == sorted(shares)
    assert progress.done == 1.0


@pytest.mark.usefixtures("eighty")
def test_a_terminal_shows_workers_and_keeps_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal()
    monkeypatch.setattr(live, "time", Clock(0.2))
    progress = Progress("a run", file)
    seen = []

    class Killed(ob.Listener):
        """What the terminal would be left with if the process died here."""

        def see(self, record: object) -> None:
            seen.append(file.getvalue())

    ob.estimate("20ms,80ms", "bsp", steps=10, listeners=[progress, Killed()])
    for text in (*seen, file.getvalue()):
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    assert "waiting for worker 1" in file.getvalue()
    assert "a run" in file.getvalue()


@pytest.mark.usefixtures("eighty")
def test_many_workers_become_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Terminal()
    watched(monkeypatch, file, tick=0.2, cluster=",".join(["20ms"] * 20), steps=2)
    assert "+12" in file.getvalue()


@pytest.mark.usefixtures("eighty")
def test_leaving_the_block_ends_the_display_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Boom(ob.Listener):
        def see(self, record: object) -> None:
            raise RuntimeError("boom")

    monkeypatch.setattr(live, "time", Clock(0.2))
    progress = Progress(file=Terminal())
    with pytest.raises(RuntimeError, match="boom"), progress:
        ob.estimate("20ms", "bsp", steps=3, listeners=[progress, Boom()])
    assert progress.live is None


def test_a_state_is_told_in_words() -> None:
    cells = board.new_board(3)
    assert state_of(cells, 0)[0] == "not there yet"
    for worker in range(3):
        board.enter(cells, worker)
    assert state_of(cells, 0)[0] == "computing"
    cells[Row.WAITING, 0], cells[Row.BLOCKER, 0] = 1, 2
    assert state_of(cells, 0)[0] == "waiting for worker 2"
    board.set_state(cells, 1, State.LOST)
    assert state_of(cells, 1)[0] == "lost"
    board.set_state(cells, 2, State.RESTING)
    assert state_of(cells, 2)[0] == "resting"
