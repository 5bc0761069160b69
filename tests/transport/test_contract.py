"""What every transport promises, plain and with faults: one suite over all of them."""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from offbeat.config.run_config import Local
from offbeat.config.setup import make_job
from offbeat.data.lease import Lease
from offbeat.engine.hosts.admission import Entrance, NetworkAcceptor, hash_of, threads_of_links
from offbeat.engine.hosts.listener import Security, listen
from offbeat.engine.local.cpu import CpuPolicy
from offbeat.engine.local.dispatch import Around, Dispatcher
from offbeat.engine.local.plan import memory_plan
from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.engine.server import Server
from offbeat.log.log import Log
from offbeat.log.records import Joined, Lost, Part
from offbeat.model.table import Flat
from offbeat.protocol.server import ServerProtocol, ServerSettings
from offbeat.transport.cargo import Packing
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.direct import DirectLink, DirectPort
from offbeat.transport.faulty import Faults, FaultyLink
from offbeat.transport.handshake import Enter
from offbeat.transport.link import Link, RunOver, RunStopped, StoreGone
from offbeat.transport.memory_link import MemoryLink, MemoryPort
from offbeat.transport.tcp_link import DialedStore, TcpLink
from offbeat.transport.tcp_port import TcpPort
from offbeat.transport.tls import store_context
from offbeat.worker.client import StoreClient
from offbeat.worker.contribution import Contribution
from tests.contract.common import Records, asked, optimizer_for, problem

PATIENCE = 3600.0  # nobody is given up for being slow
LONG = 20.0


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


class Rig:
    """A real store behind a port, and links to it; a transport says how they are made."""

    copies = True  # whether what is pulled is the worker's own

    def __init__(self, discipline: str, workers: int, faults: Faults | None, codec: str | None):
        what = problem(normed)
        wanted = asked(*what, discipline, optimizer_for(discipline), workers, 4, 2)
        self.job = make_job(replace(wanted, codec=codec))
        self.records = Records()
        self.log = Log()
        self.log.listeners.append(self.records)
        self.faults, self.links = faults, 0
        self.lock = threading.Lock()
        self.open()
        settings = ServerSettings(PATIENCE, together=False)
        self.protocol = ServerProtocol(self.store, workers, settings)
        self.server = Server(self.protocol, self.port, time.monotonic)
        self.begin()

    def begin(self) -> None:
        """Be ready for links."""

    store: Any
    port: Any

    def open(self) -> None:
        raise NotImplementedError

    def link(self, worker: int) -> Link:
        raise NotImplementedError

    def outgoing(self, worker: int) -> list[Flat]:
        """Where a worker makes its contribution."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def client(self, worker: int) -> StoreClient:
        """A worker's side over a new link, which takes the place of one that has ended."""
        link = self.link(worker)
        if self.faults is not None:
            self.links += 1
            link = FaultyLink(link, self.faults, self.links, lambda seconds: None)
        return StoreClient(link)

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something that the server is about to do."""
        end = time.monotonic() + LONG
        while True:
            with self.lock:
                if true():
                    return
            assert time.monotonic() < end
            os.sched_yield()

    def contribution(self, worker: int, incarnation: int, sequence: int, base: int, lease: Lease):
        part = Part(worker, incarnation, sequence, base, [lease], lease.samples)
        return Contribution(part, self.outgoing(worker))


class DirectRig(Rig):
    copies = False  # the worker copies what it is shown

    def open(self) -> None:
        self.store = self.job.make_store(self.log)
        self.port = DirectPort(self.job.workers)
        flats = self.store.parameters.flats
        self.payloads = [[Flat(flat.table) for flat in flats] for _ in range(self.job.workers)]
        for flat in (flat for payload in self.payloads for flat in payload):
            flat.buffer.zero_()

    def link(self, worker: int) -> Link:
        self.port.connect(worker)
        self.server.connect(worker)
        return DirectLink(self.port, worker, self.hear)

    def hear(self, worker: int) -> None:
        with self.lock:
            self.server.hear(worker)

    def outgoing(self, worker: int) -> list[Flat]:
        return self.payloads[worker]

    def close(self) -> None:
        pass


class MemoryRig(Rig):
    def open(self) -> None:
        self.shared = SharedMemory(memory_plan(self.job, Local()))
        self.store = self.job.make_store(self.log, self.shared.parameters, self.shared.cells)
        self.port = MemoryPort(self.shared.slots, self.store.parameters)
        self.wires: list[socket.socket] = []
        self.wakeup = os.eventfd(0)
        self.going = True
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def link(self, worker: int) -> Link:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.settimeout(LONG)
        self.wires += [mine, theirs]
        with self.lock:
            self.port.connect(worker, theirs)
            self.server.connect(worker)
        os.eventfd_write(self.wakeup, 1)
        return MemoryLink(mine, self.shared.slots[worker])

    def _serve(self) -> None:
        """As a dispatcher does, in one thread."""
        while self.going:
            with self.lock:
                wires = {wire: worker for worker, wire in self.port.wires.items()}
            found, _, _ = select.select([*wires, self.wakeup], [], [], LONG)
            with self.lock:
                for wire in found:
                    if wire is self.wakeup or wire == self.wakeup:
                        os.eventfd_read(self.wakeup)
                    elif self.port.wires.get(wires[wire]) is wire:
                        self.server.hear(wires[wire])
                due = self.port.take()
            self.port.send(due)

    def outgoing(self, worker: int) -> list[Flat]:
        return self.shared.slots[worker].outgoing[0]

    def close(self) -> None:
        self.going = False
        os.eventfd_write(self.wakeup, 1)
        self.thread.join(LONG)
        assert not self.thread.is_alive()
        os.close(self.wakeup)
        for wire in self.wires:
            wire.close()
        self.shared.arena.close()


class TcpRig(Rig):
    """The whole way: dialled, proven, and over TCP."""

    overlap, context = False, None

    def open(self) -> None:
        self.shared = SharedMemory(memory_plan(self.job, Local(overlap=self.overlap)))
        self.store = self.job.make_store(self.log, self.shared.parameters, self.shared.cells)
        final = [*self.shared.parameters, self.shared.averages]
        parameters, slots = self.store.parameters, self.shared.slots
        self.port = TcpPort(slots, parameters, final, Packing(self.job.codec), PATIENCE)
        self.made: list[tuple[TcpLink, SharedMemory]] = []
        self.own: dict[int, SharedMemory] = {}

    def begin(self) -> None:
        listening = listen(Address("127.0.0.1", 0))
        self.address = Address("127.0.0.1", listening.getsockname()[1])
        security = Security(TOKEN, *(store_context(None) if self.context else ()))
        self.acceptor = NetworkAcceptor(
            Entrance(listening, security, {}, {}), self.port, self.log, LONG
        )
        threads = partial(threads_of_links, PATIENCE)
        self.dispatcher = Dispatcher(self.server, self.port, CpuPolicy(), Around(), threads)
        self.lock = self.dispatcher.lock
        self.acceptor.open(self.dispatcher)
        self.listening = listening

    def link(self, worker: int) -> Link:
        self.until(lambda: self.port.way(worker) is None or self.port.way(worker).ended)
        plan = replace(memory_plan(self.job, Local(overlap=self.overlap)), workers=1, store=False)
        mine = self.own[worker] = SharedMemory(plan)
        dialer = Dialer(self.address, TOKEN, bool(self.context))
        request = Enter(b"", 0, worker, True, False, hash_of({}), "", "here", 0.0)
        maker = DialedStore(dialer, request, LONG)
        found = TcpLink(maker, mine.slots[0], Packing(self.job.codec), self.overlap)
        assert maker.number == worker
        self.made.append((found, mine))
        return found

    def outgoing(self, worker: int) -> list[Flat]:
        return self.own[worker].slots[0].outgoing[0]

    def close(self) -> None:
        for link, mine in self.made:
            link.close()
            mine.arena.close()
        self.dispatcher.receivers.close()
        self.acceptor.close()
        self.listening.close()
        self.shared.arena.close()
        if self.dispatcher.failure is not None:
            raise self.dispatcher.failure


class TlsRig(TcpRig):
    context = True


class ThreadRig(TcpRig):
    """Bytes move in a thread of the worker's."""

    overlap = True


# Another transport is one more entry.
TRANSPORTS: dict[str, type[Rig]] = {
    "direct": DirectRig,
    "memory": MemoryRig,
    "tcp": TcpRig,
    "tls": TlsRig,
    "tcp-thread": ThreadRig,
}
TOKEN = b"a token of these tests"
LATE = Faults(late=1.0)
Make = Callable[..., Rig]


@pytest.fixture(params=[(name, faults) for name in TRANSPORTS for faults in (None, LATE)], ids=str)
def rig(request: pytest.FixtureRequest) -> Iterator[Make]:
    name, faults = request.param
    yield from _made(name, faults)


@pytest.fixture(params=TRANSPORTS)
def faulty(request: pytest.FixtureRequest) -> Iterator[Make]:
    yield from _made(request.param, None)


def _made(name: str, usual: Faults | None) -> Iterator[Make]:
    made: list[Rig] = []

    def make(
        discipline: str = "asp",
        workers: int = 2,
        faults: Faults | None = usual,
        codec: str | None = None,
    ) -> Rig:
        made.append(TRANSPORTS[name](discipline, workers, faults, codec))
        return made[-1]

    yield make
    for one in made:
        one.close()


def filled(flats: list[Flat], value: float) -> None:
    for flat in flats:
        for view in flat.views.values():
            view.fill_(value)


def values(flats: Any) -> dict[str, torch.Tensor]:
    return {name: view.clone() for flat in flats for name, view in flat.views.items()}


def step(one: Rig, client: StoreClient, worker: int, incarnation: int, sequence: int, base: int):
    lease = client.lease()
    assert lease is not None
    client.put(one.contribution(worker, incarnation, sequence, base, lease), then_pull=True)
    client.push()
    return client.pull([])


# ---------------------------------------------------------------- what travels


def test_a_push_arrives_bit_for_bit(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    client = one.client(0)
    incarnation, snapshot = client.join(), client.pull([])
    came: list[Any] = []
    push = one.store.push

    def looked_at(contribution: Contribution, now: float) -> Any:
        payload, also = values(contribution.unpacked()), contribution.statistics
        came.append((payload, {n: t.clone() for n, t in also.items()}, contribution.absent))
        return push(contribution, now)

    monkeypatch.setattr(one.store, "push", looked_at)
    torch.manual_seed(3)
    for flat in one.outgoing(0):
        for view in flat.views.values():
            view.normal_()
    sent = values(one.outgoing(0))
    lease = client.lease()
    assert lease is not None
    made = one.contribution(0, incarnation, 0, snapshot.version, lease)
    made.absent = frozenset({"0.bias"})
    made.statistics = {"1.running_mean": torch.tensor([1.5, -2.0])}
    client.put(made, then_pull=True)
    client.push()
    client.pull([])
    ((payload, statistics, absent),) = came
    assert payload.keys() == sent.keys()
    assert all(torch.equal(payload[name], sent[name]) for name in sent)
    assert torch.equal(statistics["1.running_mean"], torch.tensor([1.5, -2.0]))
    assert absent == {"0.bias"}


def test_the_store_sees_what_a_codec_has_left(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig(codec="topk:0.3")
    client = one.client(0)
    incarnation, snapshot = client.join(), client.pull([])
    came: list[Any] = []
    push = one.store.push

    def looked_at(contribution: Contribution, now: float) -> Any:
        came.append(values(contribution.unpacked()))
        return push(contribution, now)

    monkeypatch.setattr(one.store, "push", looked_at)
    filled(one.outgoing(0), 1.0)
    codec, draw = one.job.codec, torch.Generator().manual_seed(0)
    packed = {n: codec.encode(v, draw) for n, v in values(one.outgoing(0)).items()}
    lease = client.lease()
    assert lease is not None
    made = one.contribution(0, incarnation, 0, snapshot.version, lease)
    made.packed = packed
    client.put(made, then_pull=True)
    client.push()
    client.pull([])
    assert all(torch.equal(came[0][name], codec.decode(packed[name])) for name in packed)


def test_a_pull_brings_exactly_one_version(rig: Make) -> None:
    one = rig()
    client = one.client(0)
    incarnation, snapshot = client.join(), client.pull([])
    for sequence in range(3):
        filled(one.outgoing(0), float(sequence + 1))
        snapshot = step(one, client, 0, incarnation, sequence, snapshot.version)
        assert snapshot.version == sequence + 1
        with one.lock:
            held = values(one.store.parameters.flats)
        shown = values(snapshot.parameters)
        assert all(torch.equal(shown[name], held[name]) for name in held)


def test_what_a_worker_writes_into_what_it_pulled_reaches_nobody(rig: Make) -> None:
    one = rig()
    if not one.copies:
        return  # here a worker is shown the store's own tensors, and copies them
    clients = [one.client(worker) for worker in range(2)]
    first = [(client.join(), client.pull([])) for client in clients]
    filled(first[0][1].parameters, 77.0)
    with one.lock:
        assert not any(bool((v == 77.0).any()) for v in values(one.store.parameters.flats).values())
    assert not any(bool((v == 77.0).any()) for v in values(first[1][1].parameters).values())


def test_a_buffer_is_free_when_the_answer_is_there(rig: Make) -> None:
    one = rig("soft:2")
    clients = [one.client(worker) for worker in range(2)]
    first = [(client.join(), client.pull([])) for client in clients]
    filled(one.outgoing(0), 1.0)
    lease = clients[0].lease()
    assert lease is not None
    clients[0].put(one.contribution(0, first[0][0], 0, 0, lease), then_pull=True)
    clients[0].push()
    clients[0].pull([])
    filled(one.outgoing(0), 1000.0)  # the next one, while the first still waits for another
    with one.lock:
        (waiting,) = one.store.gathered
        assert all(bool((v == 1.0).all()) for v in values(waiting.payload).values())


def test_what_one_says_and_hears_keeps_its_order(rig: Make) -> None:
    one = rig()
    client = one.client(0)
    incarnation, snapshot = client.join(), client.pull([])
    starts = []
    for sequence in range(6):
        lease = client.lease()
        assert lease is not None
        starts.append((lease.epoch, lease.start))
        client.put(one.contribution(0, incarnation, sequence, snapshot.version, lease), True)
        client.push()
        snapshot = client.pull([])
        assert snapshot.version == sequence + 1
    assert starts == sorted(starts)


# ---------------------------------------------------------------- ends


def test_the_end_of_a_link_is_noticed_by_the_server(rig: Make) -> None:
    one = rig()
    client = one.client(0)
    client.join()
    client.link.close()
    one.until(lambda: one.store.lost(0))
    with pytest.raises(StoreGone):
        client.link.send(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_of_a_run_is_heard_even_by_one_that_slept(rig: Make, finished: bool) -> None:
    one = rig()
    client = one.client(0)
    client.join()
    client.pull([])
    with one.lock:
        one.protocol.ended_by = 0 if finished else None
        one.server.dismiss()
        due = one.port.take()
    one.port.send(due)
    with pytest.raises(RunOver) as caught:
        client.pull([])
    assert isinstance(caught.value, RunStopped) is not finished


def test_a_goodbye_is_heard(rig: Make) -> None:
    one = rig()
    client = one.client(0)
    client.join()
    client.bye({"peak": 5.0})
    one.until(lambda: one.protocol.goodbyes.get(0) == {"peak": 5.0})


def test_one_who_comes_back_is_another_incarnation(rig: Make) -> None:
    one = rig()
    first = one.client(0)
    assert first.join() == 1
    first.link.close()
    one.until(lambda: one.store.lost(0))
    again = one.client(0)
    assert again.join() == 2
    assert again.pull([]).version == 0


# ---------------------------------------------------------------- faults


def test_a_push_that_comes_twice_is_applied_once(faulty: Make) -> None:
    one = faulty(faults=Faults(repeated=1.0))
    client = one.client(0)
    incarnation, snapshot = client.join(), client.pull([])
    for sequence in range(4):
        snapshot = step(one, client, 0, incarnation, sequence, snapshot.version)
    with one.lock:
        assert one.store.version == 4
        assert one.store.applied == 16


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("discipline", ["asp", "ssp:3", "soft:2"])
def test_whatever_is_lost_late_repeated_or_cut_every_sample_counts_once(
    faulty: Make, discipline: str, seed: int
) -> None:
    one = faulty(discipline, 2, Faults(late=0.2, repeated=0.2, lost=0.05, cut=0.05))
    one.links = 1000 * seed
    # Each has all its turn needs, so that one thread can be all workers.
    at: dict[int, Any] = {}
    for turn in range(10_000):
        with one.lock:
            if one.store.finished:
                break
        worker = turn % 2
        try:
            if worker not in at:
                client = one.client(worker)
                at[worker] = (client, client.join(), 0, client.pull([]).version)
            client, incarnation, sequence, base = at[worker]
            lease = client.lease()
            if lease is None:
                del at[worker]
                client.link.close()
                continue
            made = one.contribution(worker, incarnation, sequence, base, lease)
            client.put(made, then_pull=True)
            client.push()
            at[worker] = (client, incarnation, sequence + 1, client.pull([]).version)
        except StoreGone:
            at.pop(worker, None)
    with one.lock:
        assert one.store.finished
        for epoch in one.store.leases.ledger.summary():
            assert epoch["applied"] == 24
            assert epoch["repeated"] == epoch["missing"] == 0
    joins = sum(1 for _ in one.records.of(Joined))
    assert joins > 2
    assert sum(1 for _ in one.records.of(Lost)) >= joins - 2
