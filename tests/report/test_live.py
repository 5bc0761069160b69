"""The progress display: what it says, how seldom it speaks, and that the cursor stays."""

import io
from types import SimpleNamespace
from typing import Any

import pytest

import offbeat as ob
from offbeat.log.records import Part, Updated
from offbeat.recipes import recipe
from offbeat.report import live
from offbeat.report.live import Progress, state_of
from offbeat.report.tables import console
from offbeat.store import board
from offbeat.store.board import LinkState, Row, State, new_board


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
    progress = Progress("a run", file, virtual=True)
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
        assert "\x1b[?25l" not in text
    assert "waiting for worker 1" in file.getvalue()
    assert "a run" in file.getvalue()


def stopped(cells: Any) -> SimpleNamespace:
    """What a run offers to whoever watches: here a quarter is done."""
    return SimpleNamespace(cells=cells, applied=200, given_up=50)


def test_seconds_are_called_virtual_only_where_they_are() -> None:
    for virtual in (False, True):
        progress = Progress(file=io.StringIO(), virtual=virtual)
        progress.begin(stopped(board.new_board(2)), 1000)
        progress.see(Updated(4.0, 1, [Part(0, 1, 0, 0, [], 8, staleness=3, loss=0.5)]))
        assert progress.done == 0.25
        unit = " per virtual s" if virtual else "/s"
        where = "at 4.00 virtual s" if virtual else "at 4.00 s"
        assert progress.line() == f"50 samples{unit}  loss 0.5  staleness 3.00  {where}"


@pytest.mark.usefixtures("eighty")
def test_a_stalled_run_says_who_waits_for_whom_in_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(0.0)
    monkeypatch.setattr(live, "time", clock)
    cells = board.new_board(3)
    for worker in range(3):
        board.enter(cells, worker)
    file = Terminal()
    progress = Progress("asp, 3 workers", file)
    progress.begin(stopped(cells), 1000)
    progress.see(Updated(4.0, 1, [Part(0, 1, 0, 0, [], 8)]))
    assert "waiting" not in file.getvalue()
    cells[Row.CLOCK] = (1_234_567, 1_234_567, 1_234_560)
    cells[Row.WAITING, 0], cells[Row.BLOCKER, 0] = 1, 2
    progress.idle()
    assert "waiting" not in file.getvalue()  # it is too soon for another picture
    clock.now += live.REDRAW
    progress.idle()
    progress.end()
    assert "waiting for worker 2 (clock 1,234,560, 7 behind)" in file.getvalue()
    plain = console(wide := io.StringIO())
    plain.print(progress.picture())
    assert max(map(len, wide.getvalue().splitlines())) <= 80
    assert "…" not in wide.getvalue()


def test_real_workers_are_shown_as_simulated_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "time", Clock(0.5))
    file = io.StringIO()
    task = recipe("digits")
    progress = Progress(file=file)
    ob.train(
        task.model,
        task.data,
        task.loss,
        discipline="asp",
        optimizer=task.optimizer,
        workers=2,
        batch_size=64,
        engine="local",
        listeners=[progress],
    )
    lines = file.getvalue().splitlines()
    assert lines
    for line in lines:
        assert "samples/s" in line
        assert "loss" in line or line == lines[0]
        assert "virtual" not in line
        assert len(line) <= 80
    assert progress.done == 1.0


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
    cells[Row.WAITING, 0], cells[Row.CLOCK, 0], cells[Row.CLOCK, 2] = 1, 125, 118
    assert state_of(cells, 0)[0] == "waiting"
    cells[Row.BLOCKER, 0] = 2
    assert state_of(cells, 0)[0] == "waiting for worker 2 (clock 118, 7 behind)"
    cells[Row.CLOCK, 2] = 125  # it has just come, and the others are about to be let go
    assert state_of(cells, 0)[0] == "waiting for worker 2"
    board.contributed(board.rows(cells), 2)  # and now the round lacks somebody else
    board.contributed(board.rows(cells), 0)
    cells[Row.CLOCK, 1] = 124
    assert state_of(cells, 0)[0] == "waiting for worker 1 (clock 124, 1 behind)"
    board.contributed(board.rows(cells), 1)
    assert state_of(cells, 0)[0] == "waiting"
    board.set_state(cells, 1, State.LOST)
    assert state_of(cells, 1)[0] == "lost"
    board.set_state(cells, 2, State.RESTING)
    assert state_of(cells, 2)[0] == "resting"


def test_one_that_waits_for_its_link_is_shown_so() -> None:
    cells = new_board(1)
    cells[Row.STATE, 0] = State.ACTIVE
    for link, told in (
        (LinkState.SENDING, "in its link (sending)"),
        (LinkState.RECEIVING, "in its link (receiving)"),
        (LinkState.BROKEN, "out of reach"),
        (LinkState.IDLE, "computing"),
    ):
        cells[Row.LINK, 0] = link
        assert state_of(cells, 0)[0] == told
    cells[Row.LINK, 0], cells[Row.WAITING, 0] = LinkState.SENDING, 1
    assert state_of(cells, 0)[0] == "waiting"
