"""`offbeat demo`: eight disciplines side by side on uneven workers."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from offbeat.cli import options
from offbeat.cli.options import Engine
from offbeat.cli.output import print_json
from offbeat.log.log import Listener
from offbeat.log.records import Entry
from offbeat.report.live import REDRAW
from offbeat.report.screen import Screen, can_show
from offbeat.report.tables import (
    Beside,
    TargetOutcome,
    beside_table,
    console,
    runs_table,
    seconds,
    share,
)
from offbeat.studies import demo as demonstration
from offbeat.studies.demo import TARGET, USUAL, DemoResult


def demo(
    engine: Annotated[
        Engine,
        typer.Option(help="Real processes, about a minute (local), or virtual time alone (sim)."),
    ] = Engine.LOCAL,
    json: options.Json = False,
) -> None:
    """Compare eight disciplines on four workers, one of them slow."""
    screen = console(sys.stdout)
    known: dict[str, Any] = {"engine": engine.value}
    exchange = None
    if engine is Engine.LOCAL:
        exchange = demonstration.measure_exchange()
        known |= {"emulated": USUAL.steps, "exchange_seconds": exchange}
        words = demonstration.introduction(USUAL, exchange)
    else:
        words = demonstration.introduction_simulated()
    if not json:
        screen.print(words)
        screen.print()
    with _growing() as growing:
        if engine is Engine.LOCAL:
            listeners = [growing] if growing.live else []
            results = demonstration.run(USUAL, growing.finished, exchange, listeners)
        else:
            results = demonstration.simulate(USUAL, growing.finished)
    sentences = demonstration.reading(results)
    if json:
        runs = [_figures(result) for result in results]
        print_json(known | {"target_accuracy": TARGET, "runs": runs, "reading": sentences})
        return
    screen.print(_table(results))
    screen.print()
    for sentence in sentences:
        screen.print(sentence)
    print("\nTry next:")
    for command in demonstration.next_steps():
        print(f"  {command}")


def _table(
    results: Sequence[DemoResult], coming: Sequence[str] = (), done: float | None = None
) -> RenderableType:
    """Real runs with their predictions beside them, simulated ones alone."""
    if results and results[0].predicted is None:
        return runs_table([(one.summary, one.reached) for one in results], TARGET, coming)
    rows = [
        Beside(
            one.lr,
            TargetOutcome(one.summary, one.reached),
            TargetOutcome(one.predicted, one.predicted_reached),
        )
        for one in results
        if one.predicted is not None
    ]
    return beside_table(rows, TARGET, coming, done)


class _Growing(Listener):
    """Shows results as they come: a growing table in a terminal, a line each elsewhere."""

    def __init__(self, live: Screen | None):
        self.live = live
        self.results: list[DemoResult] = []
        self.store: Any = None
        self.samples, self.due = 0, 0.0

    def finished(self, results: list[DemoResult]) -> None:
        self.results = results
        if self.live is None:
            print(_line(results), file=sys.stderr)
        else:
            self.show()

    def begin(self, store: Any, samples: int) -> None:
        self.store, self.samples = store, samples

    def see(self, record: Entry) -> None:
        now = time.monotonic()
        if now >= self.due:
            self.due = now + REDRAW
            self.show(self.store.applied / self.samples)

    def show(self, done: float | None = None) -> None:
        assert self.live is not None
        coming = [contender.sync for contender in USUAL.contenders[len(self.results) :]]
        self.live.show(_table(self.results, coming, done))


@contextmanager
def _growing() -> Iterator[_Growing]:
    if not can_show(sys.stderr):
        yield _Growing(None)
        return
    with closing(Screen(sys.stderr)) as live:
        growing = _Growing(live)
        growing.show()
        yield growing


def _line(results: list[DemoResult]) -> str:
    last = results[-1]
    unit = "virtual s" if last.predicted is None else "s"
    reached = "never" if last.reached is None else f"after {seconds(last.reached)} {unit}"
    return f"{len(results)}/{len(USUAL.contenders)} {last.sync}: {share(TARGET)} {reached}"


def _figures(result: DemoResult) -> dict[str, object]:
    summary = result.summary
    figures: dict[str, object] = {
        "discipline": result.sync,
        "lr": result.lr,
        "seconds_to_target": result.reached,
        "accuracy": summary.accuracy,
        "samples_per_second": summary.samples_per_second,
        "staleness_mean": summary.staleness_mean,
        "wait_share": summary.wait_share,
        "seconds": summary.seconds,
        "parameter_hash": summary.parameter_hash,
    }
    if result.predicted is not None:
        figures["predicted"] = {
            "seconds_to_target": result.predicted_reached,
            "accuracy": result.predicted.accuracy,
            "samples_per_second": result.predicted.samples_per_second,
            "staleness_mean": result.predicted.staleness_mean,
            "wait_share": result.predicted.wait_share,
            "seconds": result.predicted.seconds,
        }
    return figures
