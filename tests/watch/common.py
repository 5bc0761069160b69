"""What the tests of the live page share: a run that lasts, its processes, and a browser."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from offbeat.data.lease import Lease
from offbeat.log.records import Admitted, Joined, Part, Pulled, Updated
from offbeat.store.board import new_board

SCRIPT = """
import os
import select
from functools import partial

import torch
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
gate = os.open(GATE, os.O_RDONLY | os.O_NONBLOCK)
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
with ob.join() as run:
    model = run.replica(torch.nn.Linear(3, 2))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1))
    for x, y in run.batches(data, batch_size=4, epochs=EPOCHS):
        select.select([gate], [], [], 0.05)  # a slow step, until the gate opens
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        run.record(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


class Going:
    """A run in a process of its own that goes on until its gate is opened."""

    def __init__(self, process: subprocess.Popen[str], gate: int):
        self.process, self.gate = process, gate
        assert process.stderr is not None
        self.said: list[str] = []
        self.address = ""
        for line in process.stderr:
            self.said.append(line)
            if found := re.match(r"watch: (http://\S+)$", line):
                self.address = found[1]
                break
        assert self.address, "".join(self.said)

    def open(self) -> None:
        os.write(self.gate, b"!")

    def children(self) -> dict[str, int]:
        """Its processes by their names."""
        found = {}
        for pid in (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ):
            found[Path(f"/proc/{pid}/comm").read_text().strip()] = int(pid)
        return found

    def rest(self) -> str:
        """Wait for its end; what it said on standard error since the address."""
        return self.process.communicate(timeout=120)[1]


@contextmanager
def going(folder: Path, *words: object, epochs: int = 200) -> Iterator[Going]:
    """`offbeat run --watch` on three workers, slow until its gate is opened."""
    fifo, script = folder / "gate", folder / "train.py"
    os.mkfifo(fifo)
    script.write_text(SCRIPT.replace("GATE", repr(str(fifo))).replace("EPOCHS", str(epochs)))
    gate = os.open(fifo, os.O_RDWR)
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat", "run", "--watch", "-n", "3", *map(str, words), script],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Going(process, gate)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        os.close(gate)


def gone(handle: int, seconds: float = 60) -> bool:
    """Whether the process of a pidfd ends."""
    return bool(select.select([handle], [], [], seconds)[0])


def fake_store(workers: int = 3, applied: int = 0) -> Any:
    return SimpleNamespace(cells=new_board(workers), applied=applied, given_up=0)


# ---------------------------------------------------------------- records


def join(worker: int, time: float = 0.0, incarnation: int = 1, clock: int = 0) -> Joined:
    return Joined(time, worker, incarnation, clock)


def pull(worker: int, time: float, version: int = 0) -> Pulled:
    return Pulled(time, worker, version)


def part(worker: int, sequence: int = 0, **more: Any) -> Part:
    given = {"incarnation": 1, "base": 0, "leases": [Lease(0, 0, 4)], "samples": 4, "loss": 1.0}
    return Part(worker, sequence=sequence, **(given | more))


def push(worker: int, time: float, sequence: int = 0) -> Admitted:
    return Admitted(time, worker, 1, sequence, [Lease(0, 0, 4)])


def update(time: float, version: int, *parts: Part) -> Updated:
    return Updated(time, version, list(parts))
