"""`offbeat demo`: eight disciplines side by side on one uneven cluster."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live

from offbeat import demo as demonstration
from offbeat.cli import options
from offbeat.cli.output import print_json
from offbeat.demo import CONTENDERS, TARGET, Result
from offbeat.report.tables import console, runs_table, seconds, share


def demo(json: options.Json = False) -> None:
    """Compare eight disciplines on four workers, one of them slow; takes a few seconds."""
    if not json:
        screen = console(sys.stdout)
        screen.print(demonstration.introduction())
        screen.print()
    with _growing_table() as seen:
        results = demonstration.run(seen)
    sentences = demonstration.reading(results)
    if json:
        print_json(
            {
                "target_accuracy": TARGET,
                "runs": [_figures(result) for result in results],
                "reading": sentences,
            }
        )
        return
    screen.print(runs_table([(result.summary, result.reached) for result in results], TARGET))
    screen.print()
    for sentence in sentences:
        screen.print(sentence)
    print("\nTry next:")
    for command in demonstration.next_steps():
        print(f"  {command}")


@contextmanager
def _growing_table() -> Iterator[Callable[[list[Result]], None]]:
    """Shows results as they come: a growing table in a terminal, a line each elsewhere."""
    screen = console(sys.stderr)
    if not screen.is_terminal:
        yield lambda results: print(_line(results), file=sys.stderr)
        return
    with Live(console=screen, auto_refresh=False, transient=True) as live:
        # A process that is killed cannot show the cursor again, so it is never hidden.
        screen.show_cursor(True)

        def show(results: list[Result]) -> None:
            runs = [(result.summary, result.reached) for result in results]
            coming = [contender.sync for contender in CONTENDERS[len(runs) :]]
            live.update(runs_table(runs, TARGET, coming), refresh=True)

        show([])
        yield show


def _line(results: list[Result]) -> str:
    last = results[-1]
    reached = "never" if last.reached is None else f"after {seconds(last.reached)} virtual s"
    return f"{len(results)}/{len(CONTENDERS)} {last.sync}: {share(TARGET)} {reached}"


def _figures(result: Result) -> dict[str, object]:
    summary = result.summary
    return {
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
