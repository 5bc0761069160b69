"""Samples/s and time to an accuracy over hosts, beside DDP over the same ones."""

import re
import sys
import tempfile
from dataclasses import dataclass, replace
from statistics import mean

from benchmarks.beside import NO_MNIST, measured
from benchmarks.figure import Figure, Peer
from benchmarks.network import ddp
from benchmarks.network.hosts import Hosts, why_not
from benchmarks.network.runs import PORT, Outcome, Scene, train
from benchmarks.peers.common import ideal
from benchmarks.peers.launch import ROOT
from benchmarks.scale import RESNET_FLOATS, Scale

SLOW = 1e8  # bits a second
INT8 = ("--codec", "int8", "--pull-codec", "int8")
ATTACKERS = "benchmarks.network.attackers"
FACTOR = 4  # how much slower the last worker is


def rates(scale: Scale) -> list[Figure]:
    """What codecs, free-running and local steps are worth over a network."""
    reason = why_not()
    if reason:
        return [Figure("samples/s over hosts", None, "x", at_least=1, beside=reason)]
    return [_codec(scale), *_straggler(scale), _large(scale), _to_accuracy(scale)]


def _codec(scale: Scale) -> Figure:
    """One worker whose steps are nothing but their exchange."""
    floats = scale.floats // 10
    scene = Scene([0.0], SLOW, f"weights:{floats}", 1, max(6, int(4 * scale.window)))
    plain, packed = (train(scene, "--sync", "asp", *more) for more in ((), INT8))
    return Figure(
        f"{floats / 1e6:.1f} M floats at 100 Mbit/s: int8 both ways over float32, samples/s",
        packed.per_second() / plain.per_second(),
        "x",
        at_least=3.5,
        peers=(_peer("int8", packed), _peer("float32", plain)),
    )


def _straggler(scale: Scale) -> list[Figure]:
    """Uneven hosts, and the same while somebody attacks the store."""
    emulate = (0.02, 0.02, 0.02 * FACTOR)
    best = ideal(emulate, 32)
    scene = Scene(emulate, steps=int(best * scale.window / 32 / len(emulate)))
    asp = train(scene, "--sync", "asp")
    peer = measured("DDP", "samples/s", lambda: _ddp(replace(scene, steps=scene.steps // 2)))
    attacked = train(scene, "--sync", "asp", meanwhile=_attack, more=1)
    what = f"3 hosts of 20 ms, one {FACTOR} x slower"
    return [
        Figure(
            f"{what}: ASP over the ideal of {best:,.0f} samples/s",
            asp.per_second() / best,
            "x",
            at_least=0.95,
            peers=(_peer("ASP", asp), peer),
        ),
        Figure(
            f"{what}, while others try to come in: ASP over the same undisturbed",
            attacked.per_second() / asp.per_second(),
            "x",
            at_least=0.95,
            beside=f"{attacked.summary['turned_away']:,} were turned away",
            peers=(_peer("attacked", attacked), _peer("undisturbed", asp)),
        ),
    ]


def _attack(hosts: Hosts) -> None:
    """From the last host."""
    words = (sys.executable, "-m", ATTACKERS, hosts[1].address, str(PORT))
    hosts.all[-1].run(*words, environment={"PYTHONPATH": str(ROOT)})


def _large(scale: Scale) -> Figure:
    """A model whose exchange takes much longer than its step."""
    model = "resnet" if scale.floats == RESNET_FLOATS else f"weights:{scale.floats}"
    scene = Scene([0.2] * 4, SLOW, model, 8, 16 * 6)
    mine = train(scene, "--sync", "local:16", *INT8)
    peer = measured("DDP", "samples/s", lambda: _ddp(replace(scene, steps=4)))
    return Figure(
        f"{4 * scale.floats / 1e6:.0f} MB at 100 Mbit/s, 4 workers of 200 ms: "
        "local:16 with int8 over DDP",
        None if peer.value is None else mine.per_second() / peer.value,
        "x",
        at_least=10,
        peers=(_peer("local:16, int8", mine), peer),
    )


def _ddp(scene: Scene) -> float:
    with tempfile.TemporaryDirectory() as folder, scene.hosts(folder) as hosts:
        for host in hosts:
            host.limit(scene.bits)
        found = ddp.train(hosts.all[1:], scene.model, scene.batch, scene.emulate, steps=scene.steps)
        return float(found["per_second"])


def _peer(name: str, run: Outcome) -> Peer:
    return Peer(name, run.per_second(), "samples/s")


# ---------------------------------------------------------------- time to an accuracy


@dataclass(frozen=True)
class Contender:
    """Options of a store, and the rate of plain SGD for them."""

    options: tuple[str, ...]
    rate: float

    @property
    def name(self) -> str:
        return " ".join(self.options).replace("--sync ", "")


CONTENDERS = (
    Contender(("--sync", "local:16", *INT8), 0.2),
    Contender(("--sync", "asp", *INT8, "--overlap"), 0.1),
)
DDP_RATE = 0.3
EMULATE = (0.02, 0.02, 0.02, 0.02 * FACTOR)


def _to_accuracy(scale: Scale) -> Figure:
    """DDP over the best of ours, on hosts of which one is slow, over links that are."""
    what = f"seconds to {scale.accuracy:.0%} on MNIST, 4 hosts at 100 Mbit/s: DDP over the best"
    if scale.mnist is None:
        return Figure(what, None, "x", at_least=5, beside=NO_MNIST)
    task = (str(scale.mnist.resolve()), scale.accuracy)
    scene = Scene(EMULATE, SLOW, "million", 32, 4000, task=task)
    peers, best = [], None
    for one in CONTENDERS:
        seconds = [
            _seconds(replace(scene, rate=one.rate, seed=s), one) for s in range(scale.reaches)
        ]
        found = [second for second in seconds if second is not None]
        value = mean(found) if len(found) == len(seconds) else None
        best = value if best is None else min(best, value or best)
        peers.append(Peer(one.name, value, "s", "" if value else "not reached"))
    theirs = measured("DDP", "s", lambda: float(_ddp_train(scene, DDP_RATE)["seconds"]))
    ratio = None if best is None or theirs.value is None else theirs.value / best
    return Figure(what, ratio, "x", at_least=5, peers=(*peers, theirs))


def _seconds(scene: Scene, one: Contender) -> float | None:
    found = re.search(r"reached after ([0-9.]+) s", train(scene, *one.options).said)
    return None if found is None else float(found[1])
