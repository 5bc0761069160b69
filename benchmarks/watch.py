"""What the live page costs a run: its speed with and without one open, and the page's CPU time."""

import io
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import offbeat as ob
from benchmarks.figure import Figure, Peer
from benchmarks.local.runs import NEVER, Steps, per_second
from benchmarks.peers.common import image_mlp, made_up
from benchmarks.peers.launch import alone
from benchmarks.scale import Scale
from offbeat.log.records import Entry
from offbeat.watch import Watch

# Reads a stream as an open page does, and does nothing else.
READER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1] + "events") as stream:
    for line in stream:
        pass
"""
BATCH = 32
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Costed(Watch):
    """A watch that counts its own CPU time in the launcher."""

    cpu = 0.0

    def see(self, record: Entry) -> None:
        before = time.thread_time()
        super().see(record)
        self.cpu += time.thread_time() - before

    @property
    def server_cpu(self) -> float:
        """Seconds of its server so far."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return TICK * (int(fields[11]) + int(fields[12]))


class Reading(ob.Listener):
    """Opens the page when the run begins, and notes at the end what it has cost since then."""

    def __init__(self, watch: Costed):
        self.watch, self.start, self.cpu = watch, 0.0, 0.0
        self.begun = False

    def begin(self, store: Any, samples: int) -> None:
        assert self.watch.address
        command = [sys.executable, "-c", READER, self.watch.address]
        self.process = subprocess.Popen(command)

    def see(self, record: Entry) -> None:
        if not self.begun and record.time > 1.0:
            self.begun, self.start = True, self.watch.server_cpu  # it has started

    def end(self) -> None:  # called before the watch's, whose server is still there
        if self.watch.process is not None:
            self.cpu = self.watch.cpu + self.watch.server_cpu - self.start
        self.process.kill()
        self.process.wait()


def watched(epochs: int, watch: bool) -> dict[str, Any]:
    """Two workers as fast as they can be, on a small network: many records in a second."""
    steps = Steps(2)
    listeners: list[ob.Listener] = [steps]
    page = Costed("watched", file=io.StringIO())
    reading = Reading(page)
    if watch:
        listeners += [page, reading]
    ob.train(
        image_mlp(),
        TensorDataset(*made_up(784)),
        functional.cross_entropy,
        discipline="asp",
        optimizer=partial(torch.optim.SGD, lr=0.05),
        workers=2,
        threads=1,
        batch_size=BATCH,
        epochs=epochs,
        checkpoint_every=NEVER,
        listeners=listeners,
    )
    seconds = max(mine[-1] for mine in steps.times)
    return {
        "per_second": per_second(steps.times, BATCH),
        "cpu_share": reading.cpu / seconds / min(2, len(os.sched_getaffinity(0))),
    }


def watch(scale: Scale) -> list[Figure]:
    """Samples/s with the page over samples/s without it, in pairs next to each other."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    shares: list[float] = []
    for turn in range(scale.repeats):
        # Each is first as often as the other: a machine grows warm.
        for shown in (False, True) if turn % 2 else (True, False):
            arguments = {"epochs": scale.watch_epochs, "watch": shown}
            found = alone("watch:watched", arguments)
            rates[shown].append(found["per_second"])
            if shown:
                shares.append(found["cpu_share"])
    ratios = [shown / bare for shown, bare in zip(rates[True], rates[False], strict=True)]
    what = "live page open, 2 workers, asp, small MLP"
    return [
        Figure(
            f"{what}: samples/s over those without it",
            median(ratios),
            "x",
            at_least=0.99,
            peers=(
                Peer("with", median(rates[True]), "samples/s"),
                Peer("without", median(rates[False]), "samples/s"),
            ),
            beside=f"pairs from {min(ratios):.3g} to {max(ratios):.3g}",
        ),
        Figure(
            f"{what}: CPU time of the page, of that of the workers' cores",
            100 * median(shares),
            "%",
            at_most=1,
            beside="in the launcher and in its own process, without the start",
        ),
    ]
