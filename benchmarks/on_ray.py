"""Ray as a scheduler: how soon a run begins, and its samples/s beside static hosts and actors."""

import importlib.util
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.beside import measured
from benchmarks.figure import Figure, Peer
from benchmarks.network.runs import Scene, train_over
from benchmarks.peers import ray_server
from benchmarks.peers.common import ideal
from benchmarks.peers.launch import alone
from benchmarks.scale import Scale

EMULATE = (0.02,) * 4
BATCH = 32
WHAT = "4 workers of 20 ms on Ray"


def on_ray(scale: Scale) -> list[Figure]:
    """All of it on this machine, over loopback."""
    if importlib.util.find_spec("ray") is None:
        missing = "not installed: pip install offbeat[bench]"
        return [Figure(WHAT, None, "x", at_least=0.98, beside=missing)]
    best = ideal(EMULATE, BATCH)
    steps = ceil(scale.window / EMULATE[0])
    scene = Scene(EMULATE, batch=BATCH, steps=steps)
    mine = alone(
        "local.ray_runs:on_a_cluster",
        {"emulate": EMULATE, "batch": BATCH, "steps": steps, "launches": scale.launches},
    )
    static = median(_static(scene) for _ in range(scale.launches))
    actors = measured(
        "Ray actors, async",
        "samples/s",
        lambda: (
            ray_server.straggler(
                EMULATE, batch=BATCH, seconds=scale.window, repeats=scale.launches
            ).median
        ),
    )
    rate = median(mine["per_second"])
    peer = Peer("on Ray", rate, "samples/s")
    return [
        Figure(
            f"{WHAT}: ob.train on a running cluster until each has made a step",
            median(mine["starts"]),
            "s",
            at_most=10,
        ),
        Figure(
            f"{WHAT}: samples/s over static hosts (ideal {best:,.0f})",
            rate / static,
            "x",
            at_least=0.98,
            peers=(peer, Peer("store and work", static, "samples/s")),
        ),
        Figure(
            f"{WHAT}: samples/s over a parameter server of Ray's actors",
            None if actors.value is None else rate / actors.value,
            "x",
            at_least=1.5,
            peers=(peer, actors),
        ),
    ]


def _static(scene: Scene) -> float:
    """The same script with `offbeat store` and `offbeat work`, all on loopback."""
    with folders(len(scene.emulate) + 1) as places:
        return train_over(places, scene, ["--sync", "asp"]).per_second()


@dataclass
class Folder:
    """A folder of this machine in the place of a host."""

    address: str
    folder: Path
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def run(
        self, *words: str | Path, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        process = subprocess.Popen(
            list(map(str, words)),
            cwd=self.folder,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            **options,
        )
        self.started.append(process)
        return process


@contextmanager
def folders(count: int) -> Iterator[list[Folder]]:
    """So many of them; what was started there is gone afterwards."""
    number = os.getpid()  # all of 127.0.0.0/8 is loopback, so two programs need not meet there
    address = f"127.{1 + number // 250 % 250}.{1 + number % 250}.1"
    with tempfile.TemporaryDirectory() as inside:
        found = []
        for place in range(count):
            (Path(inside) / str(place)).mkdir()
            found.append(Folder(address, Path(inside) / str(place)))
        try:
            yield found
        finally:
            for process in (process for one in found for process in one.started):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
