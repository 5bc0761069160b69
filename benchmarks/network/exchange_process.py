"""One exchange over TCP, timed at a worker, beside raw sends of the same bytes to the same host.

A program of two: `serve` is the store's host, with a raw server beside it, `rounds` the worker's.
"""

import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.local.exchange_process import NEVER, PATIENCE, Weights
from offbeat.config.job import Job
from offbeat.config.run_config import Hosts, RunConfig
from offbeat.config.setup import make_job
from offbeat.engine.hosts.admission import Entrance, hash_of
from offbeat.engine.hosts.listener import Security, listen
from offbeat.engine.hosts.store import HostsRoles
from offbeat.engine.intervals import Intervals
from offbeat.engine.local.plan import memory_plan
from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.log.records import Part
from offbeat.transport.cargo import Packing
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.handshake import Enter
from offbeat.transport.tcp_link import DialedStore, TcpLink
from offbeat.transport.tls import store_context
from offbeat.worker.client import StoreClient
from offbeat.worker.contribution import Contribution

PORT, RAW = 7077, 7078
TOKEN = b"a token of this benchmark"
ENGINE = Hosts(patience=PATIENCE)


def job_of(floats: int) -> Job:
    data = TensorDataset(torch.zeros(100_000, 1))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return make_job(
        RunConfig(
            model=Weights([[floats]]),
            data=data,
            discipline="asp",
            optimizer=sgd,
            workers=1,
            batch_size=1,
            hash_every=NEVER,
        )
    )


def threads_as_usual(floats: int) -> Job:
    """Compute with as many threads as the engine does for such a model."""
    job = job_of(floats)
    torch.set_num_threads(ENGINE.threads_for(job))
    return job


def _view(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def _fill(wire: socket.socket, view: memoryview) -> None:
    while len(view):
        count = wire.recv_into(view)
        if not count:
            raise SystemExit
        view = view[count:]


# ---------------------------------------------------------------- the store's host


def serve(host: str, floats: int, tls: bool) -> None:
    """The engine's own server, and in another process the least that an exchange can be."""
    if os.fork() == 0:
        raw_server(host, floats)
        os._exit(0)
    security = Security(TOKEN, *(store_context(None) if tls else ()))
    listening = listen(Address(host, PORT))
    entrance = Entrance(listening, security, {}, {})
    nothing = (None, None, Intervals(None, NEVER))
    job = threads_as_usual(floats)
    roles = HostsRoles(entrance, job, ENGINE, *nothing)
    _, orders = pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine, reports = socket.socketpair()
    threading.Thread(target=partial(_swallow, mine), daemon=True).start()
    print("ready", flush=True)
    roles.serve(orders, reports, saved=None, crash=None)
    del pair


def _swallow(wire: socket.socket) -> None:
    while wire.recv(1 << 20):
        pass


def raw_server(host: str, floats: int) -> None:
    """Receive into a buffer, add, send back: what no server can do without."""
    threads_as_usual(floats)
    parameters, gradient = torch.zeros(floats), torch.empty(floats)
    with socket.create_server((host, RAW)) as server:
        wire, _ = server.accept()
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            _fill(wire, _view(gradient))
            parameters.add_(gradient, alpha=-0.1)
            wire.sendall(_view(parameters))


# ---------------------------------------------------------------- the worker's host


def rounds(
    host: str, floats: int, repeats: int, warm_up: int, tls: bool, connections: int
) -> dict[str, Any]:
    """Seconds of each exchange, and of the raw one right before it."""
    threads_as_usual(floats)
    works = {
        "raw": raw_exchange(host, floats),
        "exchange": exchange(host, floats, tls, connections),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(warm_up + repeats):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if repeat >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return dict(seconds)


def raw_exchange(host: str, floats: int) -> Callable[[], None]:
    wire = socket.create_connection((host, RAW))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradient, parameters = torch.randn(floats).mul_(1e-3), torch.empty(floats)

    def once() -> None:
        wire.sendall(_view(gradient))
        _fill(wire, _view(parameters))

    return once


def exchange(host: str, floats: int, tls: bool, connections: int) -> Callable[[], None]:
    job = job_of(floats)
    plan = dataclasses.replace(memory_plan(job, ENGINE), workers=1, store=False)
    slot = SharedMemory(plan).slots[0]
    request = Enter(b"", 0, -1, False, False, hash_of({}), "", "here", 0.0)
    maker = DialedStore(Dialer(Address(host, PORT), TOKEN, tls), request, PATIENCE, connections)
    link = TcpLink(maker, slot, Packing())
    client = StoreClient(link)
    incarnation = client.join()
    with torch.no_grad():
        for view in slot.outgoing[0][0].views.values():
            view.normal_(std=1e-3)
    snapshot, sequence = client.pull([]), 0

    def once() -> None:
        nonlocal snapshot, sequence
        lease = client.lease()
        assert lease is not None
        part = Part(0, incarnation, sequence, snapshot.version, [lease], lease.samples)
        client.put(Contribution(part, slot.outgoing[0]), then_pull=True)
        client.push()
        before, snapshot, sequence = snapshot.version, client.pull([]), sequence + 1
        if snapshot.version != before + 1:
            raise RuntimeError(f"version {snapshot.version} follows {before}: nothing was applied")

    return once


def main() -> None:
    what, arguments = sys.argv[1], json.loads(sys.argv[2])
    if what == "serve":
        serve(**arguments)
    else:
        print(json.dumps(rounds(**arguments)), flush=True)


if __name__ == "__main__":
    main()
