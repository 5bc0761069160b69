"""Samples/s of whole runs over hosts, beside DDP over the same ones."""

import subprocess
import sys
from dataclasses import replace
from math import ceil

from benchmarks.beside import measured
from benchmarks.figure import Figure, Peer
from benchmarks.network import ddp
from benchmarks.network.attackers import READY
from benchmarks.network.hosts import Hosts, why_not
from benchmarks.network.runs import PORT, Outcome, Scene, train
from benchmarks.peers.common import ideal
from benchmarks.peers.launch import ROOT, PeerFailed
from benchmarks.scale import RESNET_FLOATS, Scale

SLOW = 1e8  # bits a second
INT8 = ("--codec", "int8", "--pull-codec", "int8")
ATTACKERS = "benchmarks.network.attackers"
FACTOR = 4  # how much slower the last worker is
LOCAL = 16  # steps between two exchanges of a large model
ROUNDS = 4  # of such exchanges; the first one begins the clock


def rates(scale: Scale) -> list[Figure]:
    """What codecs, free-running and local steps are worth over a network."""
    reason = why_not()
    if reason:
        return [Figure("samples/s over hosts", None, "x", at_least=1, beside=reason)]
    return [codecs(scale), *uneven(scale), large(scale)]


def codecs(scale: Scale) -> Figure:
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


def uneven(scale: Scale) -> list[Figure]:
    """Hosts of which one is slow, and the same while somebody attacks their store."""
    emulate = (0.02, 0.02, 0.02 * FACTOR)
    best = ideal(emulate, 32)
    scene = Scene(emulate, steps=ceil(best * scale.window / 32 / len(emulate)))
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
    """From the last host; returns when the first of them are there."""
    words = (sys.executable, "-m", ATTACKERS, hosts[1].address, str(PORT))
    attackers = hosts.all[-1].run(
        *words, environment={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    if attackers.stdout.readline().strip() != READY:
        raise PeerFailed("nobody has attacked")


def large(scale: Scale) -> Figure:
    """A model whose exchange takes much longer than its step."""
    model = "resnet" if scale.floats == RESNET_FLOATS else f"weights:{scale.floats}"
    scene = Scene([0.2] * 4, SLOW, model, 8, LOCAL * ROUNDS)
    mine = train(scene, "--sync", f"local:{LOCAL}", *INT8)
    peer = measured("DDP", "samples/s", lambda: _ddp(replace(scene, steps=ROUNDS)))
    return Figure(
        f"{4 * scale.floats / 1e6:.0f} MB at 100 Mbit/s, 4 workers of 200 ms: "
        f"local:{LOCAL} with int8 over DDP",
        None if peer.value is None else mine.per_second(warm_up=1) / peer.value,
        "x",
        at_least=10,
        peers=(_peer(f"local:{LOCAL}, int8", mine, warm_up=1), peer),
    )


def _ddp(scene: Scene) -> float:
    with scene.hosts() as hosts:
        found = ddp.train(hosts.all[1:], scene)
    return float(found["per_second"])


def _peer(name: str, run: Outcome, **how: int) -> Peer:
    return Peer(name, run.per_second(**how), "samples/s")
