"""A store behind a TCP port in this process, and workers' links to it over loopback."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from offbeat.config.run_config import Hosts
from offbeat.config.setup import make_job
from offbeat.engine.hosts.admission import Entrance, NetworkAcceptor, hash_of, threads_of_links
from offbeat.engine.hosts.listener import Security, listen
from offbeat.engine.local.cpu import CpuPolicy
from offbeat.engine.local.dispatch import Around, Dispatcher
from offbeat.engine.local.plan import memory_plan
from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.engine.server import Server
from offbeat.log.log import Log
from offbeat.log.records import Part
from offbeat.protocol.server import ServerProtocol, ServerSettings
from offbeat.transport.cargo import Packing
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.handshake import Enter
from offbeat.transport.tcp_link import DialedStore, TcpLink
from offbeat.transport.tcp_port import TcpPort, WorkerLink
from offbeat.worker.client import StoreClient
from offbeat.worker.contribution import Contribution, Snapshot
from tests.contract.common import Records, asked, optimizer_for, problem

TOKEN = b"a token of these tests"
SKETCH: dict[str, Any] = {"model": ["w"], "samples": 24}
LONG = 10.0


class TcpStore:
    """The whole server's side, with threads instead of processes."""

    def __init__(self, workers: int = 2, patience: float = 3600.0, discipline: str = "asp"):
        job = make_job(asked(*problem(), discipline, optimizer_for(discipline), workers, 4, 2))
        self.job, self.patience = job, patience
        self.shared = SharedMemory(memory_plan(job, Hosts()))
        self.log, self.records = Log(), Records()
        self.log.listeners.append(self.records)
        self.store = job.make_store(self.log, self.shared.parameters, self.shared.cells)
        final = [*self.shared.parameters, self.shared.averages]
        packing = Packing(job.codec, job.pull_codec, job.sparse)
        self.port = TcpPort(self.shared.slots, self.store.parameters, final, packing, patience)
        self.protocol = ServerProtocol(
            self.store, workers, ServerSettings(patience, together=False, forgives=True)
        )
        server = Server(self.protocol, self.port, time.monotonic)
        threads = partial(threads_of_links, patience)
        self.dispatcher = Dispatcher(server, self.port, CpuPolicy(), Around(), threads)
        self.listening = listen(Address("127.0.0.1", 0))
        self.address = Address(*self.listening.getsockname()[:2])
        entrance = Entrance(self.listening, Security(TOKEN), {"workers": workers}, SKETCH)
        self.acceptor = NetworkAcceptor(entrance, self.port, self.log, LONG)
        self.acceptor.open(self.dispatcher)
        self.made: list[tuple[TcpLink, SharedMemory]] = []
        self.seen: set[WorkerLink] = set()
        self.wires: list[socket.socket] = []  # that a test has opened

    @property
    def lock(self) -> threading.Lock:
        return self.dispatcher.lock

    def request(self, number: int = -1, **more: Any) -> Enter:
        known = {"insists": number >= 0, "instead": False, "sketch": hash_of(SKETCH)}
        known |= {"difference": "", "host": "here", "round_trip": 0.0} | more
        return Enter(b"", 0, number, **known)

    def maker(
        self, number: int = -1, connections: int = 1, port: int = 0, **more: Any
    ) -> DialedStore:
        address = Address("127.0.0.1", port or self.address.port)
        seconds = min(2.0, self.patience)  # it looks again after a twentieth
        request = self.request(number, **more)
        return DialedStore(Dialer(address, TOKEN), request, seconds, connections)

    def link(self, maker: DialedStore, overlap: bool = False) -> TcpLink:
        plan = replace(memory_plan(self.job, Hosts(overlap=overlap)), workers=1, store=False)
        memory = SharedMemory(plan)
        try:
            made = TcpLink(maker, memory.slots[0], Packing(), overlap)
        except BaseException:
            memory.arena.close()
            raise
        self.made.append((made, memory))
        return made

    def client(self, number: int = -1, **how: Any) -> "Client":
        return Client(self, self.maker(number, **how))

    def way(self, number: int) -> WorkerLink:
        found = self.port.way(number)
        assert found is not None
        self.seen.add(found)
        return found

    def until(self, true: Callable[[], Any]) -> None:
        """Wait for something that the server is about to do."""
        end = time.monotonic() + LONG
        while True:
            with self.lock:
                if true():
                    return
            assert time.monotonic() < end
            time.sleep(0.001)  # which orders nothing: it lets others have the processor

    def look(self) -> None:
        """Let time pass as it has."""
        with self.lock:
            self.dispatcher.server.look()
            due = self.port.take()
        self.port.send(due)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
        for link, memory in self.made:
            link.close()
            memory.arena.close()
        self.seen |= set(self.port.links.values())
        self.dispatcher.receivers.close()
        self.acceptor.close()
        for way in self.seen:
            if way.thread is not None:
                way.thread.join(LONG)
                assert not way.thread.is_alive()
        self.listening.close()
        self.dispatcher.selector.close()
        self.shared.arena.close()
        if self.dispatcher.failure is not None:
            raise self.dispatcher.failure


class Client:
    """A worker that does one thing after the other."""

    def __init__(self, store: TcpStore, maker: DialedStore):
        self.store, self.maker = store, maker
        self.link = store.link(maker)
        self.client = StoreClient(self.link)
        self.incarnation, self.sequence = 0, 0
        self.snapshot: Snapshot | None = None

    @property
    def number(self) -> int:
        return self.maker.number

    def join(self) -> int:
        self.incarnation, self.sequence = self.client.join(), 0
        self.snapshot = self.client.pull([])
        return self.incarnation

    def step(self, value: float = 1.0) -> int:
        """A contribution, and what follows; returns the version."""
        assert self.snapshot is not None
        lease = self.client.lease()
        assert lease is not None
        outgoing = self.link.slot.outgoing[0]
        for flat in outgoing:
            for view in flat.views.values():
                view.fill_(value)
        part = Part(self.number, self.incarnation, self.sequence, self.snapshot.version, [lease], 4)
        self.client.put(Contribution(part, outgoing), then_pull=True)
        self.client.push()
        self.sequence += 1
        self.snapshot = self.client.pull([])
        return self.snapshot.version


@contextmanager
def tcp_store(**how: Any) -> Iterator[TcpStore]:
    made = TcpStore(**how)
    try:
        yield made
    finally:
        made.close()
