"""Draws timelines and curves as pictures that are plain text: the same data give the same file."""

import json
from collections.abc import Sequence
from xml.sax.saxutils import escape

from timelines import Bar, Chart, Panel, timeline

COLOURS = ("#3b6fb6", "#2f8f7f", "#8a5fb0", "#c2622d")
# A light sheet of its own, so that a page may be dark.
PAPER, INK, SOFT, FAINT, EXCHANGE = "#fbfaf7", "#22262b", "#6b7078", "#dedbd3", "#b9a24c"
WIDTH, LEFT, RIGHT, ROW, BAR_HEIGHT = 860, 78, 14, 24, 16


def text(x: float, y: float, words: str, size: float = 12, **style: str) -> str:
    given = {"fill": INK} | {key.replace("_", "-"): value for key, value in style.items()}
    attributes = " ".join(f'{key}="{value}"' for key, value in given.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {attributes}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'
    )


def stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{colour}" stroke-width="{width}"/>'
    )


def sheet(height: float, title: str, body: Sequence[str], numbers: str = "") -> str:
    """A whole picture; `numbers` are kept in it as its description."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    described = [f"<title>{escape(title)}</title>"]
    if numbers:
        described.append(f"<desc>{escape(numbers)}</desc>")
    paper = f'<rect width="{WIDTH}" height="{height:.0f}" rx="6" fill="{PAPER}"/>'
    return "\n".join([head, *described, paper, *body, "</svg>", ""])


def draw_timelines(panels: Sequence[Panel]) -> str:
    body: list[str] = []
    top = 0.0
    for panel in panels:
        body += _draw_panel(panel, top)
        top += 44 + ROW * (len(panel.times) + 1) + 22
    legend = "coloured: computing"
    if any(panel.exchange for panel in panels):
        legend += ", ochre: exchange with the store"
    legend += ", grey: waiting for the worker of that number"
    body.append(text(LEFT, top + 12, legend, 11, fill=SOFT))
    body.append(text(LEFT, top + 27, _SECOND_LINE, 11, fill=SOFT))
    return sheet(top + 38, "; ".join(panel.title for panel in panels), body)


_SECOND_LINE = (
    "store: its updates, in the colours of those who contributed, as high as their weight; "
    "above, the largest staleness"
)


def _draw_panel(panel: Panel, top: float) -> list[str]:
    bars, marks = timeline(panel)
    scale = (WIDTH - LEFT - RIGHT) / panel.until
    rows = len(panel.times)
    done = [bar for bar in bars if bar.until <= panel.until + 1e-9]
    steps = sum(bar.steps for bar in done if bar.kind == "compute")
    updates = sum(not mark.dropped for mark in marks)
    waited = sum(min(b.until, panel.until) - b.since for b in bars if b.kind == "wait")
    summary = f"{steps} steps, {updates} updates, {100 * waited / panel.until / rows:.0f} % waiting"
    body = [
        text(12, top + 24, panel.title, 13.5, font_weight="600"),
        text(WIDTH - RIGHT, top + 24, summary, 12, text_anchor="end"),
    ]
    first = top + 38
    for row in range(rows + 1):
        label = f"worker {row}" if row < rows else "store"
        body.append(text(LEFT - 10, first + row * ROW + 13, label, 12, text_anchor="end"))
    for bar in bars:
        y = first + bar.worker * ROW
        x, width = LEFT + bar.since * scale, (min(bar.until, panel.until) - bar.since) * scale
        body += _draw_bar(bar, x, y, width, (bar.until - bar.since) * scale)
    base = first + rows * ROW + ROW
    labelled = 0.0  # up to where the row of the store has numbers
    for mark in marks:
        x = LEFT + mark.time * scale
        if mark.dropped:
            y = first + mark.parts[0][0] * ROW + 13
            body.append(text(x - 2, y, "×", 17, text_anchor="middle", font_weight="700"))
            continue
        y = base
        for worker, weight in mark.parts:
            height = max(1.5, 14 * weight / len(mark.parts))
            y -= height
            body.append(box(x - 2, y, 3.4, height - 0.5, COLOURS[worker]))
        if mark.staleness and x - labelled > 8:
            words, labelled = str(mark.staleness), x
            body.append(text(x - 0.4, y - 2, words, 8, text_anchor="middle", fill=SOFT))
    body.append(stroke(LEFT, base, WIDTH - RIGHT, base, FAINT))
    for tick in range(0, round(panel.until * 1000) + 1, 100):
        x, words = LEFT + tick / 1000 * scale, f"{tick} ms" if tick else "0"
        anchor = "end" if x > WIDTH - RIGHT - 20 else "middle" if tick else "start"
        body.append(text(x, base + 13, words, 10, fill=SOFT, text_anchor=anchor))
    return body


def _draw_bar(bar: Bar, x: float, y: float, width: float, whole: float) -> list[str]:
    if bar.kind == "exchange":
        return [box(x, y, max(0.5, width), BAR_HEIGHT, EXCHANGE)]
    if bar.kind == "wait":
        drawn = [box(x, y + 2, max(0.5, width - 1), BAR_HEIGHT - 4, FAINT)]
        if width > 9 and bar.blocker is not None:
            style = {"fill": COLOURS[bar.blocker], "text_anchor": "middle", "font_weight": "700"}
            drawn.append(text(x + width / 2, y + 12, str(bar.blocker), 11, **style))
        return drawn
    drawn = [box(x, y, max(0.5, width - 1), BAR_HEIGHT, COLOURS[bar.worker])]
    for step in range(1, bar.steps):
        at = whole * step / bar.steps
        if at < width:
            drawn.append(stroke(x + at, y, x + at, y + BAR_HEIGHT, PAPER))
    return drawn


def draw_chart(chart: Chart, curves: Sequence[Sequence[tuple[float, float]]]) -> str:
    """The curves, and in the description of the picture their numbers."""
    height, top, bottom, right = 330, 48, 280, 240
    most = max(x for points in curves for x, _ in points)
    low = min(y for points in curves for _, y in points) // 10 * 10
    across = (WIDTH - LEFT - right) / most
    up = (bottom - top) / (100 - low)
    body = [text(12, 26, chart.title, 13.5, font_weight="600")]
    for percent in range(int(low), 101, 10):
        y = bottom - (percent - low) * up
        body.append(stroke(LEFT, y, WIDTH - right, y, FAINT))
        body.append(text(LEFT - 8, y + 4, f"{percent} %", 11, text_anchor="end", fill=SOFT))
    for part in range(5):
        x = LEFT + (WIDTH - LEFT - right) * part / 4
        words = f"{most * part / 4:.3g}"
        body.append(text(x, bottom + 16, words, 11, text_anchor="middle", fill=SOFT))
    middle = (LEFT + WIDTH - right) / 2
    words = f"{chart.across}; up: accuracy on the test set of the digits"
    body.append(text(middle, bottom + 36, words, 11.5, text_anchor="middle", fill=SOFT))
    for number, (line, points) in enumerate(zip(chart.lines, curves, strict=True)):
        colour = COLOURS[number]
        places = [(LEFT + x * across, bottom - (y - low) * up) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = ("none", "7 4", "2 3")[number]
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2" '
            f'stroke-dasharray="{dashes}"/>'
        )
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = top + 20 + number * 40
        legend = f"{points[-1][1]:.1f} % after {points[-1][0]:.3g} {chart.across}"
        body.append(box(WIDTH - right + 24, y - 9, 10, 10, colour))
        body.append(text(WIDTH - right + 40, y, line.name, 12.5, font_weight="600"))
        body.append(text(WIDTH - right + 40, y + 16, legend, 11, fill=SOFT))
    numbers = {line.name: points for line, points in zip(chart.lines, curves, strict=True)}
    return sheet(height, chart.title, body, json.dumps(numbers))
