"""The page: whole by itself, honest about what is missing, harmless whatever runs are called."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.report.digest import RunEvent
from offbeat.report.grid import Cell, Grid
from offbeat.report.markup import Safe, escaped, table, tag
from offbeat.report.page import page, write_page, write_report
from offbeat.report.page_tables import notebook, waited_for_exchanges
from offbeat.report.summary import LayoutFigures, ProcessFigures, Step
from offbeat.report.timeline import Segment
from tests.report.common import HOSTILE, afar, cell, figures, grid, hosts, whole

VOID = ("meta", "br", "hr", "link")


class Reader(HTMLParser):
    """Every element with its attributes, the text between, and whether the elements nest."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.text += data

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


@pytest.fixture(scope="module")
def shown() -> Reader:
    return Reader(page(whole()))


def test_the_verdict_comes_first_and_every_figure_follows(shown: Reader) -> None:
    assert shown.text.index("asp reached 90 % accuracy first") < shown.text.index("Training speed")
    assert len(shown.named("figure")) == 9
    assert len(shown.named("svg")) == 9


def test_the_results_are_a_table_with_spread(shown: Reader) -> None:
    assert "93.9 % (93.8 % to 94.0 %)" in shown.text
    assert "1.05 s (1.00 s to 1.10 s)" in shown.text


def test_failed_cells_are_shown_with_their_reasons(shown: Reader) -> None:
    assert "1 run came to nothing; the reason is below" in shown.text
    assert "RunError: worker 2 ended with code 9" in shown.text


def test_settings_and_target_are_shown(shown: Reader) -> None:
    assert "digits" in shown.text
    assert "90 % accuracy, as given" in shown.text
    assert "chosen: all runs near the best reached it" in page(grid(cell("bsp"), cell("asp")))


def test_the_timeline_has_a_table_beside_it(shown: Reader) -> None:
    assert "The timeline as a table" in shown.text
    assert "worker 0, 0.60 s" in shown.text  # worker 1 waited for it, three times 0.2 s


def test_it_loads_nothing_and_allows_nothing(shown: Reader) -> None:
    for tag_name, attributes in shown.elements:
        assert tag_name not in ("link", "iframe", "object", "img", "base", "form"), tag_name
        assert "src" not in attributes
        for key in ("href", "xlink:href"):
            assert (attributes.get(key) or "#").startswith("#")
        assert not any(key.startswith("on") for key in attributes)
    (policy,) = [m["content"] for m in shown.named("meta") if m.get("http-equiv")]
    assert policy is not None
    assert "default-src 'none'" in policy
    (script,) = shown.scripts
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{own}'" in policy


def test_it_can_be_read_without_seeing_it(shown: Reader) -> None:
    assert shown.named("html")[0]["lang"] == "en"
    assert shown.named("a")[0]["href"] == "#figures"
    ids = [a["id"] for _, a in shown.elements if a.get("id")]
    assert len(set(ids)) == len(ids)
    for link in shown.named("a"):
        assert str(link["href"])[1:] in ids
    for svg in shown.named("svg"):
        assert svg.get("aria-labelledby") in ids or svg.get("aria-label")
        assert svg["aria-describedby"] in ids
        assert svg["role"] == ("img" if svg.get("aria-labelledby") else "group")


def test_dark_is_for_screens_and_paper_is_light() -> None:
    text = page(whole())
    assert "@media screen and (prefers-color-scheme: dark)" in text
    assert "@media print" in text


def test_the_same_grid_gives_the_same_page() -> None:
    made = grid(cell("bsp"), cell("asp"))
    assert page(made) == page(made)


# ---------------------------------------------------------------- what is missing is said


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (grid(cell(finished=False)), "1 run has not finished: these are the figures so far"),
        (grid(cell(), Cell("asp", 2)), "1 run of this comparison still to be made"),
        (grid(cell(segments=[])), "pass out= (or --out) to keep one"),
        (grid(), "No run has come to a result yet."),
        (grid(Cell("asp", 2, failed="why")), "There is nothing to draw yet."),
        (
            grid(cell("asp", events=[RunEvent(0.0, "joined", 1), RunEvent(2.0, "lost", 1)])),
            "worker 1 lost",
        ),
        (grid(cell("bsp"), cell("asp", accuracy=0.6), target=0.9), "not reached"),
    ],
)
def test_what_is_missing_is_said(made: Grid, words: str) -> None:
    assert words in Reader(page(made)).text


def test_a_whole_run_needs_no_notice() -> None:
    assert 'class="notice"' not in page(grid(cell()))
    assert 'class="tiles"' in page(grid(cell()))


# ---------------------------------------------------------------- hostile names


@pytest.mark.parametrize("name", [HOSTILE, "../../etc]]>--></style>\x00\ud800"])
def test_hostile_names_are_text(name: str) -> None:
    made = grid(
        cell(name, 2, name=name, events=[RunEvent(1.0, name, 0)]),
        cell("asp", 2, segments=[Segment(0, name, 0.0, 1.0)], window=(0.0, 1.0)),
        Cell(name, 4, failed=name * 3),
        title=name,
        settings={name: name},
    )
    text = page(made)
    text.encode("utf-8")
    reader = Reader(text)
    assert len(reader.named("script")) == 1
    assert len(reader.named("style")) == 1
    assert not reader.named("img")
    assert not any(key.startswith("on") for _, a in reader.elements for key in a)


@given(st.text(max_size=40))
def test_everything_is_escaped(text: str) -> None:
    reader = Reader(tag("p", text, aria_label=text))
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    assert reader.text == shown
    assert reader.elements == [("p", {"aria-label": shown})]


def test_only_what_was_made_here_stays_as_it_is() -> None:
    assert tag("p", Safe("<b>x</b>"), "<b>") == "<p><b>x</b>&lt;b&gt;</p>"
    assert escaped("<") == "&lt;"
    assert tag("br", class_=None) == "<br>"


def test_tables_scroll_in_a_region_that_can_be_focused() -> None:
    reader = Reader(table("All", ["a", "b"], [["1", "2"]]))
    assert reader.elements[0] == (
        "div",
        {"class": "scroll", "role": "region", "tabindex": "0", "aria-label": "All"},
    )


# ---------------------------------------------------------------- files


def test_a_report_lies_beside_its_figures(tmp_path: Path) -> None:
    path = write_report(grid(cell("bsp"), cell("asp")), tmp_path / "new")
    assert path == tmp_path / "new" / "report.html"
    links = re.findall(r'href="(figures/[a-z]+\.(?:png|svg))"', path.read_text())
    assert len(links) == 18
    for link in links:
        assert (path.parent / link).stat().st_size > 500
    assert not list(path.parent.glob(".*"))


def test_a_page_alone_has_no_links_to_files(tmp_path: Path) -> None:
    text = write_page(grid(cell()), tmp_path / "a.html").read_text()
    assert "figures/" not in text
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_page(grid(cell()), tmp_path / "file" / "report.html")


def test_a_large_grid_stays_small(tmp_path: Path) -> None:
    many = [Segment(n % 8, "wait", n * 0.01, n * 0.01 + 0.08, 3) for n in range(2000)]
    cells = [
        cell(name, devices, repeat, segments=many, window=(0.0, 20.0),
             losses=[Step(float(n), n, n, 1.0) for n in range(400)])
        for name in ("bsp", "ssp:3", "asp", "local:16", "asup", "soft:2")
        for devices in (1, 2, 4, 8)
        for repeat in (0, 1, 2)
    ]  # fmt: skip
    assert len(page(grid(*cells))) < 3_000_000


# ---------------------------------------------------------------- notebooks


def test_a_notebook_shows_the_figures_as_a_table() -> None:
    reader = Reader(notebook(figures("asp", 2)))
    assert "asp on 2 workers" in reader.text
    assert "95.0 % on the test set" in reader.text
    assert "64 samples/s" in reader.text
    assert not Reader(notebook(figures(HOSTILE, 2))).named("script")


def test_the_processes_of_split_replicas_are_shown() -> None:
    layout = LayoutFigures(
        "pp=2", 4, predicted_seconds=0.018, predicted_idle_share=0.1,
        per_process=[ProcessFigures(10, 0.1, 0.2, 5000), ProcessFigures(10, 0.15, 0.19, 3000)],
    )  # fmt: skip
    layout.measure()
    shown = page(grid(cell(layout=layout)))
    assert "Processes of a replica: predicted and measured" in shown
    assert "a step, predicted" in shown
    assert "Processes of a replica" not in page(grid(cell()))


# ---------------------------------------------------------------- links


def test_links_have_columns_where_there_are_some() -> None:
    text = Reader(page(grid(hosts()))).text
    for words in ("host", "round trip", "to store", "from store", "on the wire"):
        assert words in text
    for words in ("far away", "21 ms", "300 kB/s", "250 kB/s", "time in its link", "86 %"):
        assert words in text
    assert "exchanging over its link" in text
    assert "Worker 1 on far away spent 86 % of its time in its link" in text
    assert "46 % of their time" not in text  # what the store took is not the link's
    here = Reader(page(whole())).text
    for words in ("round trip", "in its link", "over its link", "on the wire"):
        assert words not in here


def test_batches_have_a_column_where_shares_are_uneven() -> None:
    text = Reader(page(grid(cell(shares="speed")))).text
    assert "samples a step" in text
    assert "32.0" in text
    assert "samples a step" not in Reader(page(grid(cell()))).text


def test_a_host_may_be_called_anything() -> None:
    per_worker = afar()
    for mine in per_worker:
        assert mine.link is not None
        mine.link.host = HOSTILE + "\x1b[2J" + 300 * "x"
    reader = Reader(page(grid(hosts(per_worker=per_worker))))
    assert len(reader.scripts) == 1
    assert not reader.named("img")
    assert "\x1b" not in reader.text
    assert 40 * "x" not in reader.text


def test_waiting_is_told_apart_by_what_the_other_one_did() -> None:
    segments = [
        Segment(0, "wait", 1.0, 5.0, 1),
        Segment(1, "compute", 0.0, 2.0),
        Segment(1, "exchange", 2.0, 4.5),
        Segment(2, "exchange", 1.0, 5.0),
        Segment(2, "wait", 5.0, 6.0),
    ]
    assert waited_for_exchanges(segments) == {0: 2.5}
    text = Reader(page(grid(hosts(segments=segments, window=(0.0, 6.0))))).text
    assert "of its waiting, for another's exchange" in text
    assert "2.50 s" in text
