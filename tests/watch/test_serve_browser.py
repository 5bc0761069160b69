"""The live page in a real browser: a run goes on, a worker stops, the run ends, the line is cut."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from offbeat.log.records import Evaluated, Linked, Lost
from offbeat.store.board import LinkState, Row, new_board
from offbeat.watch.feed import PROGRAM
from offbeat.watch.state import RunState
from tests.watch.common import going, join, part, pull, push, update

PATIENCE = "5"  # seconds: stopped on purpose, and never for as long by a slow machine
LONG = 60_000  # milliseconds: a slow machine is no finding
HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"

# Every text that a worker's row ever showed, in order: a state may last shorter than a look.
REMEMBER = """
window.seen = [];
new MutationObserver(() => {
  for (const row of document.querySelectorAll("#rows tr")) {
    const text = row.dataset.worker + ": " + row.cells[1].textContent.trim();
    if (!window.seen.includes(text)) window.seen.push(text);
  }
}).observe(document.getElementById("rows"), {subtree: true, childList: true, characterData: true});
"""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which every complaint and every dialog is a failure."""
    context = browser.new_context()
    one = context.new_page()
    complaints: list[str] = []
    one.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    one.on("pageerror", lambda error: complaints.append(str(error)))
    one.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    one.complaints = complaints  # type: ignore[attr-defined]
    yield one
    context.close()
    assert complaints == []


def saw(page: Page, pattern: str) -> str:
    """Wait until some row has shown such a text; returns the first."""
    find = "pattern => window.seen.find(text => new RegExp(pattern).test(text))"
    return str(page.wait_for_function(find, arg=pattern, timeout=LONG).json_value())


def serious(page: Page) -> list[Any]:
    found = Axe().run(page).response["violations"]
    return [(one["id"], one["nodes"][0]["html"]) for one in found
            if one["impact"] in ("serious", "critical")]  # fmt: skip


# ---------------------------------------------------------------- a run that goes on


def test_a_stopped_worker_shows_as_lost_and_who_waited_for_it(page: Page, tmp_path: Path) -> None:
    with going(tmp_path, "--sync", "bsp", "--patience", PATIENCE) as run:
        page.goto(run.address)
        expect(page.locator("#status")).to_have_text("running", timeout=LONG)
        expect(page.locator("#rows tr")).to_have_count(3, timeout=LONG)
        expect(page.locator("#title")).to_have_text("bsp, train.py")
        expect(page.locator("#version")).not_to_have_text("0", timeout=LONG)
        expect(page.locator("#no-events")).to_be_visible()
        page.evaluate(REMEMBER)
        stopped = run.children()["offbeat 1"]
        os.kill(stopped, signal.SIGSTOP)
        waits = saw(page, r"^0: waiting for worker 1 \(clock \d+, 1 behind\)$")
        lost = saw(page, r"^1: lost \(workers 0 and 2 waited [\d.]+ s for it\)$")
        event = page.locator("#events li.lost")
        told = re.compile(r"worker 1 was lost; workers 0 and 2 waited [\d.]+ s for it")
        expect(event).to_have_text(told, timeout=LONG)
        expect(page.locator("#lost")).to_have_text("1")
        os.kill(stopped, signal.SIGCONT)  # the others went on without it meanwhile
        expect(page.locator("#events")).to_contain_text("worker 1 joined again", timeout=LONG)
        order = page.evaluate("window.seen")
        back = [text for text in order[order.index(lost) + 1 :] if text.startswith("1: ")]
        assert order.index(waits) < order.index(lost)
        assert "1: lost" not in " ".join(back)
        run.open()
        expect(page.locator("#status")).to_have_text("finished", timeout=LONG)
        run.rest()
        assert run.process.returncode == 0
    # The server is gone, and the page keeps what it showed.
    page.set_viewport_size({"width": 700, "height": 900})  # draws anew
    expect(page.locator("#status")).to_have_text("finished")
    expect(page.locator("#rows .state").first).to_have_text("done")
    expect(page.locator("#done-words")).to_contain_text("100.0 % of 9,600 samples")
    expect(page.locator("#applied")).to_have_text("9,600")
    expect(event).to_have_count(1)
    expect(page.locator("#loss-chart polyline").first).to_have_attribute("points", re.compile(","))


# ---------------------------------------------------------------- pictures made by hand


class Server:
    """The page's server, fed by hand; it can be killed and come back at the same address."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}/token/"
        self.start()

    def start(self) -> None:
        number = self.socket.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-P", PROGRAM, str(number), str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=[number],
        )
        self._write(b"token\n")

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def show(self, state: RunState, now: float, over: str = "", cells: Any = None) -> None:
        picture = state.picture(now, state.trained, 0, 100, over, cells)
        self._write(msgspec.json.encode(picture) + b"\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        """The run is over: standard input ends, and then the process."""
        self.process.communicate(timeout=60)


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.kill()
    one.socket.close()


def eventful(title: str = "bsp") -> RunState:
    """Three workers in the second round: one waits, one computes, one is lost."""
    state = RunState(3, title)
    records = [*(join(n) for n in range(3)), *(pull(n, 0.0) for n in range(3))]
    records += [
        update(1.0, 1, part(0), part(1, staleness=2), part(2)),
        Evaluated(1.0, 1, 4, 1.0, 0.5),
    ]
    records += [*(pull(n, 1.0, 1) for n in range(3)), push(0, 1.5, 1), Lost(3.0, 1, 1, [])]
    records += [Evaluated(3.0, 1, 4, 0.5, 0.75)]
    for record in records:
        state.see(record)
    return state


def test_a_cut_line_is_told_and_taken_up_again(server: Server, page: Page) -> None:
    state = eventful()
    server.show(state, 3.5)
    page.goto(server.address)
    expect(page.locator("#status")).to_have_text("running", timeout=LONG)
    server.kill()
    expect(page.locator("#status")).to_have_text("connection lost, trying again", timeout=LONG)
    expect(page.locator("#news")).to_contain_text("no news for")
    expect(page.locator("#rows tr")).to_have_count(3)  # what was known stays
    expect(page.locator("#spoken")).to_contain_text("connection to the run is lost")
    server.start()
    state.see(update(4.0, 2, part(0, 1), part(2, 1)))
    server.show(state, 4.0)
    expect(page.locator("#status")).to_have_text("running", timeout=LONG)
    expect(page.locator("#version")).to_have_text("2")
    expect(page.locator("#news")).to_have_text("")
    server.show(state, 4.0, over="finished")
    server.end()
    expect(page.locator("#status")).to_have_text("finished", timeout=LONG)
    expect(page.locator("#spoken")).to_have_text("The run is finished.")
    # The browser itself complains of a connection that breaks off, and of nothing else.
    complaints = page.complaints  # type: ignore[attr-defined]
    assert all("ERR_" in complaint for complaint in complaints)
    complaints.clear()


def test_hostile_words_are_shown_as_they_are(server: Server, page: Page) -> None:
    state = eventful(HOSTILE)
    state._tell(3.2, HOSTILE, HOSTILE)
    server.show(state, 3.5)
    page.goto(server.address)
    expect(page.locator("#title")).to_have_text(HOSTILE, timeout=LONG)
    expect(page.locator("#events li").first).to_contain_text(HOSTILE)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_everybody_can_read_it(server: Server, page: Page, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    server.show(eventful(), 3.5)
    page.goto(server.address)
    expect(page.locator("#rows tr")).to_have_count(3, timeout=LONG)
    for chart in ("loss", "accuracy", "rate", "staleness"):
        name = page.locator(f"#{chart}-chart").get_attribute("aria-label")
        assert name
    expect(page.locator("#loss-chart polyline")).to_have_count(2)
    expect(page.locator("#staleness-chart rect")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_links_are_seen_where_there_are_some(
    server: Server, page: Page, scheme: Any, width: int
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    state, cells = eventful(), new_board(3)
    server.show(state, 3.5, cells=cells)
    page.goto(server.address)
    expect(page.locator("#rows tr")).to_have_count(3, timeout=LONG)
    expect(page.locator("#link-name")).to_be_hidden()
    expect(page.locator("#rows tr").first.locator("td").last).to_be_hidden()
    state.see(Linked(3.5, 2, "lab2", 0.02, 4))
    cells[Row.LINK, 2] = LinkState.SENDING
    cells[Row.ROUND_TRIP_US], cells[Row.UP], cells[Row.DOWN] = 21_300, 250_000, 1_250_000
    server.show(state, 3.5, cells=cells)
    expect(page.locator("#link-name")).to_have_text("link")
    last = page.locator("#rows tr").last.locator("td")
    expect(last.first).to_have_text("in its link (sending)")
    expect(last.first.locator(".state")).to_have_class("state link")
    expect(last.last).to_have_text("21 ms, ↑ 250 kB/s, ↓ 1.25 MB/s")
    expect(page.locator("#rows tr").first).to_contain_text("worker 2 (clock 1, 1 behind, in its")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert serious(page) == []


def test_events_are_read_aloud_but_not_those_from_before(server: Server, page: Page) -> None:
    state = eventful()
    server.show(state, 3.5)
    page.goto(server.address)
    expect(page.locator("#rows tr")).to_have_count(3, timeout=LONG)
    expect(page.locator("#spoken")).to_have_text("")
    state.see(Lost(5.0, 2, 1, []))
    server.show(state, 5.0)
    told = "worker 2 was lost; worker 0 waited 3.5 s for it"
    expect(page.locator("#spoken")).to_have_text(told, timeout=LONG)
