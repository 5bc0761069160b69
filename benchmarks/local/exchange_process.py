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
from offbeat.contribution import Contribution
from offbeat.engine.blame import SERVER
from offbeat.engine.crew import Crew
from offbeat.engine.local_plan import Local
from offbeat.engine.orders import Wire, send_order
from offbeat.engine.process import fork
from offbeat.engine.steward import Rhythm
from offbeat.link.shared import SharedLink
from offbeat.log import Part
from offbeat.setup import Essentials, make_job

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
        Essentials(Weights(shapes), data, None, "asp", RULES[rule], 1 + copied, 1, 1),
        {"hash_every": 1 if hashed else NEVER},
    )
    crew = Crew(job, Local(patience=PATIENCE, threads=1), None, None, Rhythm(None, NEVER))
    threads = crew.threads(SERVER)
    torch.set_num_threads(threads)
    floats = sum(prod(shape) for shape in shapes)
    with _served(crew) as links:
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
    crew.close()
    return {**seconds, "threads": threads}


@contextmanager
def _served(crew: Crew) -> Iterator[list[SharedLink]]:
    """The engine's own server in a process of its own, and a link to it for each worker."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine, reports = socket.socketpair()
    server = fork(
        "offbeat server",
        lambda: crew.serve(theirs, reports, saved=None, lived=None),
        crew.threads(SERVER),
    )
    links = []
    try:
        for number, slot in enumerate(crew.shared.slots):
            far, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            send_order(orders, Wire(number), far)
            far.close()
            links.append(SharedLink(near, slot))
        yield links
    finally:
        server.kill()
        words = server.reap()
        for wire in (orders, theirs, mine, reports, *(link.wire for link in links)):
            wire.close()
        if words is not None:
            raise RuntimeError(words.message)


def _exchange(links: list[SharedLink]) -> Callable[[], None]:
    """The first worker's push of a gradient that is ready, and its pull; any others only join."""
    incarnation, *_ = [link.join() for link in links]
    link = links[0]
    with torch.no_grad():
        for flat in link.slot.outgoing[0]:
            for view in flat.views.values():
                view.normal_(std=1e-3)
    snapshot, sequence = link.pull([]), 0

    def once() -> None:
        nonlocal snapshot, sequence
        lease = link.lease()
        assert lease is not None
        part = Part(0, incarnation, sequence, snapshot.version, [lease], lease.samples)
        link.put(Contribution(part, link.slot.outgoing[0]), then_pull=True)
        link.push()
        before, snapshot, sequence = snapshot.version, link.pull([]), sequence + 1
        if snapshot.version != before + 1:
            raise RuntimeError(f"version {snapshot.version} follows {before}: nothing was applied")

    return once
