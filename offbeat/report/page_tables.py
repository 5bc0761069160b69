"""The tables of a report: every figure in numbers, who did how much, and what words mean."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from offbeat.report import grid as figures_of
from offbeat.report.drawing import plain
from offbeat.report.figures_runs import timelines
from offbeat.report.grid import CellGroup, Grid, Spread
from offbeat.report.markup import Safe, joined, table, tag
from offbeat.report.score import ACCURACY
from offbeat.report.summary import Summary
from offbeat.report.tables import (
    LINK_COLUMNS,
    PROCESS_COLUMNS,
    figures,
    host_of,
    link_cells,
    process_cells,
    rate,
    seconds,
    share,
    size,
)
from offbeat.report.timeline import Segment
from offbeat.report.words import counted

LONGEST = 2000  # letters of a reason
LEFT = "text-align: left"
MOST = 100  # rows of a table of workers or events

WORDS = (
    (
        "discipline",
        "When workers exchange what they learnt, and how long they wait for each other: bsp waits "
        "for everybody, asp for nobody, ssp:3 until the slowest is three steps behind, local:16 "
        "meets every 16 steps.",
    ),
    ("device", "What one worker computes on: here, one process or one simulated machine."),
    (
        "target",
        "The score on the test set whose time is compared: when it was reached and kept, so that "
        "the mean of that test and the next two is there, too.",
    ),
    (
        "efficiency",
        "The speed there was, divided by the speed if every worker computed all the time.",
    ),
    ("communication", "Time spent sending contributions and fetching parameters."),
    ("waiting", "Time in which a worker could not go on because of another."),
    (
        "staleness",
        "How many updates were made between a worker's fetching of parameters and the arrival of "
        "what it computed with them. 0 in lock-step.",
    ),
    ("emulated", "Real processes on this machine, each slowed down to the speed that was set."),
    (
        "virtual time",
        "Seconds of a simulated cluster: gradients and accuracies are real, times are computed.",
    ),
)


def _written(span: Spread | None, write: Callable[[float], str]) -> str:
    """A mean with its spread, if it has one."""
    if span is None:
        return "–"
    if span.count == 1 or write(span.low) == write(span.high):
        return write(span.mean)
    spread = tag("span", f" ({write(span.low)} to {write(span.high)})", class_="spread")
    return joined([write(span.mean), spread])


def _seconds(value: float) -> str:
    return f"{seconds(value)} s"


def _rows(grid: Grid, group: CellGroup) -> list[str]:
    aim, score = grid.aim(), grid.score() or ACCURACY
    time = _written(group.time_to(aim), _seconds)
    if aim is not None and group.time_to(aim) is None:
        reached, count = group.reached(aim), len(group.digests)
        time = f"in {reached} of {count} runs" if reached else "not reached"
        time = time if group.finished or reached else "not yet"
    span = group.span
    return [
        time,
        _written(group.final(score), score.write),
        _written(span(figures_of.speed), rate),
        _written(span(figures_of.efficiency), share),
        _written(span(figures_of.communication), _seconds),
        _written(span(figures_of.waiting), share),
        _written(span(figures_of.staleness), lambda v: f"{v:.2f}"),
        _written(span(figures_of.bytes_sent), size),
        _written(span(figures_of.memory), size),
    ]


def _columns(grid: Grid) -> list[str]:
    aim, score = grid.aim(), grid.score() or ACCURACY
    return [
        "time to target" if aim is None else f"time to {aim.bare}",
        f"final {plain(score.words)}",
        "samples/s",
        "efficiency",
        "communication per worker",
        "waiting",
        "mean staleness",
        "bytes sent",
        "memory per worker",
    ]


def results(grid: Grid) -> Safe:
    """Every figure of every group."""
    rows = []
    for group in grid.groups():
        runs = str(len(group.digests)) + ("" if group.finished else ", going on")
        rows.append([plain(group.discipline), str(group.devices), runs, *_rows(grid, group)])
    if not rows:
        return tag("p", "No run has come to a result yet.")
    repeated = any(len(group.digests) > 1 for group in grid.groups())
    label = "All figures" + (": mean (least to greatest of the repeats)" if repeated else "")
    return table(label, ["discipline", "devices", "runs", *_columns(grid)], rows)


def tiles(grid: Grid) -> Safe:
    """The figures of the only group, large."""
    group = grid.groups()[0]
    pairs = zip(_columns(grid), _rows(grid, group), strict=True)
    boxes = [tag("div", tag("dt", name), tag("dd", text)) for name, text in pairs if text != "–"]
    return tag("dl", *boxes, class_="tiles")


def timeline_tables(grid: Grid) -> list[Safe]:
    """The timeline in sums: what each worker did in that stretch, and for whom it waited most."""
    parts = []
    for group, segments, begin, end in timelines(grid):
        spent: dict[int, Counter[str]] = defaultdict(Counter)
        blamed: dict[int, Counter[int]] = defaultdict(Counter)
        for s in segments:
            length = min(s.end, end) - max(s.start, begin)
            spent[s.worker][s.kind] += length  # type: ignore[assignment]
            if s.whom is not None:
                blamed[s.worker][s.whom] += length  # type: ignore[assignment]
        wired = any(w.link for w in group.digests[0].summary.per_worker)
        others = waited_for_exchanges(segments) if wired else {}
        rows = []
        for worker in sorted(spent):
            most = blamed[worker].most_common(1)
            whom = f"worker {most[0][0]}, {_seconds(most[0][1])}" if most else "nobody"
            kinds = [_seconds(spent[worker][kind]) for kind in ("compute", "exchange", "wait")]
            rows.append([f"worker {worker}", *kinds, whom])
            if wired:
                rows[-1].append(_seconds(others.get(worker, 0.0)))
        label = f"{plain(group.name)}, from {_seconds(begin)} to {_seconds(end)}"
        columns = ["", "computing", "exchanging", "waiting", "waited most for"]
        if wired:
            columns[2] = "exchanging over its link"
            columns.append("of its waiting, for another's exchange")
        parts.append(table(label, columns, rows))
    return [tag("details", tag("summary", "The timeline as a table"), *parts)]


def waited_for_exchanges(segments: Sequence[Segment]) -> dict[int, float]:
    """Of each worker's waiting for another, the seconds in which that one did not compute."""
    links: dict[int, list[Segment]] = defaultdict(list)
    for one in segments:
        if one.kind == "exchange":
            links[one.worker].append(one)
    found: dict[int, float] = defaultdict(float)
    for wait in segments:
        for link in links[wait.whom] if wait.kind == "wait" and wait.whom is not None else ():
            found[wait.worker] += max(0.0, min(wait.end, link.end) - max(wait.start, link.start))
    return found


def workers(grid: Grid) -> list[Safe]:
    """Where every worker's time went, over the whole of each run that is shown in detail."""
    parts = []
    for group in grid.on_most():
        shown = group.digests[0].summary.per_worker[:MOST]
        uneven = bool(group.digests[0].summary.shares)
        rows = [
            [
                f"worker {number}", f"{w.steps:,}", f"{w.samples:,}", _seconds(w.compute),
                _seconds(w.wait), _seconds(w.communication), f"{w.staleness:.2f}",
                size(w.bytes_sent), *([f"{w.batch:,.1f}"] if uneven else []),
            ]
            for number, w in enumerate(shown)
        ]  # fmt: skip
        columns = [
            "", "steps", "samples", "computing", "waiting", "communication", "mean staleness",
            "bytes sent", *(["samples a step"] if uneven else []),
        ]  # fmt: skip
        first = ", first repeat" if len(group.digests) > 1 else ""
        if rows:
            parts.append(table(f"{plain(group.name)}{first}", columns, rows))
        links = [
            [f"worker {number}", host_of(w.link) or "–", *link_cells(w.link), share(w.link_share)]
            for number, w in enumerate(shown)
            if w.link
        ]
        if links:
            columns = ["", "host", *LINK_COLUMNS, "time in its link"]
            parts.append(table(f"{plain(group.name)}{first}: links to the store", columns, links))
    return [tag("details", tag("summary", "Every worker's share"), *parts)] if parts else []


def processes(grid: Grid) -> list[Safe]:
    """Of runs whose replicas were split: what every process did, beside what was predicted."""
    parts = []
    for group in grid.on_most():
        layout = group.digests[0].summary.layout
        if layout is None:
            continue
        rows = [
            [f"process {number}", *process_cells(process)]
            for number, process in enumerate(layout.per_process[:MOST])
        ]
        pairs = (
            ("a step, measured", layout.seconds, layout.idle_share),
            ("a step, predicted", layout.predicted_seconds, layout.predicted_idle_share),
        )
        rows += [
            [name, f"{seconds(1000 * step)} ms", share(idle), "–"]
            for name, step, idle in pairs
            if step is not None and idle is not None
        ]
        name = f"{plain(group.name)}, {plain(layout.layout, 200)}"
        if rows:
            parts.append(table(name, ["", *PROCESS_COLUMNS], rows))
    title = "Processes of a replica: predicted and measured"
    return [tag("details", tag("summary", title), *parts)] if parts else []


def events(grid: Grid) -> list[Safe]:
    """Losses, returns and refusals, where there were any."""
    rows = []
    for group in grid.on_most():
        for digest in group.digests:
            found = digest.events
            if not any(e.kind != "joined" for e in found):
                continue
            rows += [
                [plain(group.name), f"worker {e.worker} {e.kind}", _seconds(e.time)]
                for e in found
                if e.kind != "joined" or e.time > 0
            ]
    if not rows:
        return []
    label = "Workers lost, refused and back again"
    label += f", the first {MOST} of {len(rows)} events" if len(rows) > MOST else ""
    return [table(label, ["run", "what", "after"], rows[:MOST], names=2)]


def failures(grid: Grid) -> list[Safe]:
    """The cells that came to nothing, with their reasons."""
    rows = [
        [plain(c.discipline), c.failed[:LONGEST], str(c.devices), str(c.repeat + 1)]
        for c in grid.cells
        if c.failed
    ]
    columns = ["discipline", "reason", "devices", "repeat"]
    return [table("Runs that came to nothing", columns, rows, names=2)] if rows else []


def glossary() -> Safe:
    pairs = [part for word, said in WORDS for part in (tag("dt", word), tag("dd", said))]
    return tag("dl", *pairs, class_="words")


def notebook(summary: Summary) -> Safe:
    """One run as a notebook shows it: no figures, and nothing that its colours could clash with."""
    rows = [
        tag("tr", tag("th", name, style=LEFT), tag("td", text, style=LEFT))
        for name, text in figures(summary)
    ]
    title = f"{plain(summary.discipline)} on {counted(summary.workers, 'worker')}"
    return tag("table", tag("caption", title, style=LEFT), tag("tbody", *rows))
