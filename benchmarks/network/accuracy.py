"""Seconds to an accuracy on hosts of which one is slow, over links that are: ours and DDP's."""

from dataclasses import dataclass, replace
from statistics import mean

from benchmarks.beside import NO_MNIST, measured
from benchmarks.figure import Figure, Peer
from benchmarks.network import ddp
from benchmarks.network.hosts import why_not
from benchmarks.network.rates import FACTOR, INT8, SLOW
from benchmarks.network.runs import Scene, train
from benchmarks.peers.launch import PeerFailed
from benchmarks.scale import Scale

EMULATE = (0.02, 0.02, 0.02, 0.02 * FACTOR)
MOST = 6 * 60_000 // (32 * len(EMULATE))  # steps of a worker: six epochs
TIMED = 12  # steps of DDP over the slow links


@dataclass(frozen=True)
class Contender:
    """A discipline, and the rate of plain SGD for it."""

    sync: str
    rate: float


CONTENDERS = (
    Contender("async-local:16", 0.1),
    Contender("local:16", 0.2),
)
DDP_RATE = 0.3


def to_accuracy(scale: Scale) -> list[Figure]:
    """DDP over the best of ours."""
    what = f"seconds to {scale.accuracy:.0%} on MNIST, 4 hosts at 100 Mbit/s, one slow: DDP over"
    reason = why_not() or (NO_MNIST if scale.mnist is None else "")
    if reason:
        return [Figure(f"{what} the best", None, "x", at_least=5, beside=reason)]
    assert scale.mnist is not None
    goal = (str(scale.mnist.resolve()), scale.accuracy, scale.samples)
    scene = Scene(EMULATE, SLOW, "million", 32, MOST, goal=goal)
    peers = []
    for one in CONTENDERS:
        runs = [_seconds(replace(scene, rate=one.rate, seed=s), one) for s in range(scale.reaches)]
        found = [seconds for seconds in runs if seconds is not None]
        value = mean(found) if len(found) == len(runs) else None
        peers.append(Peer(f"{one.sync}, int8", value, "s", "" if value else "not reached"))
    best = min((peer for peer in peers if peer.value), key=lambda p: p.value or 0.0, default=None)
    theirs = measured("DDP", "s", lambda: _ddp(replace(scene, rate=DDP_RATE)))
    return [
        Figure(
            f"{what} {best.name if best else 'the best'}",
            theirs.value / best.value if best and best.value and theirs.value else None,
            "x",
            at_least=5,
            peers=(*peers, replace(theirs, note=theirs.note or "steps x seconds of a step")),
        )
    ]


def _seconds(scene: Scene, one: Contender) -> float | None:
    return train(scene, "--sync", one.sync, *INT8).reached


def _ddp(scene: Scene) -> float:
    """Its steps are counted on fast links, which change none, and timed on the slow ones."""
    fast = replace(scene, bits=None, emulate=[0.0] * len(scene.emulate))
    with fast.hosts() as hosts:
        found = ddp.reach(hosts.all[1:], fast)
    assert scene.goal is not None
    if found["accuracy"] < scene.goal[1]:
        raise PeerFailed(f"{found['accuracy']:.1%} after {found['steps']} steps")
    with scene.hosts() as hosts:
        timed = ddp.train(hosts.all[1:], replace(scene, steps=TIMED))
    return float(found["steps"]) * float(timed["seconds"]) / TIMED
