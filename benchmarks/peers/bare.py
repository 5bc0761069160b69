"""The least that a server process adds to the steps of two workers: signals, an axpy, a copy."""

import json
import os
import selectors
import socket
import tempfile
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

WORKERS, WARM_UP, RATE = 2, 100, 1e-3
# Nothing exchanged; exchanged and nothing more; and with what a run promises: a gradient is found
# finite, an update leaves its hash in a log, and a copy that outlives a kill.
Kind = Literal["apart", "bare", "promising"]


def added(kind: Kind, steps: int, repeats: int, batch: int = 32) -> dict[str, Any]:
    """Median seconds that the exchange adds to a step of the small MLP.

    Bare, nothing is counted, logged, checked or kept: a packet of one byte says that a gradient
    lies in shared memory, the server adds it to the parameters and copies these back, and a packet
    of one byte says so. Each repeat has the same steps without exchange before it.
    """
    pairs = [
        (_seconds(steps, batch, "apart"), _seconds(steps, batch, kind)) for _ in range(repeats)
    ]
    return {"seconds": median(mine - apart for apart, mine in pairs)}


def _seconds(steps: int, batch: int, kind: Kind) -> float:
    """Mean seconds of a step of workers that run at the same time."""
    floats = sum(p.numel() for p in small_mlp().parameters())
    parameters = torch.zeros(floats).share_memory_()
    slots = [
        (torch.zeros(floats).share_memory_(), torch.zeros(floats).share_memory_())
        for _ in range(WORKERS)
    ]
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(WORKERS)]
    taken = torch.zeros(WORKERS, dtype=torch.float64).share_memory_()

    def server() -> None:
        selector = selectors.DefaultSelector()
        for number, (theirs, mine) in enumerate(pairs):
            theirs.close()
            selector.register(mine, selectors.EVENT_READ, (mine, *slots[number]))
        left, version, promising = WORKERS, 0, kind == "promising"
        image, log = torch.zeros(2, floats), tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        while left:
            for key, _ in selector.select():
                wire, gradient, copy = key.data
                if not wire.recv(1):
                    selector.unregister(wire)
                    left -= 1
                    continue
                parameters.add_(gradient, alpha=-RATE)
                if promising:
                    version += 1
                    image[version % 2].copy_(parameters)
                    seen = xxhash.xxh3_128_hexdigest(parameters.numpy())
                    line = {"kind": "update", "version": version, "hash": seen}
                    log.write(json.dumps(line).encode())
                copy.copy_(parameters)
                wire.send(b"!")

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
