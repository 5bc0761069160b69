"""Split models: idle shares, asynchronous pipelines, replicas of unequal speed, predictions."""

from statistics import mean, median
from typing import Any

from benchmarks.beside import NO_MNIST
from benchmarks.figure import Figure, Peer
from benchmarks.peers.launch import alone
from benchmarks.scale import Scale

STEP = 0.4  # seconds that every process of a replica computes for a step, emulated
STAGES = 4
PREDICTED = (
    "pp=2,schedule=layers",
    "pp=2,schedule=gpipe,microbatches=4",
    "pp=2,microbatches=8",
    "pp=2,schedule=2bw,microbatches=4",
)


def layouts(scale: Scale) -> list[Figure]:
    """What a pipeline loses, what an asynchronous one wins, and whether predictions hold."""
    return [
        *_idle(scale),
        *_asynchronous(scale),
        *_accuracy(scale),
        _hybrid(scale),
        *_memory(scale),
        *_predicted(scale),
    ]


def _step(scale: Scale, layout: str) -> float:
    arguments = {"layout": layout, "least": STEP, "steps": scale.layout_steps}
    looks = [alone("local.layout_runs:emulated", arguments) for _ in range(scale.launches)]
    return median(look["seconds"] for look in looks)


def _idle(scale: Scale) -> list[Figure]:
    """The idle share of equal stages against the formula."""
    figures = []
    for schedule in ("gpipe", "1f1b"):
        for pieces in (4, 8):
            seconds = _step(
                scale, f"pp={STAGES},schedule={schedule},microbatches={pieces},split=count"
            )
            idle = 1 - STEP / seconds
            formula = (STAGES - 1) / (pieces + STAGES - 1)
            figures.append(
                Figure(
                    f"idle share of {schedule}, {STAGES} stages, {pieces} microbatches: "
                    "off (p-1)/(m+p-1)",
                    100 * abs(idle / formula - 1),
                    "%",
                    at_most=15,
                    beside="emulated stage times",
                    peers=(
                        Peer("measured", 100 * idle, "%"),
                        Peer("formula", 100 * formula, "%"),
                    ),
                )
            )
    return figures


def _asynchronous(scale: Scale) -> list[Figure]:
    locked = _step(scale, f"pp={STAGES},schedule=1f1b,microbatches=4,split=count")
    figures = []
    for layout in (
        f"pp={STAGES},schedule=2bw,microbatches=4,split=count",
        f"pp={STAGES},schedule=stash,split=count",
    ):
        free = _step(scale, layout)
        figures.append(
            Figure(
                f"{layout} over 1f1b with 4 microbatches: samples/s",
                locked / free,
                "x",
                at_least=1.25,
                beside="emulated stage times",
                peers=(Peer("step", 1e3 * free, "ms"), Peer("1f1b", 1e3 * locked, "ms")),
            )
        )
    return figures


def _accuracy(scale: Scale) -> list[Figure]:
    what = "accuracy on MNIST below 1f1b's"
    syncs = ("2bw", "stash")
    if scale.mnist is None:
        return [
            Figure(f"{sync}: {what}", None, "points", at_most=1, beside=NO_MNIST) for sync in syncs
        ]
    found: dict[str, float] = {}
    for schedule in ("1f1b", *syncs):
        # A batch that is not cut has the most under way, and so the most staleness.
        pieces = "" if schedule == "stash" else ",microbatches=4"
        arguments = {
            "folder": str(scale.mnist), "epochs": 1, "samples": scale.samples,
            "layout": f"pp={STAGES},schedule={schedule}{pieces},split=count",
        }  # fmt: skip
        found[schedule] = 100 * mean(
            alone("local.layout_runs:mnist_accuracy", {**arguments, "seed": seed})["accuracy"]
            for seed in range(scale.launches)
        )
    return [
        Figure(
            f"{sync}, {STAGES} stages: {what}",
            found["1f1b"] - found[sync],
            "points",
            at_most=1,
            beside=f"one epoch, mean of {scale.launches} seeds",
            peers=(Peer(sync, found[sync], "%"), Peer("1f1b", found["1f1b"], "%")),
        )
        for sync in syncs
    ]


def _hybrid(scale: Scale) -> Figure:
    """Two replicas of two stages, one three times slower, against each of them alone."""
    layout, slow = "pp=2,microbatches=4,split=count", [STEP, 3 * STEP]
    size: dict[str, Any] = {"layout": layout, "seconds": scale.window}
    both = alone("local.layout_runs:replicas", {**size, "emulate": slow})["per_second"]
    each = [
        alone("local.layout_runs:replicas", {**size, "emulate": [least]})["per_second"]
        for least in slow
    ]
    return Figure(
        "2 replicas x 2 stages, asp, one 3 x slower: samples/s over the two alone",
        both / sum(each),
        "x",
        at_least=0.9,
        peers=(Peer("both", both, "samples/s"), Peer("sum of each alone", sum(each), "samples/s")),
    )


def _memory(scale: Scale) -> list[Figure]:
    """A transformer with Adam over four stages and four shards, against one process with it all."""
    held = alone(
        "local.layout_runs:memory", {"width": scale.width, "layers": scale.layers, "stages": STAGES}
    )
    whole = 16 * held["parameters"]  # bytes: parameters, gradients and two averages
    beside = f"{held['parameters'] / 1e6:.0f} M parameters, Adam; one process holds 16 bytes each"
    return [
        Figure(
            f"pp={STAGES}: parameters, gradients and state of the largest worker process",
            held["worker"] / whole,
            "x",
            at_most=0.30,
            beside=beside,
            peers=(Peer("worker process", held["worker"] / 1e6, "MB"),),
        ),
        Figure(
            f"{STAGES} shards: parameters and state of the largest server process",
            held["server"] / whole,
            "x",
            at_most=0.30,
            beside=beside,
            peers=(Peer("server process", held["server"] / 1e6, "MB"),),
        ),
    ]


def _predicted(scale: Scale) -> list[Figure]:
    figures = []
    for layout in PREDICTED:
        look = alone("local.layout_runs:predicted", {"layout": layout, "steps": scale.layout_steps})
        figures.append(
            Figure(
                f"{layout}: predicted step off the measured",
                100 * abs(look["predicted"] / look["measured"] - 1),
                "%",
                at_most=20,
                beside="character transformer, one thread a process",
                peers=(
                    Peer("predicted", 1e3 * look["predicted"], "ms"),
                    Peer("measured", 1e3 * look["measured"], "ms"),
                ),
            )
        )
    return figures
