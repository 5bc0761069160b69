"""The report as one HTML page that needs nothing else: verdict, figures, tables and settings."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.report.drawing import COLOURS, Picture, plain
from offbeat.report.figures import pictures
from offbeat.report.grid import Grid, marks
from offbeat.report.markup import Safe, joined, tag
from offbeat.report.page_tables import (
    events,
    failures,
    glossary,
    processes,
    results,
    tiles,
    timeline_tables,
    workers,
)
from offbeat.report.verdict import verdict
from offbeat.report.words import counted

HERE = Path(__file__).parent
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif'


def write_report(grid: Grid, folder: Path) -> Path:
    """Write report.html and figures/NAME.png and .svg into `folder`; returns the page's path."""
    return write_page(grid, folder / "report.html", files=True)


def write_page(grid: Grid, path: Path, files: bool = False) -> Path:
    """Write the page, and with `files` each figure beside it, in figures/."""
    drawn = pictures(grid)
    text = page(grid, drawn, files)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if files:
            _write_figures(drawn, path.parent / "figures")
        draft = path.with_name(f".{path.name}")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)  # whoever has the page open never loads half of it
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): name another file"
        ) from error
    return path


def _write_figures(drawn: Sequence[Picture], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for picture in drawn:
        (folder / f"{picture.name}.png").write_bytes(picture.png())
        (folder / f"{picture.name}.svg").write_text(picture.svg(), encoding="utf-8")


def page(grid: Grid, drawn: Sequence[Picture] | None = None, files: bool = False) -> str:
    """The page as text; `files` says that each figure lies beside it, to be linked to."""
    if drawn is None:
        drawn = pictures(grid)
    script = (HERE / "page.js").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", plain(grid.title, 200)),
        tag("style", Safe(_colours() + (HERE / "page.css").read_text(encoding="utf-8"))),
    )
    body = tag(
        "body",
        tag("a", "Skip to the figures", href="#figures", class_="skip"),
        _top(grid),
        tag("main", *_main(grid, drawn, files)),
        tag("footer", tag("p", "Made by offbeat. This page needs no network.")),
        tag("div", id="tip", hidden="", aria_hidden="true"),
        tag("script", Safe(script)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _policy(script: str) -> str:
    """No network at all, and no script but the one of this page."""
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{own}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _colours() -> str:
    both = []
    for mode in (0, 1):
        both.append("".join(f"--{name}: {pair[mode]}; " for name, pair in COLOURS.items()))
    # Paper is always light.
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {both[1]}}} }}\n"
    return f":root {{ --font: {FONT}; {both[0]}}}\n{dark}"


# ---------------------------------------------------------------- the parts


def _top(grid: Grid) -> Safe:
    unreal = marks(grid.digests())
    lines = [tag("h1", plain(grid.title, 200))]
    if unreal:
        lines.append(tag("p", f"Marked on every figure: {'; '.join(unreal)}.", class_="unreal"))
    places = ("verdict", "figures", "results", "settings", "words")
    items = [tag("li", tag("a", place.capitalize(), href=f"#{place}")) for place in places]
    lines.append(tag("nav", tag("ul", *items), aria_label="Contents"))
    return tag("header", *lines)


def _main(grid: Grid, drawn: Sequence[Picture], files: bool) -> list[Safe]:
    found = verdict(grid)
    parts = [
        tag(
            "section",
            tag("h2", "Verdict", id="verdict"),
            tag("p", found.headline, class_="headline"),
            tag("ul", *(tag("li", sentence) for sentence in found.sentences)),
            class_="verdict",
        ),
        *_notices(grid),
    ]
    if len(grid.groups()) == 1:
        parts.append(tiles(grid))
    parts += [
        tag("h2", "Figures", id="figures"),
        tag("div", *(_figure(grid, picture, files) for picture in drawn), class_="figures")
        if drawn
        else tag("p", "There is nothing to draw yet."),
        tag("h2", "Results", id="results"),
        results(grid),
        *workers(grid),
        *processes(grid),
        *events(grid),
        *failures(grid),
        tag("h2", "Settings", id="settings"),
        _settings(grid),
        tag("h2", "Words", id="words"),
        glossary(),
    ]
    return parts


def _notices(grid: Grid) -> list[Safe]:
    """What makes the figures less than whole."""
    going = sum(not d.finished for d in grid.digests())
    failed = sum(bool(cell.failed) for cell in grid.cells)
    missing = sum(cell.digest is None and not cell.failed for cell in grid.cells)
    words = []
    if going:
        has = "has" if going == 1 else "have"
        words.append(
            f"{counted(going, 'run')} {has} not finished: these are the figures so far. Make the "
            "report again for newer ones."
        )
    if failed:
        words.append(
            f"{counted(failed, 'run')} came to nothing; the "
            f"{'reason is' if failed == 1 else 'reasons are'} below the results."
        )
    if missing:
        words.append(f"{counted(missing, 'run')} of this comparison still to be made.")
    if grid.digests() and not any(d.segments for d in grid.digests()):
        words.append(
            "There is no timeline, because no log was kept: pass out= (or --out) to keep one."
        )
    return [tag("div", *(tag("p", line) for line in words), class_="notice")] if words else []


def _figure(grid: Grid, picture: Picture, files: bool) -> Safe:
    svg: Safe = Safe(picture.inline())
    wide = bool(picture.labels)
    if wide:
        svg = tag(
            "div", svg, class_="scroll", role="region", tabindex="0", aria_label=picture.title
        )
    caption: list[str] = [picture.caption]
    if files:
        links = [
            tag(
                "a",
                kind.upper(),
                href=f"figures/{picture.name}.{kind}",
                aria_label=f"{picture.title} as {kind.upper()}",
            )
            for kind in ("png", "svg")
        ]
        caption.append(tag("span", "As a file: ", links[0], ", ", links[1], class_="files"))
    below = timeline_tables(grid) if wide else []
    return tag(
        "figure",
        tag("h3", picture.title, class_="hidden"),
        svg,
        tag("figcaption", joined(caption)),
        *below,
        class_="wide" if wide else None,
        id=f"figure-{picture.name}",
    )


def _settings(grid: Grid) -> Safe:
    aim = grid.aim()
    known = dict(grid.settings)
    if aim is not None:
        best = (
            "the best it came to"
            if len(grid.groups()) == 1
            else "all runs near the best reached it"
        )
        chosen = "as given" if grid.target is not None else f"chosen: {best}"
        known["target"] = f"{aim}, {chosen}"
    if not known:
        return tag("p", "None are known.")
    pairs = [
        part
        for key, value in known.items()
        for part in (tag("dt", plain(key)), tag("dd", plain(value, 2000)))
    ]
    return tag("dl", *pairs, class_="words")
