"""The least that a server process adds to the steps of two workers: signals, an axpy, a copy."""

import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from math import isfinite
from statistics import median
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

from benchmarks.peers.common import batches, made_up, small_mlp
from offbeat.link.cores import NOWHERE, Cores

WORKERS, WARM_UP, RATE = 2, 100, 1e-3
# Nothing exchanged; exchanged and nothing more; and with what a run promises: a gradient is found
# finite, an update leaves its hash in a log, and a copy that outlives a kill.
Kind = Literal["apart", "bare", "promising"]
Sync = Literal["asp", "bsp"]
Slots = list[tuple[Tensor, Tensor]]  # a gradient and parameters for each worker
Wires = list[socket.socket]


def added(kind: Kind, sync: Sync, steps: int, repeats: int, batch: int = 32) -> dict[str, Any]:
    """Median seconds that the exchange adds to a step of the small MLP.

    Bare, nothing is counted, logged, checked or kept: a packet of one byte says that a gradient
    lies in shared memory, the server adds it to the parameters and copies these back, and a packet
    of one byte says so. In lock-step it waits for both gradients. Each repeat has the same steps
    without exchange before it.
    """
    pairs = [
        (_seconds(steps, batch, "apart", sync), _seconds(steps, batch, kind, sync))
        for _ in range(repeats)
    ]
    return {"seconds": median(mine - apart for apart, mine in pairs)}


class _Server:
    """As offbeat's: a thread for each worker, and one of them at a time does something."""

    def __init__(self, kind: Kind, sync: Sync, parameters: Tensor, slots: Slots, wires: Wires):
        self.promises, self.together = kind == "promising", sync == "bsp"
        self.parameters, self.slots, self.wires = parameters, slots, wires
        self.floor = threading.Lock()
        self.left = set(range(WORKERS))
        self.came: list[int] = []
        self.version = 0
        self.images = torch.zeros(2, len(parameters)).share_memory_()
        self.log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def run(self, cores: Cores) -> None:
        threads = [threading.Thread(target=self._listen, args=(n, cores)) for n in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _listen(self, number: int, cores: Cores) -> None:
        wire = self.wires[number]
        while wire.recv(1):
            with self.floor:
                self.came.append(number)
                answered = self._update()
            self._answer(answered, last=number)
            cores.follow(number)
        with self.floor:
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


def _seconds(steps: int, batch: int, kind: Kind, sync: Sync) -> float:
    """Mean seconds of a step of workers that run at the same time."""
    floats = sum(p.numel() for p in small_mlp().parameters())
    parameters = torch.zeros(floats).share_memory_()
    slots = [
        (torch.zeros(floats).share_memory_(), torch.zeros(floats).share_memory_())
        for _ in range(WORKERS)
    ]
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(WORKERS)]
    taken = torch.zeros(WORKERS, dtype=torch.float64).share_memory_()
    where = torch.full((WORKERS,), NOWHERE).share_memory_()
    cores = Cores(where.numpy())

    def server() -> None:
        for theirs, _ in pairs:
            theirs.close()
        _Server(kind, sync, parameters, slots, [mine for _, mine in pairs]).run(cores)

    def worker(number: int) -> None:
        wire = pairs[number][0]
        for other in range(WORKERS):
            pairs[other][1].close()
            if other != number:
                pairs[other][0].close()
        step = _step(number, batch, *slots[number], None if kind == "apart" else wire, kind)
        for _ in range(WARM_UP):
            step()
        start = time.perf_counter()
        for _ in range(steps):
            step()
            cores.settle(number)
        taken[number] = (time.perf_counter() - start) / steps

    children = [_fork(partial(worker, number)) for number in range(WORKERS)]
    if kind != "apart":
        children.append(_fork(server))
    for pair in pairs:
        for wire in pair:
            wire.close()
    for child in children:
        os.waitpid(child, 0)
    return float(taken.mean())


def _step(
    seed: int, batch: int, gradient: Tensor, copy: Tensor, wire: socket.socket | None, kind: Kind
) -> Callable[[], None]:
    """A step that applies its gradient itself, or has it applied at the other end of `wire`."""
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    stream = batches(made_up(64, seed=seed), batch, seed)
    own = list(model.parameters())
    places = copy.split([p.numel() for p in own])

    def step() -> None:
        x, y = next(stream)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if wire is None:
            optimizer.step()
            return
        torch.cat([p.grad.view(-1) for p in own if p.grad is not None], out=gradient)
        if kind == "promising":
            assert isfinite(gradient.sum().item())
        wire.send(b"!")
        wire.recv(1)
        with torch.no_grad():
            for parameter, place in zip(own, places, strict=True):
                parameter.copy_(place.view_as(parameter))

    return step


def _fork(job: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        job()
    finally:
        os._exit(0)
