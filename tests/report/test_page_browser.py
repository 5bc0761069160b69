"""The report in a real browser: marks, no errors, no sideways scroll, usable by everybody."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from offbeat.report.grid import Cell, Grid
from offbeat.report.page import write_report
from tests.report.common import HOSTILE, cell, grid, hosts, whole

NINE = 9  # figures of a comparison


@dataclass
class Seen:
    """A page that is open, and everything that went wrong on it."""

    page: Page
    wrong: list[str] = field(default_factory=list)


def opened(browser: Browser, path: Path, width: int = 1280, scheme: str = "light") -> Seen:
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]
    )
    seen = Seen(context.new_page())
    seen.page.on("console", lambda message: seen.wrong.append(message.text))
    seen.page.on("pageerror", lambda error: seen.wrong.append(str(error)))
    seen.page.on("dialog", lambda dialog: (seen.wrong.append("dialog"), dialog.dismiss()))
    # The page itself is one request; any other is one too many.
    seen.page.on("request", lambda request: seen.wrong.append(request.url))
    seen.page.goto(path.as_uri())
    assert seen.wrong.pop(0) == path.as_uri()
    return seen


def hostile() -> Grid:
    return grid(
        cell(HOSTILE, 2, name=HOSTILE),
        cell("../../asp", 2),
        Cell(HOSTILE, 4, failed=f"{HOSTILE}\n  at line 3"),
        title=f"</title>{HOSTILE}",
        settings={HOSTILE: "javascript:alert(3)"},
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"whole": whole(), "one": grid(cell("asp", 4, finished=False)), "hostile": hostile()}
    made["hosts"] = grid(hosts())
    place = tmp_path_factory.mktemp("reports")
    return {name: write_report(of, place / name) for name, of in made.items()}


every_page = pytest.mark.parametrize("name", ["whole", "one", "hostile", "hosts"])


@every_page
def test_every_figure_has_marks_and_nothing_goes_wrong(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    seen = opened(browser, pages[name])
    drawn = seen.page.evaluate(
        """() => [...document.querySelectorAll("figure svg")].map((svg) => {
            const colours = /--(series-\\d|compute|exchange|wait)\\)/;
            return [...svg.querySelectorAll("path, use")].filter((mark) => {
                const { width, height } = mark.getBoundingClientRect();
                return colours.test(mark.getAttribute("style")) && (width > 1 || height > 1);
            }).length;
        })"""
    )
    assert len(drawn) == (6 if name in ("one", "hosts") else NINE)
    assert all(count > 0 for count in drawn), drawn
    assert seen.wrong == []


@every_page
@pytest.mark.parametrize("width", [320, 400, 800])
def test_the_page_does_not_scroll_sideways(
    browser: Browser, pages: dict[str, Path], name: str, width: int
) -> None:
    seen = opened(browser, pages[name], width)
    for part in seen.page.locator("summary").all():
        part.click()
    inside, outside = seen.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert inside <= outside


@every_page
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str
) -> None:
    seen = opened(browser, pages[name], 400 if scheme == "dark" else 1280, scheme)
    for part in seen.page.locator("summary").all():
        part.click()
    found = Axe().run(seen.page).response["violations"]
    serious = [
        (v["id"], [node["html"][:200] for node in v["nodes"]][:3])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert not serious


def test_names_run_no_script(browser: Browser, pages: dict[str, Path]) -> None:
    seen = opened(browser, pages["hostile"])
    assert seen.page.locator("script").count() == 1
    assert seen.page.locator("img").count() == 0
    assert HOSTILE in seen.page.locator("h1").inner_text()
    # Even a script that found its way in would not be run.
    seen.page.evaluate(
        """() => { const late = document.createElement("script");
            late.textContent = "window.ran = true"; document.body.append(late); }"""
    )
    assert seen.page.evaluate("window.ran") is None
    assert seen.wrong
    assert all("Content Security Policy" in line for line in seen.wrong)


def test_colours_follow_the_reader(browser: Browser, pages: dict[str, Path]) -> None:
    colours = []
    for scheme in ("light", "dark"):
        page = opened(browser, pages["whole"], scheme=scheme).page
        line = page.locator("#figure-speed path[style*='--series-1']").first
        colours.append(line.evaluate("mark => getComputedStyle(mark).stroke"))
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(set(colours)) == 4


def test_printing_opens_what_is_folded(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["whole"], scheme="dark").page
    assert page.locator("details[open]").count() == 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.emulate_media(media="print", color_scheme="dark")
    page.set_viewport_size({"width": 720, "height": 1000})  # a sheet of paper
    assert page.evaluate("document.documentElement.scrollWidth") <= 720
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


# ---------------------------------------------------------------- the timeline


def test_a_stretch_tells_what_it_is_when_pointed_at(
    browser: Browser, pages: dict[str, Path]
) -> None:
    page = opened(browser, pages["whole"]).page
    tip = page.locator("#tip")
    assert tip.is_hidden()
    page.locator(".mark[aria-label*='waiting for worker 0']").first.hover()
    assert tip.inner_text() == "bsp, worker 1: waiting for worker 0, 0.20 s from 0.80 s"
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_arrow_keys_go_through_the_timeline(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["whole"], 400).page
    tip = page.locator("#tip")
    assert page.locator(".mark[tabindex='0']").count() == 1  # one stop, however many stretches
    page.locator("#figure-timeline .scroll").first.focus()
    page.keyboard.press("Tab")
    assert tip.inner_text() == "bsp, worker 0: computing, 0.80 s from 0 s"
    for key, words in (
        ("ArrowRight", "bsp, worker 0: exchanging, 0.1000 s from 0.80 s"),
        ("ArrowDown", "bsp, worker 1: waiting for worker 0, 0.20 s from 0.80 s"),
        ("End", "bsp, worker 1: waiting for worker 0, 0.20 s from 2.80 s"),
        ("Home", "bsp, worker 1: computing, 0.70 s from 0 s"),
        ("ArrowLeft", "bsp, worker 1: computing, 0.70 s from 0 s"),
        ("ArrowUp", "bsp, worker 0: computing, 0.80 s from 0 s"),
    ):
        page.keyboard.press(key)
        assert tip.inner_text() == words
    assert tip.is_visible()


def test_the_first_tab_offers_to_skip(browser: Browser, pages: dict[str, Path]) -> None:
    page = opened(browser, pages["whole"]).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0  # type: ignore[index]
