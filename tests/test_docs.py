"""The documentation is run: its snippets, its commands, its links and its tables.

A block fenced as `text measured` or `console measured` shows figures of real processes, which
differ from run to run: its words are compared, its numbers are not.
"""

import contextlib
import html
import importlib
import inspect
import itertools
import json
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

import offbeat
from offbeat.cli import app, main
from offbeat.discipline.named import ROWS, parse
from offbeat.engine.sim import cluster, faults, hosts
from offbeat.log.records import Entry, Part
from offbeat.report.summary import Summary, WorkerFigures
from offbeat.studies.demo import CONTENDERS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Its commands are those of README.md, which tests/test_readmes.py makes sure of.
TRANSLATED = ROOT / "README.zh-CN.md"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCS = ROOT / "docs"

# Training in shown output may move in the last place between processors; words may not.
SLACK = 0.05
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")
RULE = re.compile("─+")
HASH = re.compile(r"\b[0-9a-f]{32}\b")
EXAMPLE = "192.168.1.5"  # the store's address on the pages
RUN = ("offbeat", "torchrun")  # programs whose command lines are run
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|Users|opt|mnt|usr|var)/")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and the line it begins on."""

    language: str
    text: str
    line: int
    shown_output: str | None = None  # of a `text` block right behind a python one
    measured: bool = False  # whether the numbers that it shows are another run's

    @property
    def file(self) -> str | None:
        """The name of the file that the block stands for, if its first line names one."""
        match = re.match(r"# file: (\S+)\n", self.text)
        return match[1] if match else None


def blocks(text: str) -> list[Block]:
    fence = re.compile(r"^```(\w*)( measured)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found: list[Block] = []
    end = 0
    for match in fence.finditer(text):
        adjacent = bool(found) and not text[end : match.start()].strip()
        before = found[-1] if found else None
        waits = before is not None and before.language == "hosts" and not before.shown_output
        adjacent |= waits  # what several hosts print may be told of first
        if match[1] == "text" and adjacent and before and before.language in ("python", "hosts"):
            shown, measured = match[3], bool(match[2])
            found[-1] = Block(before.language, before.text, before.line, shown, measured)
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(match[1], match[3], line, measured=bool(match[2])))
        end = match.end()
    return found


UNIT = re.compile(r"^(kB|MB|GB)\b")


def same_words(shown: str, printed: str, measured: bool = False) -> str | None:
    """The first word of two outputs that differs, numbers with some slack; None if none does.

    Training that were `measured` may be any.
    """
    # A rule under a table's head is as long as the widest numbers make it.
    left, right = (RULE.sub("─", HASH.sub("HASH", text)).split() for text in (shown, printed))
    if measured:  # memory, too: the process that runs this may itself be a large one
        left, right = ([UNIT.sub("bytes", word) for word in words] for words in (left, right))
    for a, b in zip(left, right, strict=False):
        if NUMBER.sub("#", a) != NUMBER.sub("#", b):
            return f"{a!r} is shown, {b!r} is printed"
        if measured:
            continue
        for x, y in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True):
            one, other = float(x.replace(",", "")), float(y.replace(",", ""))
            if abs(one - other) > SLACK * max(1.0, abs(one)):
                return f"{a!r} is shown, {b!r} is printed"
    if len(left) != len(right):
        return f"{len(left)} words are shown, {len(right)} are printed"
    return None


def commands(block: Block) -> Iterator[tuple[str, str | None]]:
    """Each command of a block that is run, and for a console block the output that is shown."""
    text = block.text.replace("\\\n", " ")
    if block.language == "bash":
        for line in text.splitlines():
            if line.startswith(RUN):
                yield line, None
        return
    for piece in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = piece.partition("\n")
        if command.startswith(RUN):
            yield command, output


def run_command(command: str) -> tuple[int, str]:
    """Exit code and standard output of one command line, run in this process if it is ours."""
    program, *words = shlex.split(command, comments=True)
    # Files, because workers that are forked on the way print into them too.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as complaints:
        if program == "torchrun":
            torchrun = [sys.executable, "-m", "torch.distributed.run", *words]
            code = subprocess.run(torchrun, stdout=out, stderr=complaints).returncode
        else:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(complaints):
                code = main(words)
        for file in (out, complaints):
            file.seek(0)
        return code, out.read() + (complaints.read() if code else "")


def run_hosts(text: str) -> str:
    """Commands of several hosts, all on this one: each goes on while the next begins."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started: list[tuple[str, subprocess.Popen[str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        _, _, command = line.partition("$ ")
        command = command.replace(f"{EXAMPLE}:7077", f"127.0.0.1:{port}")
        words = [sys.executable, "-m", *shlex.split(command)]
        found = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append((command, found))
        if command.startswith("offbeat store"):
            assert found.stdout is not None
            while "waiting for" not in (first := found.stdout.readline()):
                assert first, f"{command} ended"
    printed = ""
    for command, found in reversed(started):  # the store ends last, and has most to say
        said, _ = found.communicate()
        assert found.returncode == 0, f"{command}\n{said}"
        printed += said
    return printed


def same_part(shown: str, printed: str) -> bool:
    """Whether an excerpt is a part of what was printed, numbers apart."""
    parts = []
    for text in (shown, printed):
        # All is on one host here, where nothing needs to be encrypted.
        text = text.replace(EXAMPLE, "127.0.0.1").replace("not encrypted", "encrypted")
        words = HASH.sub("HASH", RULE.sub("─", text)).replace(" hosts", " host").split()
        words = [re.sub(r"^[kMG]B(/s)?", "bytes", NUMBER.sub("#", word)) for word in words]
        parts.append(" ".join(words))
    return parts[0] in parts[1]


def expected_code(command: str) -> int:
    """A command that is shown to fail says so: `# exits with 2`."""
    match = re.search(r"# exits with (\d+)", command)
    return int(match[1]) if match else 0


def run_python(block: Block, page: Path, names: dict[str, Any]) -> str:
    # Blank lines in front make a traceback point at the line of the page.
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with tempfile.TemporaryFile("w+") as out:
        with contextlib.redirect_stdout(out):
            exec(code, names)
        out.seek(0)
        return out.read()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks(page.read_text()):
        where = f"{page.name} line {block.line}"
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            printed = run_python(block, page, names)
            if block.shown_output is not None:
                assert same_words(block.shown_output, printed, block.measured) is None, where
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "hosts":
            printed = run_hosts(block.text)
            if block.shown_output is not None:
                assert same_part(block.shown_output, printed), f"{where}:\n{printed}"
        elif block.language in ("bash", "console"):
            for command, shown in commands(block):
                code, printed = run_command(command)
                assert code == expected_code(command), f"{where}: {command}\n{printed}"
                if shown:
                    different = same_words(shown, printed, block.measured)
                    assert different is None, f"{where}: {command}"


@pytest.mark.parametrize("page", [*PAGES, TRANSLATED], ids=lambda page: page.name)
def test_links_and_images_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+://", path):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", [*PAGES, TRANSLATED, *EXAMPLES], ids=lambda page: page.name)
def test_no_page_speaks_of_one_machine(page: Path) -> None:
    assert not MACHINE_PATHS.search(page.read_text())


def test_pages_are_listed_in_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page.name


def test_images_are_small_and_shown() -> None:
    images = list((DOCS / "images").iterdir())
    assert images
    assert all(image.stat().st_size < 150_000 for image in images)
    text = all_text()
    assert not [image.name for image in images if f"images/{image.name})" not in text]


# ---------------------------------------------------------------- words against code

# Pages that send a reader to files of the package; others speak of a user's own.
MAPS = [DOCS / "path.md", DOCS / "decisions.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    alone = {path.name for path in (ROOT / "offbeat").rglob("*.py")}
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
        if "NAME" not in name:
            there = any((top / name).exists() for top in (ROOT, ROOT / "offbeat"))
            assert there or name in alone, f"{page.name} names {name}"


def all_text() -> str:
    return "\n".join(page.read_text() for page in PAGES)


def test_every_public_name_is_mentioned() -> None:
    text = all_text()
    missing = [name for name in offbeat.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing


def test_the_readme_lists_exactly_the_named_disciplines() -> None:
    rows = re.findall(r"^\| `(\w+)[^`]*` \| `([a-z-]+)", PAGES[0].read_text(), re.MULTILINE)
    assert [(ROWS[word].__name__, word) for word in ROWS] == rows


def test_the_readme_shows_the_rows_of_the_demo() -> None:
    # `make demo` itself takes too long here; tests/test_demo.py looks at what it prints.
    (shown,) = [b.text for b in blocks(PAGES[0].read_text()) if b.text.startswith("$ make demo")]
    rows = shown.split("───\n")[1].split("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == [contender.sync for contender in CONTENDERS]


@pytest.mark.parametrize("name", ROWS)
def test_every_discipline_has_a_page(name: str) -> None:
    page = DOCS / "disciplines" / f"{name}.md"
    text = page.read_text()
    assert text.startswith(f"# `{name}`: ")
    assert f"](disciplines/{page.name})" in (DOCS / "disciplines.md").read_text()
    assert f"](../images/{name}.svg)" in text
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Formula", "Options", "When it helps", "When it does not", "Try it"]
    ours = [command for block in blocks(text) for command, _ in commands(block)]
    assert any(f"--sync {name}" in command for command in ours)
    signature = inspect.signature(ROWS[name])
    assert f"`ob.{ROWS[name].__name__}(" in text
    for option in signature.parameters:
        assert re.search(rf"^\| .*`{option}`.* \|", text, re.MULTILINE), option


def test_every_discipline_has_no_page_too_many() -> None:
    assert {page.stem for page in (DOCS / "disciplines").iterdir()} == set(ROWS)


def test_every_spelling_of_a_discipline_can_be_read() -> None:
    pages = [page for page in PAGES if page.parent.name == "disciplines"]
    pages += [DOCS / name for name in ("disciplines.md", "choosing.md", "articles.md")]
    text = "\n".join(page.read_text() for page in pages)
    spellings = re.findall(rf"`((?:{'|'.join(ROWS)}|custom)(?::[^`\s]*)?)`", text)
    assert len(spellings) > len(ROWS)
    for spelling in spellings:
        if "..." not in spelling and spelling != "custom":
            # A bare name stands for the row, also where the row needs an argument.
            needs_argument = spelling in ("soft", "ssp", "ringmaster", "rennala")
            assert needs_argument or parse(spelling)


def test_every_log_record_and_figure_is_explained() -> None:
    faults = (DOCS / "faults.md").read_text()
    for record in (*Entry.__args__, Part):
        config = record.__struct_config__
        if config.tag is not None:
            assert f"`{config.tag}`" in faults
        for name in msgspec.structs.fields(record):
            assert f"`{name.name}`" in faults, f"{record.__name__}.{name.name}"
    tutorial = (DOCS / "tutorial.md").read_text()
    for struct in (Summary, WorkerFigures):
        for name in struct.__struct_fields__:
            assert f"`{name}`" in tutorial, name


def test_every_key_of_a_cluster_is_explained() -> None:
    text = (DOCS / "engines.md").read_text()
    described = (hosts.Network, hosts.Host, hosts.StoreLink, hosts.Region, hosts.Share)
    befalls = (faults.Pause, faults.Failure, faults.Outage)
    for kind in (cluster.Cluster, cluster.Machine, *described, *befalls):
        for name in kind.__dataclass_fields__:
            assert f"`{name}`" in text, name


def test_every_option_of_train_is_explained() -> None:
    from offbeat.config.run_config import Options
    from offbeat.train import TrainOptions

    tutorial = (DOCS / "tutorial.md").read_text()
    for name in (*Options.__annotations__, *TrainOptions.__annotations__):
        assert f"`{name}" in tutorial, name


def test_every_command_and_flag_is_explained() -> None:
    text = (DOCS / "commands.md").read_text()
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f"## offbeat {name}" in text
        for parameter in command.params:
            for flag in parameter.opts:
                if flag.startswith("--"):
                    assert f"`{flag}" in text, f"{name} {flag}"
    errors = [getattr(offbeat, name) for name in offbeat.__all__]
    codes = {e.exit_code for e in errors if isinstance(e, type) and hasattr(e, "exit_code")}
    for code in {0, 130} | codes:
        assert f"| {code} |" in text


# ---------------------------------------------------------------- examples and figures


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_examples_run(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out
    left = [path.name for path in tmp_path.iterdir() if path.name != "runs"]
    assert not left, f"{script.name} leaves {left} behind"


@pytest.fixture(scope="module")
def figures() -> Iterator[Any]:
    """The module that draws the pictures; it and what it imports lie beside the pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("figures")


def test_every_discipline_has_a_figure_of_itself(figures: Any) -> None:
    assert {*figures.TIMELINES, *figures.CHARTS} == {*ROWS, "timeline", "switch"}
    assert {path.stem for path in (DOCS / "images").iterdir()} == {*ROWS, "timeline", "switch"}
    for name in ROWS:
        panels = figures.TIMELINES.get(name) or figures.CHARTS[name].lines
        # Nothing of hogwild can be simulated, and its page says what is drawn instead.
        shown = "asp" if name == "hogwild" else name
        assert any(panel.sync.partition(":")[0] == shown for panel in panels), name


def test_timelines_are_what_the_simulator_gives(figures: Any) -> None:
    for name, panels in figures.TIMELINES.items():
        kept = (figures.IMAGES / f"{name}.svg").read_text()
        assert kept == figures.draw_timelines(panels), f"run docs/figures.py: {name} is outdated"


@pytest.mark.parametrize("name", ["average", "bmuf", "diloco"])
def test_curves_are_what_the_simulator_gives(figures: Any, name: str) -> None:
    chart = figures.CHARTS[name]
    kept = (figures.IMAGES / f"{name}.svg").read_text()
    (described,) = re.findall(r"<desc>(.*)</desc>", kept)
    numbers = json.loads(html.unescape(described))
    # What is drawn are the numbers that the picture describes itself with, ...
    curves = [[tuple(point) for point in points] for points in numbers.values()]
    assert kept == figures.draw_chart(chart, curves), f"run docs/figures.py: {name} is outdated"
    # ... and those are what training gives, up to what differs between processors.
    assert list(numbers) == [line.name for line in chart.lines]
    for line, drawn in zip(chart.lines, curves, strict=True):
        found = figures.curve(line, chart)
        assert [x for x, _ in found] == pytest.approx([x for x, _ in drawn], rel=SLACK)
        assert [y for _, y in found] == pytest.approx([y for _, y in drawn], abs=100 * SLACK)


def test_the_figure_shows_who_waits_for_whom(figures: Any) -> None:
    timelines = [figures.timeline(panel) for panel in figures.PANELS]
    lock_step, slack, free = (bars for bars, _ in timelines)
    assert not [bar for bar in free if bar.kind == "wait"]
    for bars in (lock_step, slack):
        waits = [bar for bar in bars if bar.kind == "wait"]
        assert waits
        assert all(bar.until > bar.since and bar.blocker != bar.worker for bar in waits)
    waited = [sum(b.until - b.since for b in bars if b.kind == "wait") for bars, _ in timelines]
    assert waited[0] > waited[1] > waited[2] == 0
    # In lock-step an update is made of everybody, at the end of everybody's wait.
    assert all(len(mark.parts) == 4 and not mark.staleness for mark in timelines[0][1])
    assert all(len(mark.parts) == 1 for mark in timelines[2][1])


def test_bars_cover_all_of_a_workers_time_and_all_of_its_steps(figures: Any) -> None:
    for name, panels in figures.TIMELINES.items():
        for panel in panels:
            bars, _ = figures.timeline(panel)
            for worker in range(len(panel.times)):
                mine = [bar for bar in bars if bar.worker == worker]
                assert mine[0].since == 0, name
                for before, after in itertools.pairwise(mine):
                    assert after.since == pytest.approx(before.until), name
                    assert (before.kind, after.kind) != ("wait", "wait"), name


# ---------------------------------------------------------------- the checks themselves


def test_outputs_are_compared_word_by_word() -> None:
    assert same_words("97.5 % after 1,600 s", "97.6  % after\n1,610 s") is None
    assert same_words("97.5 % after", "87.5 % after")
    assert same_words("three words here", "three words")
    assert same_words("bsp 1", "asp 1")
    assert same_words(f"hash {'a1' * 16}", f"hash {'b2' * 16}") is None
    assert same_words("a b\n────\n1,234 in 0.5 s", "a b\n──\n9 in 12 s", measured=True) is None
    assert same_words("1,234 samples in 0.5 s", "987 records in 12 s", measured=True)


def test_blocks_are_found_with_their_files_and_outputs() -> None:
    page = (
        "a\n\n```toml\n# file: x.toml\nn = 1\n```\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n"
        "\n```python\nprint(2)\n```\n\n```text measured\n3\n```\n"
    )
    toml, python, text, measuring, measured = blocks(page)
    assert (toml.file, toml.line) == ("x.toml", 4)
    assert (python.shown_output, python.line) == ("1\n", 9)
    assert (text.language, text.shown_output) == ("text", None)
    assert (measuring.shown_output, measuring.measured, python.measured) == ("3\n", True, False)
    assert (measured.language, measured.measured) == ("text", True)


def test_commands_are_found_with_their_outputs() -> None:
    console = Block("console", "$ offbeat demo\nout\n$ ls\nx\n$ offbeat replay \\\n  r\nsame\n", 1)
    assert [command.split() for command, _ in commands(console)] == [
        ["offbeat", "demo"],
        ["offbeat", "replay", "r"],
    ]
    assert [shown for _, shown in commands(console)] == ["out\n", "same\n"]
