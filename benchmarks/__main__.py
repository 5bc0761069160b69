"""Run every benchmark, print one table, write one JSON file."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks import on_ray, shards, simulator, watch
from benchmarks.figure import Figure
from benchmarks.local import exchange, layouts, models, reading, straggler, uneven
from benchmarks.machine import Others, described, machine
from benchmarks.network import figures
from benchmarks.peers.launch import PeerFailed
from benchmarks.scale import QUICK, Scale
from benchmarks.table import WIDTH, as_json, table, verdict

BENCHMARKS: dict[str, Callable[[Scale], list[Figure]]] = {
    "share": simulator.own_share,
    "scaling": simulator.scaling,
    "sites": simulator.sites,
    "exchange": exchange.exchange,
    "before-image": exchange.before_image,
    "shards": shards.shards,
    "small": straggler.small_step,
    "straggler": straggler.straggler,
    "uneven": uneven.uneven,
    "accuracy": straggler.to_accuracy,
    "resnet": models.resnet,
    "allreduce": models.allreduce,
    "article": models.article,
    "prediction": models.prediction,
    "reading": reading.reading,
    "watch": watch.watch,
    "layouts": layouts.layouts,
    "network": figures.network,
    "ray": on_ray.on_ray,
}
# The share of the cores that others may take before the figures mean little.
DISTURBED = 0.05
# Where the four files of MNIST are looked for if nobody says.
MNIST = Path("data/mnist")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--json", type=Path, default=Path("runs/bench.json"), metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it all run?")
    parser.add_argument(
        "--mnist", type=Path, metavar="FOLDER", help=f"its four files; default: {MNIST}"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if arguments.mnist is not None and not arguments.mnist.is_dir():
        parser.error(f"--mnist {arguments.mnist} is not a folder; name the one with its four files")
    folder = arguments.mnist or (MNIST if MNIST.is_dir() else None)
    scale = replace(QUICK if arguments.quick else Scale(), mnist=folder)
    said, console = Console(stderr=True), Console(width=WIDTH)
    facts, others = machine(), Others()
    found: list[Figure] = []
    for name in arguments.names or BENCHMARKS:
        said.print(f"measuring {name} ...")
        try:
            found += BENCHMARKS[name](scale)
        except PeerFailed as failed:  # the others are worth having all the same
            found.append(Figure(name, None, "", "a result", f"failed: {failed}", at_least=0))
    facts |= {"quick": arguments.quick, "others": others.share()}
    console.print(described(facts), highlight=False)
    console.print(table(found))
    console.print(verdict(found), highlight=False)
    if facts["others"] > DISTURBED:
        console.print(
            f"Other programs took {facts['others']:.0%} of the cores meanwhile: measure again "
            "when the machine is idle.",
            highlight=False,
        )
    if arguments.quick:
        console.print("Quick: sizes are too small to mean anything.")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(as_json(facts, found))
    said.print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
