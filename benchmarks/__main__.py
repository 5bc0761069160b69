"""Run every benchmark, print one table, write one JSON file."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import simulator
from benchmarks.figure import Figure

BENCHMARKS: dict[str, Callable[[], list[Figure]]] = {
    "share": simulator.own_share,
    "scaling": simulator.scaling,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--json", type=Path, default=Path("runs/bench.json"), metavar="FILE")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    figures: list[Figure] = []
    console = Console(stderr=True)
    for name in arguments.names or BENCHMARKS:
        console.print(f"measuring {name} ...")
        figures += BENCHMARKS[name]()
    table = Table(box=None, pad_edge=False)
    for heading in ("what", "measured", "wanted", "beside"):
        table.add_column(heading, overflow="fold")
    for figure in figures:
        measured = f"{figure.value:.3g} {figure.unit}"
        table.add_row(figure.what, measured, figure.wanted, figure.beside)
    Console().print(table)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    console.print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
