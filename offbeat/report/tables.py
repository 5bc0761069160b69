"""What a run cost as tables for a terminal: one run in full, or several side by side."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import IO, Any, NamedTuple

from rich import box
from rich.console import (
    Console,
    ConsoleOptions,
    ConsoleRenderable,
    Group,
    RenderableType,
    RenderHook,
    RenderResult,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from offbeat.report.summary import (
    LayoutFigures,
    LinkFigures,
    ProcessFigures,
    Summary,
    WorkerFigures,
)
from offbeat.report.words import counted, times, visible

COLUMNS = 80  # every table fits, and output that goes to no terminal has this width
MOST_WORKERS = 12  # shown one by one; of more, only those that waited longest and least
EACH_END = 4


def console(file: IO[str]) -> Console:
    """A console on `file`: plain text of 80 columns unless that is a terminal."""
    known = Console(file=file, highlight=False)
    if not known.is_terminal:
        trimmed: Any = _Trimmed(file)
        known = Console(file=trimmed, highlight=False, width=COLUMNS, color_system=None)
    known.push_render_hook(_Harmless())
    return known


class _Trimmed:
    """A file whose lines have no spaces at their end, which tables fill their cells with."""

    def __init__(self, file: IO[str]):
        self.file = file

    def write(self, text: str) -> int:
        return self.file.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _Harmless(RenderHook):
    """Names in a table may come from anybody's run folder or model: none may command a terminal."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Visible(one) for one in renderables]


class _Visible:
    def __init__(self, inner: RenderableType):
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else visible(text), style, control)


# ---------------------------------------------------------------- figures as words


def seconds(value: float) -> str:
    """Seconds with three figures that matter: 0.52, 7.19, 1,240."""
    for bound, digits in ((0.1, 4), (10, 2), (100, 1)):
        if value < bound:
            return f"{value:.{digits}f}" if value else "0"
    return f"{value:,.0f}"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def size(count: float) -> str:
    """Bytes in decimal units, as links are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


# ---------------------------------------------------------------- one run


def run_table(summary: Summary) -> RenderableType:
    """Everything a run came to: its figures, then where each worker's time went."""
    lines = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    lines.add_column(style="bold")
    lines.add_column()
    for name, text in figures(summary):
        lines.add_row(name, Text(text))
    table = workers_table(summary.per_worker, batches=bool(summary.shares))
    below: list[RenderableType] = [Text(""), table]
    if any(mine.link for mine in summary.per_worker):
        below += [Text(""), links_table(summary.per_worker)]
    if summary.layout is not None and summary.layout.per_process:
        below += [Text(""), processes_table(summary.layout)]
    return Group(lines, *below)


def figures(summary: Summary) -> list[tuple[str, str]]:
    """The figures of a run as (name, words)."""
    per = "/s" if summary.engine in ("local", "hosts", "ray") else " per virtual second"
    rows = [
        *_real(summary),
        *(layout_lines(summary.layout) if summary.layout is not None else ()),
        *([("shares", summary.shares)] if summary.shares else ()),
        (
            "speed",
            f"{rate(summary.samples_per_second)} samples{per}: "
            f"{counted(summary.samples, 'sample')} in {seconds(summary.seconds)} s",
        ),
        ("updates", f"{summary.updates:,}{_not_applied(summary)}"),
        *(("turn", row) for row in summary.turn_rows),
    ]
    if summary.metric is not None:
        rows.append((summary.metric_name, f"{summary.metric:.4g} on the test set"))
    for name, value in summary.metrics.items():
        rows.append((name, "no number" if value is None else f"{value:.4g} on the test set"))
    if summary.accuracy is not None:
        rows.append(("accuracy", f"{percent(summary.accuracy)} on the test set"))
    if summary.loss is not None:
        rows.append(("loss", f"{summary.loss:.4f} on the test set"))
    elif summary.train_loss is not None:
        rows.append(("loss", f"{summary.train_loss:.4f} in the last update"))
    rows += [
        ("staleness", f"{summary.staleness_mean:.2f} on average, {summary.staleness_max} at most"),
        ("waiting", f"{share(summary.wait_share)} of all workers' time"),
        ("bytes", f"{size(summary.bytes_sent)} sent, {size(summary.bytes_received)} received"),
    ]
    if any(mine.link for mine in summary.per_worker):
        rows.append(("network", network_line(summary)))
        rows += [("slow link", text) for text in slow_links(summary.per_worker)]
    if summary.overlap:
        rows.append(("overlap", overlap_line(summary.overlap)))
    if any(summary.memory.values()):
        held = [f"{size(count)} {_HOLDERS.get(key, key)}" for key, count in summary.memory.items()]
        rows.append(("memory", ", ".join(held)))
    rows.append(("ledger", ledger_line(summary.ledger)))
    if summary.parameter_hash:
        rows.append(("parameters", f"hash {summary.parameter_hash}"))
    return rows


def network_line(summary: Summary) -> str:
    """What went over the wire, how far it is, and how much of the workers' time that took."""
    links = [mine.link for mine in summary.per_worker if mine.link]
    trips = [link.round_trip for link in links]
    ends = [f"{1e3 * trip:.2g}" for trip in (min(trips), max(trips))[: len(trips)]]
    said = (
        f"{size(summary.wire_bytes)} over the wire to "
        f"{counted(len({link.host for link in links}), 'host')}, round trip "
        f"{' to '.join(ends)} ms; {share(in_links(summary))} of the workers' time went into "
        "the link"
    )
    away = summary.turned_away
    return f"{said}; {counted(away, 'connection')} turned away" if away else said


def in_links(summary: Summary) -> float:
    """The share of the time of workers on other hosts that went into their links."""
    workers = [mine for mine in summary.per_worker if mine.link]
    busy = sum(w.compute + w.wait + w.communication for w in workers)
    return sum(w.in_link for w in workers) / busy if busy else 0.0


def slow_links(workers: Sequence[WorkerFigures]) -> list[str]:
    """A line about those whose links, and neither computing nor others, took most of their time."""
    linked = [(mine.link_share, n, mine.link) for n, mine in enumerate(workers) if mine.link]
    slow = [one for one in linked if one[0] >= LINK_BOUND]
    if not slow:
        return []
    most, number, link = max(slow, key=lambda one: one[:2])
    more = f", and {counted(len(slow) - 1, 'more worker')} like it" if len(slow) > 1 else ""
    said = f"worker {number} on {host_of(link)} spent {share(most)} of its time in its link{more}: "
    return [said + "smaller or rarer exchanges help, other workers do not hold it up"]


def host_of(link: LinkFigures) -> str:
    """What a worker's machine calls itself, or its beginning: it may call itself anything."""
    name = visible(link.host).replace("\n", " ")
    return name if len(name) <= LONGEST_HOST else f"{name[: LONGEST_HOST - 1]}…"


def link_cells(link: LinkFigures) -> list[str]:
    """The figures of one link, as under LINK_COLUMNS."""
    return [
        f"{1e3 * link.round_trip:.2g} ms" if link.round_trip else "-",
        *(f"{size(one)}/s" if one else "-" for one in (link.up, link.down)),
        size(link.sent + link.received),
    ]


LINK_COLUMNS = ("round trip", "to store", "from store", "on the wire")
LONGEST_HOST = 32  # letters
LINK_BOUND = 0.5  # of a worker's time in its link from which that is worth a word


_HOLDERS = {
    "store": "at the store",
    "store_largest": "at the largest of its processes",
    "backup": "at its backup",
    "worker": "at the largest worker",
    "worker_peak": "for all of the largest worker process",
}


def _real(summary: Summary) -> list[tuple[str, str]]:
    """Which engine, and whose speeds: only where time was real."""
    if summary.engine == "hosts":
        return [("engine", "hosts: workers that reach the store over a network")]
    if summary.engine == "ray":
        return [("engine", "ray: workers that Ray has placed, over offbeat's own links")]
    if summary.engine != "local":
        return []
    rows = [("engine", "local: processes on this machine, in real time")]
    if summary.emulated:
        rows.append(("emulated", f"{steps_line(summary.emulated)} for a step at the least"))
    return rows


def layout_lines(layout: LayoutFigures) -> list[tuple[str, str]]:
    """How replicas were split, and what a step of one took."""
    count = f"{layout.processes:,} process{'es' if layout.processes != 1 else ''}"
    rows = [("layout", f"{layout.layout} · {count}")]
    words = []
    if layout.seconds is not None and layout.idle_share is not None:
        words.append(f"{_step(layout.seconds)}, {share(layout.idle_share)} of it idle")
    if layout.predicted_seconds is not None and layout.predicted_idle_share is not None:
        idle = share(layout.predicted_idle_share)
        words.append(f"predicted {_step(layout.predicted_seconds)}, {idle} idle")
    return [*rows, ("replica", "; ".join(words))] if words else rows


def _step(value: float) -> str:
    return f"{seconds(1000 * value)} ms a step"


def processes_table(layout: LayoutFigures) -> Table:
    """What each process of a replica did in a step, on average over the replicas."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("process", no_wrap=True)
    for name in PROCESS_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for number, process in enumerate(layout.per_process):
        table.add_row(str(number), *process_cells(process))
    return table


PROCESS_COLUMNS = ("computing", "idle", "held")


def process_cells(process: ProcessFigures) -> list[str]:
    """The figures of one process of a replica, as under PROCESS_COLUMNS."""
    return [
        f"{seconds(1000 * process.busy / max(1, process.steps))} ms a step",
        share(process.idle_share),
        size(process.nbytes),
    ]


def steps_line(steps: Sequence[float]) -> str:
    """Seconds of every worker's step in one line: 3 × 20 ms, 80 ms."""
    words = []
    for step, same in groupby(steps):
        count = len(list(same))
        time = f"{step:g} s" if step >= 1 else f"{1000 * step:g} ms"
        words.append(f"{count} × {time}" if count > 1 else time)
    return ", ".join(words)


def overlap_line(overlap: dict[str, float]) -> str:
    """How well the stages of a worker overlapped."""
    words = []
    if "input_queue" in overlap:
        words.append(f"{overlap['input_queue']:.1f} batches ready on average")
    if "output_queue" in overlap:
        words.append(f"{overlap['output_queue']:.1f} contributions under way")
    for name, key in (("reading", "reading_hidden"), ("exchange", "exchange_hidden")):
        if key in overlap:
            words.append(f"{share(overlap[key])} of {name} hidden")
    return ", ".join(words) + (" behind computing" if "hidden" in words[-1] else "")


def _not_applied(summary: Summary) -> str:
    """What became of contributions that were not applied, if there were any."""
    counts = {
        "dropped as too late": summary.dropped,
        "skipped as not finite": summary.skipped,
        "refused": summary.refused,
    }
    words = [f"{count:,} {name}" for name, count in counts.items() if count]
    if summary.lost:
        words.append(f"workers lost {times(summary.lost)}")
    if summary.left:
        who = ", ".join(str(worker) for worker in summary.left)
        words.append(f"worker{'s' * (len(summary.left) > 1)} {who} left before the end")
    if summary.ended_by is not None:
        words.append(f"worker {summary.ended_by} ended the run at version {summary.updates:,}")
    return "".join(f"; {word}" for word in words)


def ledger_line(ledger: Sequence[dict[str, int]]) -> str:
    """What became of the samples of all epochs, in one line."""
    total = {key: sum(epoch[key] for epoch in ledger) for key in ledger[0]} if ledger else {}
    epochs = counted(len(ledger), "epoch")
    rest = [
        f"{count:,} {key.replace('_', ' ')}"
        for key, count in total.items()
        if count and key != "applied"
    ]
    applied = f"{counted(total.get('applied', 0), 'sample')} applied once"
    return f"{epochs}: {', '.join([applied, *rest]) if rest else applied + ', none lost'}"


WORKER_COLUMNS = ("steps", "samples", "computing", "waiting", "sending", "staleness")


def workers_table(workers: Sequence[WorkerFigures], batches: bool = False) -> Table:
    """Who computed, waited and talked for how long, and `batches`: with how many samples a step."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("worker", no_wrap=True)
    for name in (*WORKER_COLUMNS, *(["batch"] if batches else [])):
        table.add_column(name, justify="right", no_wrap=True)
    shown = _worth_showing(workers)
    rest = [mine for number, mine in enumerate(workers) if number not in shown]
    groups = [(str(number), [workers[number]]) for number in shown]
    for name, group in [*groups, *([(f"+{len(rest):,} (mean)", rest)] if rest else [])]:
        mean = sum(mine.batch for mine in group) / len(group)
        table.add_row(name, *_cells(group), *([f"{mean:,.1f}"] if batches else []))
    return table


def links_table(workers: Sequence[WorkerFigures]) -> Table:
    """How far each worker is, how wide the way there, and how much of its time that took."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("host", no_wrap=True, overflow="ellipsis", max_width=16)
    for name in (*LINK_COLUMNS, "in link"):
        table.add_column(name, justify="right", no_wrap=True)
    linked = [(number, mine) for number, mine in enumerate(workers) if mine.link]
    if len(linked) > MOST_WORKERS:  # those whose links took most of their time
        linked = sorted(linked, key=lambda one: -one[1].link_share)[: 2 * EACH_END]
    for number, mine in sorted(linked, key=lambda one: one[0]):
        assert mine.link is not None
        cells = link_cells(mine.link)
        table.add_row(str(number), host_of(mine.link), *cells, share(mine.link_share))
    return table


def _worth_showing(workers: Sequence[WorkerFigures]) -> list[int]:
    numbers = list(range(len(workers)))
    if len(workers) <= MOST_WORKERS:
        return numbers
    # Those that waited least are the ones the others waited for.
    by_wait = sorted(numbers, key=lambda number: -workers[number].wait)
    return by_wait[:EACH_END] + by_wait[-EACH_END:]


def _cells(group: Sequence[WorkerFigures]) -> list[str]:
    """The figures of one worker, or the mean of several."""
    n = len(group)
    return [
        f"{sum(w.steps for w in group) / n:,.0f}",
        f"{sum(w.samples for w in group) / n:,.0f}",
        f"{seconds(sum(w.compute for w in group) / n)} s",
        f"{seconds(sum(w.wait for w in group) / n)} s",
        f"{seconds(sum(w.communication for w in group) / n)} s",
        f"{sum(w.staleness for w in group) / n:.2f}",
    ]


# ---------------------------------------------------------------- several runs


class TargetOutcome(NamedTuple):
    """A run, and the seconds it took to the target accuracy."""

    summary: Summary
    reached: float | None


class Beside(NamedTuple):
    """A real run with its learning rate, and what the simulator had predicted of it."""

    lr: float | None
    measured: TargetOutcome
    predicted: TargetOutcome


def runs_table(
    runs: Sequence[tuple[Summary, float | None]], target: float = 0.9, coming: Sequence[str] = ()
) -> Table:
    """Several simulated runs side by side, each with its seconds to the `target` accuracy.

    `coming` names disciplines whose runs are not finished yet.
    """
    table = _side_by_side(
        f"{share(target)} after\n(virtual)",
        "final\naccuracy",
        "samples/s\n(virtual)",
        "mean\nstaleness",
        "time\nwaiting",
        "bytes\nsent",
    )
    best = _soonest([reached for _, reached in runs])
    for summary, reached in runs:
        words = "never" if reached is None else f"{seconds(reached)} s"
        table.add_row(
            summary.discipline,
            Text(words, style="bold" if reached is not None and reached == best else ""),
            percent(summary.accuracy),
            rate(summary.samples_per_second),
            f"{summary.staleness_mean:.2f}",
            share(summary.wait_share),
            size(summary.bytes_sent),
        )
    _announce(table, coming)
    return table


def beside_table(
    rows: Sequence[Beside],
    target: float = 0.9,
    coming: Sequence[str] = (),
    done: float | None = None,
) -> Table:
    """Real runs side by side, with the simulator's prediction of speed and of time to `target`.

    `coming` names disciplines whose runs are not finished yet, `done` how far the first of them is.
    """
    table = _side_by_side(
        "\nrate",
        "samples/s\nreal / sim",
        f"s to {share(target)}\nreal / sim",
        "final\naccuracy",
        "mean\nstaleness",
        "wait\nshare",
    )
    best = _soonest([row.measured.reached for row in rows])
    for lr, measured, predicted in rows:
        summary, reached = measured
        times = " / ".join(
            "never" if t is None else seconds(t) for t in (reached, predicted.reached)
        )
        table.add_row(
            summary.discipline,
            "-" if lr is None else f"{lr:g}",
            f"{rate(summary.samples_per_second)} / {rate(predicted.summary.samples_per_second)}",
            Text(times, style="bold" if reached is not None and reached == best else ""),
            percent(summary.accuracy),
            f"{summary.staleness_mean:.2f}",
            share(summary.wait_share),
        )
    _announce(table, coming, "" if done is None else share(done))
    return table


def _side_by_side(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("\ndiscipline", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _soonest(times: Sequence[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _announce(table: Table, coming: Sequence[str], first: str = "") -> None:
    for number, name in enumerate(coming):
        table.add_row(name, (first if number == 0 else "") or "...", style="dim")
