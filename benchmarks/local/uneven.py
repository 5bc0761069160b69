"""Lock-step on machines of unequal speed: samples/s of the ideal, and the accuracy at the end."""

from math import ceil
from statistics import mean
from typing import Any

from benchmarks.figure import Figure, Peer
from benchmarks.peers.common import ideal
from benchmarks.peers.launch import alone
from benchmarks.scale import Scale

BATCH = 32
SPEEDS = [0.08, 0.04, 0.02]  # seconds of a step with a whole batch: 1 : 2 : 4
SAMPLES = 1438  # of the digits, in an epoch
NOISE = 1.0  # points of accuracy by which seeds differ at the end of such runs


def uneven(scale: Scale) -> list[Figure]:
    """Digits under bsp, with equal shares and by speed, on emulated and on simulated machines."""
    best, what = ideal(SPEEDS, BATCH), "lock-step, 3 workers of speeds 1 : 2 : 4"
    epochs = max(1, ceil(best * scale.window / SAMPLES))
    found: list[Figure] = []
    for engine, where in (("local", "emulated"), ("sim", "simulated")):
        equal = [_launch(engine, None, epochs, seed) for seed in range(scale.launches)]
        speed = [_launch(engine, "speed", epochs, seed) for seed in range(scale.launches)]
        differ = mean(a["accuracy"] - b["accuracy"] for a, b in zip(speed, equal, strict=True))
        batches = ", ".join(f"{batch:.1f}" for batch in speed[0]["batches"])
        found += [
            Figure(
                f"{what}, {where}: shares=speed over the ideal of {best:,.0f} samples/s",
                mean(run["per_second"] for run in speed) / best,
                "x",
                beside=f"mean batches {batches}",
                at_least=0.9,
                peers=(
                    Peer("equal shares", mean(run["per_second"] for run in equal) / best, "x"),
                    Peer("waiting, shares=speed", mean(run["waiting"] for run in speed), "x"),
                ),
            ),
            Figure(
                f"{what}, {where}: final accuracy on digits, shares=speed less equal shares",
                100 * differ,
                "points",
                at_least=-NOISE,
                at_most=NOISE,
                peers=tuple(
                    Peer(name, 100 * mean(run["accuracy"] for run in runs), "%")
                    for name, runs in (("equal shares", equal), ("shares=speed", speed))
                ),
            ),
        ]
    return found


def _launch(engine: str, shares: str | None, epochs: int, seed: int) -> dict[str, Any]:
    arguments = {
        "engine": engine, "shares": shares, "seconds": SPEEDS, "batch": BATCH, "epochs": epochs,
        "seed": seed,
    }  # fmt: skip
    return alone("local.runs:uneven", arguments)
