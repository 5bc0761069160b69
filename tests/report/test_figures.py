"""The figures: which there are, what is drawn in them, and that colours can be told apart."""

import re
import sys
from xml.etree import ElementTree

import pytest

from offbeat.errors import ConfigError
from offbeat.report.drawing import COLOURS, DASHES, MARKERS, Look, Picture, plain
from offbeat.report.figures import against_devices, metrics, pictures
from offbeat.report.figures_runs import ROWS, STRETCHES, curves, said, timeline, timelines
from offbeat.report.grid import Grid
from offbeat.report.summary import TurnFigures
from offbeat.report.timeline import Segment
from tests.report.common import HOSTILE, cell, grid, stretches, whole

SVG = "{http://www.w3.org/2000/svg}"
EVERY = [
    *("speed", "accuracy", "communication", "memory", "target", "efficiency"),
    *("curves", "staleness", "timeline"),
]


def found(made: Grid) -> dict[str, Picture]:
    return {picture.name: picture for picture in pictures(made)}


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def drawn(svg: str) -> int:
    """Paths and markers with a series' or a kind's colour."""
    coloured = r"(?:fill|stroke): var\(--(?:series-\d|compute|exchange|wait)\)"
    return len(re.findall(coloured, svg))


def test_every_figure_is_there_with_marks_in_it() -> None:
    made = found(whole())
    assert list(made) == EVERY
    for picture in made.values():
        assert drawn(picture.inline()) > 2, picture.name


def test_one_number_of_devices_gives_bars() -> None:
    made = found(grid(cell("bsp"), cell("asp"), target=0.9))
    assert list(made) == EVERY
    assert made["speed"].title == "Training speed on 2 devices"
    assert "64" in texts(made["speed"].inline())


def test_one_run_has_figures_of_its_own() -> None:
    names = list(found(grid(cell("asp"))))
    assert names == ["curves", "loss", "pace", "shares", "staleness", "timeline"]


def test_without_anything_there_is_no_figure() -> None:
    assert pictures(grid()) == []


def test_without_tests_the_loss_is_drawn_and_no_target() -> None:
    made = found(grid(cell("bsp", accuracy=None), cell("asp", accuracy=None)))
    assert "target" not in made
    assert "accuracy" not in made
    assert made["curves"].title == "Training loss against time"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"engine": "sim"}, "simulated, virtual time"), ({"emulated": [0.1, 0.1]}, "emulated speeds")],
)
def test_what_is_not_real_is_said_on_every_figure(changes: dict[str, object], words: str) -> None:
    alone = found(grid(cell("asp", **changes)))
    both = found(grid(cell("bsp", **changes), cell("asp", **changes)))
    for picture in [*alone.values(), *both.values()]:
        assert words in texts(picture.svg()), picture.name
    for picture in found(grid(cell("bsp"), cell("asp"))).values():
        assert not any("emulated" in t or "virtual" in t for t in texts(picture.svg()))


def test_the_spread_of_repeats_is_drawn() -> None:
    metric = metrics(whole())[0]
    picture = against_devices(whole(), metric)
    assert picture is not None
    assert "Whiskers" in picture.caption
    segments = [
        c.get_segments() for c in picture.figure.axes[0].collections if hasattr(c, "get_segments")
    ]
    assert len(segments) == 3
    x, low = segments[0][0][0]
    assert segments[0][0][1][0] == x
    assert segments[0][0][1][1] - low == pytest.approx(1.0)
    once = against_devices(grid(cell("bsp", 1), cell("bsp", 2)), metric)
    assert once is not None
    assert "Whiskers" not in once.caption


def test_a_target_not_reached_is_marked() -> None:
    cells = [cell("bsp", 1), cell("bsp", 2), cell("asp", 1), cell("asp", 2, accuracy=0.8)]
    picture = found(grid(*cells, target=0.9))["target"]
    assert "A cross" in picture.caption
    assert "asp on 2 devices: not reached" in picture.words
    bars = found(grid(*cells[1::2], target=0.9))["target"]
    assert " not reached" in texts(bars.svg())


def test_a_turn_of_the_course_is_a_line_over_time() -> None:
    turn = TurnFigures(3.0, 12, "asp", 0.25, "25 % of the work is done")
    for name in ("curves", "loss", "pace"):
        plain_one = found(grid(cell("bsp")))[name]
        turned = found(grid(cell("bsp", turns=[turn])))[name]
        assert "dotted line is a turn" in turned.caption
        assert "dotted line" not in plain_one.caption
        before, after = (
            sum(line.get_linestyle() == ":" for axis in one.figure.axes for line in axis.lines)
            for one in (plain_one, turned)
        )
        assert after == before + 1


# ---------------------------------------------------------------- timeline


def test_every_stretch_says_what_it_was() -> None:
    assert (
        said(Segment(1, "wait", 2.0, 2.5, 3))
        == "worker 1: waiting for worker 3, 0.50 s from 2.00 s"
    )
    assert said(Segment(0, "compute", 0.0, 20.0)) == "worker 0: computing, 20.0 s from 0 s"
    picture = found(grid(cell("bsp"), cell("asp")))["timeline"]
    root = ElementTree.fromstring(picture.inline())
    marks = [e for e in root.iter() if e.get("class") == "mark"]
    assert len(marks) == 2 * len(stretches(2))
    assert {m.get("data-row") for m in marks} == {"0", "1", "2", "3"}
    assert "bsp, worker 1: waiting for worker 0, 0.20 s from 0.80 s" in {
        m.get("aria-label") for m in marks
    }


def test_timelines_are_equally_long_and_bounded() -> None:
    many = [Segment(n % 40, "compute", n * 0.01, n * 0.01 + 0.4) for n in range(2000)]
    made = grid(
        cell("bsp", 40, segments=many, window=(0.0, 20.0)),
        cell("asp", 40, segments=many, window=(0.0, 20.0)),
        cell("ssp:3", 40, segments=stretches(40), window=(0.0, 3.0)),
    )
    shown = timelines(made)
    assert {round(end - begin, 9) for _, _, begin, end in shown} == {3.0}
    assert sum(len(segments) for _, segments, _, _ in shown) <= STRETCHES
    assert max(s.worker for _, segments, _, _ in shown for s in segments) < ROWS


def test_without_segments_there_is_no_timeline() -> None:
    assert timeline(grid(cell(segments=[]))) is None


# ---------------------------------------------------------------- how they look


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted([luminance(first), luminance(second)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1])
def test_letters_and_marks_stand_out_from_the_paper(mode: int) -> None:
    paper = COLOURS["paper"][mode]
    for name in ("ink", "soft", "note", "series-1"):  # the last is that of links
        assert contrast(COLOURS[name][mode], paper) >= 4.5, name
    for name in COLOURS:
        if name not in ("paper", "line"):
            assert contrast(COLOURS[name][mode], paper) >= 3, name


def test_light_colours_are_the_keys_and_so_all_differ() -> None:
    lights = [pair[0] for pair in COLOURS.values()]
    assert len(set(lights)) == len(lights)


def test_series_differ_by_more_than_colour() -> None:
    looks = [Look.of(n) for n in range(8)]
    assert len({(look.marker, str(look.dashes)) for look in looks}) == 8
    assert len({(look.marker, look.colour) for look in map(Look.of, range(40))}) == 40
    assert len(MARKERS) >= 6
    assert len(DASHES) >= 4


def test_colours_become_variables_and_ids_do_not_meet() -> None:
    ids: list[str] = []
    for picture in pictures(whole()):
        inline = picture.inline()
        assert "<svg" in inline
        assert "<dc:date>" not in picture.svg()
        assert COLOURS["ink"][0] in picture.svg()
        assert not re.findall(r"(?:fill|stroke): #(?!000000)[0-9a-f]{6}", inline)
        root = ElementTree.fromstring(inline)
        ids += [e.get("id", "") for e in root.iter() if e.get("id")]
        links = [e.get("{http://www.w3.org/1999/xlink}href", "#")[1:] for e in root.iter()]
        links += re.findall(r"url\(#([^)]*)\)", inline)
        assert {link for link in links if link} <= set(ids)
    assert len(set(ids)) == len(ids)


def test_the_same_grid_gives_the_same_bytes() -> None:
    def bytes_of() -> list[bytes]:
        made = pictures(grid(cell("bsp"), cell("asp")))
        return [part for p in made for part in (p.svg().encode(), p.inline().encode(), p.png())]

    assert bytes_of() == bytes_of()


def test_png_is_png() -> None:
    (picture,) = [p for p in pictures(whole()) if p.name == "speed"]
    assert picture.png()[:4] == b"\x89PNG"


@pytest.mark.parametrize("devices", [(2,), (1, 2)], ids=["bars", "lines"])
def test_odd_names_are_drawn_as_text(devices: tuple[int, ...]) -> None:
    names = [HOSTILE, "../../x", "$\\frac{$", "a\x00b\ud800\u202e", "中文", "&amp;"]
    made = grid(*(cell(name, n) for name in names for n in devices), target=0.9)
    for picture in pictures(made):
        root = ElementTree.fromstring(picture.inline())
        assert not list(root.iter(f"{SVG}script"))
        assert not list(root.iter(f"{SVG}image"))
    assert curves(made) is not None


def test_names_are_made_fit_to_show() -> None:
    assert plain("a\nb\x00") == "a\ufffdb\ufffd"
    assert plain("x" * 100) == "x" * 47 + "…"


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install offbeat\[plot\]"):
        pictures(whole())


def test_a_long_run_is_drawn_with_few_points() -> None:
    from offbeat.report.summary import Test as Tested

    tests = [Tested(float(n), n, n, 0.1, 0.5) for n in range(50_000)]
    picture = curves(grid(cell("asp", tests=tests)))
    assert picture is not None
    assert len(picture.figure.axes[0].lines[0].get_xdata()) == 400  # type: ignore[arg-type]
