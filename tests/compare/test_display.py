"""How long a comparison will take, and what it shows while it goes."""

import io
from pathlib import Path

import pytest

from offbeat.compare import (
    Point,
    RealSpeeds,
    Simulated,
    compare,
)
from offbeat.compare import display as display_module
from offbeat.compare.display import Display, Estimate, in_words
from tests.compare.common import plan, task


def test_the_estimate_scales_by_work() -> None:
    points = [Point("bsp", n) for n in (1, 2, 4)]
    estimate = Estimate({points[0]: 4.0, points[1]: 2.0, points[2]: 1.0})
    assert estimate.left() is None
    assert estimate.left(points[0], 0.5, 10.0) == pytest.approx(25.0)
    estimate.ended(points[0], 20.0)
    assert estimate.left() == pytest.approx(15.0)
    assert estimate.left(points[1], 0.5, 10.0) == pytest.approx(12.0)
    estimate.ended(points[1], 20.0)
    estimate.ended(points[2], 1.0)
    assert estimate.left() == 0.0


def test_slow_workers_count_in_the_estimate() -> None:
    slow = RealSpeeds("20ms", straggler=4)
    assert slow.work("bsp", 4) == pytest.approx(0.08 / 4)
    assert slow.work("asp", 4) == pytest.approx(1 / (3 / 0.02 + 1 / 0.08))
    assert RealSpeeds().work("bsp", 1) == 1
    assert Simulated().work("bsp", 8) == Simulated().work("bsp", 1)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (41.4, "41 s"), (59.4, "59 s"), (100, "2 min"), (7800, "2 h 10 min")],
)
def test_time_left_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.5
        return self.now


def watched(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, out: Path) -> str:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(display_module, "time", Clock())
    monkeypatch.setattr("offbeat.report.live.time", Clock())
    with Display(file, virtual=True) as display:
        compare(task, plan(sync=("bsp", "soft:2")), out, [display])
    return file.getvalue()


def test_elsewhere_than_in_a_terminal_a_line_tells_of_each_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = watched(monkeypatch, io.StringIO(), tmp_path / "out").splitlines()
    ends = [line for line in lines if " samples/virtual s, " in line]
    assert [line.split(": ")[0] for line in ends] == [
        "1/3 bsp on 1 device",
        "2/3 bsp on 2 devices",
        "3/3 soft:2 on 2 devices",
    ]
    assert all("left" in line for line in ends[:-1])
    assert "left" not in ends[-1]
    assert watched(monkeypatch, io.StringIO(), tmp_path / "out") == (
        "3 of 3 cells are there already\n"
    )


def test_in_a_terminal_bars_show_the_grid_and_its_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = watched(monkeypatch, Terminal(), tmp_path / "out")
    for words in ("comparison", "bsp on 2 devices", "1/3", "left", "samples per virtual s"):
        assert words in text
    assert "\x1b[?25l" not in text.replace("\x1b[?25l\x1b[?25h", "")
