"""Run one study from the command line: `python -m offbeat.studies staleness`."""

import json
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from offbeat.errors import OffbeatError
from offbeat.studies import STUDIES, Result, study

ENOUGH = 140  # columns, for output that goes to a file


def main(
    name: Annotated[str, typer.Argument(help="one of " + ", ".join(STUDIES))] = "",
    folder: Annotated[str | None, typer.Option(help="of MNIST's idx files; else digits")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Try a published finding on the simulated cluster; without a name, list the studies."""
    console = Console(width=None if sys.stdout.isatty() else ENOUGH)
    if not name:
        print(json.dumps(listing())) if as_json else console.print(contents())
        return
    try:
        chosen = study(name)
        result = chosen.run(folder)
    except OffbeatError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if as_json:
        print(json.dumps(as_builtins(result)))
        return
    console.print(chosen.show(result))
    for row in result.rows:
        if row.sweep:
            tried = ", ".join(f"{rate}: {100 * score:.1f}" for rate, score in row.sweep.items())
            console.print(f"rates tried for {row.method}, accuracy on held-back images: {tried}")


def as_builtins(result: Result) -> dict[str, object]:
    """The result as JSON can hold it, with mean and spread beside the single runs."""
    built: dict[str, object] = msgspec.to_builtins(result)
    built["rows"] = [
        msgspec.to_builtins(row) | {"accuracy": row.accuracy, "spread": row.spread}
        for row in result.rows
    ]
    return built


def listing() -> dict[str, str]:
    return {name: one.about for name, one in STUDIES.items()}


def contents() -> Table:
    shown = Table("study", "what it tries")
    for name, about in listing().items():
        shown.add_row(name, about)
    return shown


if __name__ == "__main__":
    typer.run(main)
