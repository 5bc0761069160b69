"""One exchange, timed in a worker's process: push, apply, pull, and the limit in alternation."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.peers.limit import RULES, before_image, step_and_copy
from offbeat.config.run_config import Local, RunConfig
from offbeat.config.setup import make_job
from offbeat.engine.intervals import Intervals
from offbeat.engine.local.launcher_messages import WorkerConnected, send_order
from offbeat.engine.local.process import fork
from offbeat.engine.local.roles import Roles
from offbeat.engine.spawn import SERVER
from offbeat.log.records import Part
from offbeat.transport.memory_link import MemoryLink
from offbeat.worker.client import StoreClient
from offbeat.worker.contribution import Contribution

WARM_UP = 3
NEVER = 10**9
PATIENCE = 600.0  # seconds; nothing here is meant to be given up


class Weights(nn.Module):
    """Parameters of some shapes, and nothing that could be computed with them."""

    def __init__(self, shapes: list[list[int]]):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(shape).mul_(1e-3) for shape in shapes])


def rounds(
    shapes: list[list[int]], repeats: int, rule: str, copied: bool, hashed: bool
) -> dict[str, Any]:
    """Seconds of each exchange and of its limits.

    `copied` exchanges as one of two workers, whose pull is a copy; otherwise one worker alone reads
    the server's parameters in place. `hashed` lets the log have a hash of every version.
    """
    data = TensorDataset(torch.zeros(100_000, 1))
    job = make_job(
        RunConfig(
            model=Weights(shapes),
            data=data,
            discipline="asp",
            optimizer=RULES[rule],
            workers=1 + copied,
            batch_size=1,
            hash_every=1 if hashed else NEVER,
        )
    )
    roles = Roles(job, Local(patience=PATIENCE, threads=1), None, None, Intervals(None, NEVER))
    threads = roles.threads(SERVER)
    torch.set_num_threads(threads)
    floats = sum(prod(shape) for shape in shapes)
    with _served(roles) as links:
        works: dict[str, Callable[[], None]] = {
            "limit": step_and_copy(rule, floats, shared=True),
            "exchange": _exchange(links),
            "private": step_and_copy(rule, floats, shared=False),
            "image": before_image(rule, floats),
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for repeat in range(WARM_UP + repeats):
            for name, work in works.items():
                start = time.perf_counter()
                work()
                if repeat >= WARM_UP:
                    seconds[name].append(time.perf_counter() - start)
    roles.close()
    return {**seconds, "threads": threads}


@contextmanager
def _served(roles: Roles) -> Iterator[list[MemoryLink]]:
    """The engine's own server in a process of its own, and a link to it for each worker."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine, reports = socket.socketpair()
    server = fork(
        "offbeat server",
        lambda: roles.serve(theirs, reports, saved=None, crash=None),
        roles.threads(SERVER),
    )
    links = []
    try:
        for number, slot in enumerate(roles.shared.slots):
            far, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            send_order(orders, WorkerConnected(number), far)
            far.close()
            links.append(MemoryLink(near, slot))
        yield links
    finally:
        server.kill()
        words = server.reap()
        for wire in (orders, theirs, mine, reports, *(link.wire for link in links)):
            wire.close()
        if words is not None:
            raise RuntimeError(words.message)


def _exchange(links: list[MemoryLink]) -> Callable[[], None]:
    """The first worker's push of a gradient that is ready, and its pull; any others only join."""
    clients = [StoreClient(link) for link in links]
    incarnation, *_ = [client.join() for client in clients]
    link, client = links[0], clients[0]
    with torch.no_grad():
        for flat in link.slot.outgoing[0]:
            for view in flat.views.values():
                view.normal_(std=1e-3)
    snapshot, sequence = client.pull([]), 0

    def once() -> None:
        nonlocal snapshot, sequence
        lease = client.lease()
        assert lease is not None
        part = Part(0, incarnation, sequence, snapshot.version, [lease], lease.samples)
        client.put(Contribution(part, link.slot.outgoing[0]), then_pull=True)
        client.push()
        before, snapshot, sequence = snapshot.version, client.pull([]), sequence + 1
        if snapshot.version != before + 1:
            raise RuntimeError(f"version {snapshot.version} follows {before}: nothing was applied")

    return once
