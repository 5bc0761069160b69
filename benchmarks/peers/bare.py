"""The least that a server process adds to the steps of workers: signals, an axpy, a copy."""

import ctypes
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from statistics import median
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.common import batches, image_mlp, made_up, small_mlp, wait_until
from offbeat.engine.local.cpu import NOWHERE, PlacedCpu
from offbeat.transport.memory_link import Packets, Waiting

WARM_UP, RATE = 100, 1e-3
PR_SET_TIMERSLACK = 29
PATIENCE = 300  # seconds until a worker that does not come counts as lost
# Nothing exchanged; exchanged and nothing more; and with what a run promises: a gradient is found
# finite, an update leaves its hash in a log, and a copy that outlives a kill.
Kind = Literal["apart", "bare", "promising"]
Sync = Literal["asp", "bsp"]
Slots = list[tuple[Tensor, Tensor]]  # a gradient and parameters for each worker
Wires = list[socket.socket]
Step = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """What the workers compute, and how many seconds a step of each lasts at the least."""

    model: Callable[[], nn.Module]
    inputs: int
    batch: int
    least: Sequence[float]


def added(kind: Kind, sync: Sync, steps: int, repeats: int, batch: int = 32) -> dict[str, Any]:
    """Median seconds that the exchange adds to a step of the small MLP.

    Bare, nothing is counted, logged, checked or kept: a packet of one byte says that a gradient
    lies in shared memory, the server adds it to the parameters and copies these back, and a packet
    of one byte says so. In lock-step it waits for both gradients. Each repeat has the same steps
    without exchange before it.
    """
    work = Work(small_mlp, 64, batch, (0.0, 0.0))

    def mean_seconds(step: Step) -> float:
        for _ in range(WARM_UP):
            step()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps

    pairs = [
        [_each(work, one, sync, mean_seconds).mean().item() for one in ("apart", kind)]
        for _ in range(repeats)
    ]
    return {"seconds": median(mine - apart for apart, mine in pairs)}


def straggler(emulate: list[float], batch: int, seconds: float) -> dict[str, Any]:
    """Samples per second of free workers whose steps last at least their emulated seconds."""
    barrier = multiprocessing.get_context("fork").Barrier(len(emulate))

    def per_second(step: Step) -> float:
        for _ in range(4):
            step()
        barrier.wait(PATIENCE)
        start, steps = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            step()
            steps += 1
        rate = steps * batch / (time.monotonic() - start)
        # Nobody leaves the machine to the others while they are still counting.
        barrier.wait(PATIENCE)
        return rate

    work = Work(image_mlp, 784, batch, emulate)
    return {"per_second": _each(work, "bare", "asp", per_second).sum().item()}


class _Server:
    """As offbeat's: a thread for each worker, and one of them at a time does something."""

    def __init__(self, kind: Kind, sync: Sync, parameters: Tensor, slots: Slots, wires: Wires):
        self.promises, self.together = kind == "promising", sync == "bsp"
        self.parameters, self.slots, self.wires = parameters, slots, wires
        self.lock = threading.Lock()
        self.left = set(range(len(wires)))
        self.came: list[int] = []
        self.version = 0
        self.images = torch.zeros(2, len(parameters)).share_memory_()
        self.log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def run(self, cpu: PlacedCpu) -> None:
        threads = [threading.Thread(target=self._listen, args=(n, cpu)) for n in self.left]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _listen(self, number: int, cpu: PlacedCpu) -> None:
        wire = self.wires[number]
        while wire.recv(1):
            with self.lock:
                self.came.append(number)
                answered = self._update()
            self._answer(answered, last=number)
            cpu.received(number)
        with self.lock:
            self.left.discard(number)
            answered = self._update()
        self._answer(answered, last=number)

    def _update(self) -> list[int]:
        """Apply what has come; returns whom to tell."""
        if not self.came or (self.together and len(self.came) < len(self.left)):
            return []
        came, self.came = sorted(self.came), []
        gradient = self.slots[came[0]][0]
        if self.together:
            gradient = gradient / len(came)
            for number in came[1:]:
                gradient.add_(self.slots[number][0], alpha=1 / len(came))
        self.parameters.add_(gradient, alpha=-RATE)
        if self.promises:
            self._keep()
        for number in came:
            self.slots[number][1].copy_(self.parameters)
        return came

    def _keep(self) -> None:
        self.version += 1
        self.images[self.version % 2].copy_(self.parameters)
        seen = xxhash.xxh3_128_hexdigest(self.parameters.numpy())
        line = {"kind": "update", "version": self.version, "hash": seen}
        self.log.write(json.dumps(line).encode())

    def _answer(self, numbers: list[int], last: int) -> None:
        for number in sorted(numbers, key=lambda n: n == last):
            self.wires[number].send(b"!")


def _each(work: Work, kind: Kind, sync: Sync, look: Callable[[Step], float]) -> Tensor:
    """What `look` finds at each of the workers, which run at the same time."""
    numbers = range(len(work.least))
    parameters = nn.utils.parameters_to_vector(work.model().parameters()).detach().share_memory_()
    slots = [
        (torch.zeros_like(parameters).share_memory_(), parameters.clone().share_memory_())
        for _ in numbers
    ]
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in numbers]
    found = torch.zeros(len(numbers), dtype=torch.float64).share_memory_()
    where = torch.full((len(numbers),), NOWHERE).share_memory_()
    cpu = PlacedCpu(where.numpy())

    def server() -> None:
        for theirs, _ in pairs:
            theirs.close()
        _Server(kind, sync, parameters, slots, [mine for _, mine in pairs]).run(cpu)

    def worker(number: int) -> None:
        wire = pairs[number][0]
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # as offbeat's workers
        for other in numbers:
            pairs[other][1].close()
            if other != number:
                pairs[other][0].close()
        # As offbeat's: one that sleeps for most of the time runs anywhere when that is over.
        waiting = Waiting() if work.least[number] else cpu.worker(number)
        joined = None if kind == "apart" else wire
        step = _step(work, number, slots[number], joined, kind, waiting.attention)

        def placed() -> None:
            step()
            waiting.step_begins()

        found[number] = look(placed)

    children = [_fork(partial(worker, number)) for number in numbers]
    if kind != "apart":
        children.append(_fork(server))
    for pair in pairs:
        for wire in pair:
            wire.close()
    for child in children:
        os.waitpid(child, 0)
    return found


def _step(
    work: Work,
    number: int,
    slot: tuple[Tensor, Tensor],
    wire: socket.socket | None,
    kind: Kind,
    attention: float,
) -> Step:
    """A step that applies its gradient itself, or has it applied at the other end of `wire`."""
    model, least = work.model(), work.least[number]
    gradient, copy = slot
    nn.utils.vector_to_parameters(copy, model.parameters())  # views: what is copied there is pulled
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    stream = batches(made_up(work.inputs, seed=number), work.batch, number)
    own = list(model.parameters())
    packets = Packets()

    def step() -> None:
        until = time.monotonic() + least
        x, y = next(stream)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if wire is None:
            optimizer.step()
            return
        torch.cat([p.grad.view(-1) for p in own if p.grad is not None], out=gradient)
        if kind == "promising":
            assert isfinite(gradient.sum().item())
        wait_until(until)
        wire.send(b"!")
        packets.receive(wire, attention)

    return step


def _fork(job: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        job()
    finally:
        os._exit(0)
