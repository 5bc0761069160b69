"""Which worker is which: what a store answers to those that have proved that they belong here."""

import hashlib
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from offbeat.engine.hosts.listener import SHORT, Listener, Security
from offbeat.engine.local.dispatch import Dispatcher, Listening
from offbeat.engine.local.server_process import Acceptor
from offbeat.log.log import Log
from offbeat.log.records import Linked
from offbeat.transport.frames import MOST
from offbeat.transport.handshake import (
    LONGEST,
    Answer,
    AskTerms,
    Attach,
    Echo,
    Echoed,
    Enter,
    Entered,
    Meet,
    NoSuchLink,
    NotYet,
    Requests,
    RunEnded,
    Terms,
    TurnedAway,
)
from offbeat.transport.tcp_port import TcpPort, WorkerLink

OFFENCES = 3  # links of one address that may end because a worker broke the rules


def plain(sketch: Mapping[str, Any]) -> dict[str, Any]:
    """A sketch as it comes over the network."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sketch), type=dict[str, Any])


def address_of(wire: socket.socket) -> str:
    """Of the machine at the other end, as far as this one knows; empty once it has gone."""
    try:
        return str(wire.getpeername()[0])
    except OSError:
        return ""


def hash_of(sketch: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(msgspec.json.encode(sketch, order="deterministic")).digest()


class LinkThreads:
    """A thread for each link, which tells a dispatcher what happens to it."""

    def __init__(self, dispatcher: Dispatcher, patience: float):
        self.dispatcher, self.patience = dispatcher, patience
        self.links: dict[int, WorkerLink] = {}
        self.open = True

    def connect(self, number: int, way: WorkerLink) -> None:
        before, self.links[number] = self.links.get(number), way
        way.begin(number, self.patience, self.dispatcher, before)

    def disconnect(self, number: int) -> None:
        self.links.pop(number).close()

    def connected(self, number: int, way: WorkerLink) -> bool:
        return self.open and self.links.get(number) is way

    def close(self) -> None:
        self.open = False
        for link in self.links.values():
            link.close()


def threads_of_links(patience: float, dispatcher: Dispatcher) -> Listening:
    """What listens to workers on other hosts."""
    return LinkThreads(dispatcher, patience)


@dataclass(frozen=True)
class Entrance:
    """Where workers come in, what they have to prove, and what they are told of the run."""

    listening: socket.socket
    security: Security
    settings: Mapping[str, Any]
    sketch: Mapping[str, Any]


class NetworkAcceptor(Acceptor):
    """Lets workers of other hosts in, and gives each a number."""

    def __init__(self, entrance: Entrance, port: TcpPort, log: Log, patience: float):
        self.port, self.log = port, log
        self.sketch = plain(entrance.sketch)
        self.settings = dict(entrance.settings)
        self.dispatcher: Dispatcher | None = None
        self.measured: dict[int, WorkerLink] = {}  # links of which not all is in the log yet
        self.addresses: dict[int, str] = {}  # that these come from
        self.offences: Counter[str] = Counter()  # by address, links that broke the rules
        self.time = 0.0  # of the run, when they were last looked at
        self.listener = Listener(entrance.listening, entrance.security, self._respond, patience)

    def open(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.listener.start()

    def look(self) -> None:
        """Record what links have measured, where it is time to."""
        assert self.dispatcher is not None
        server = self.dispatcher.server
        now = server.clock()
        self.time = server.protocol.run_time.at(now)
        for number, link in list(self.measured.items()):
            if self.port.way(number) is not link:
                self._forget(number)
            elif link.meter.is_due(now):
                self._record(number, link)

    def _forget(self, number: int) -> None:
        """The link of a worker is over; whether it broke the rules is kept."""
        link = self.measured.pop(number)
        self._record(number, link)
        self.offences[self.addresses.pop(number)] += link.misbehaved

    def _record(self, number: int, link: WorkerLink) -> None:
        frames = link.frames
        found = link.meter.take(self.time, number, frames.received, frames.sent)
        if found is not None:
            self.log.write(found)

    def close(self) -> None:
        self.listener.close()
        for number, link in self.measured.items():
            self._record(number, link)
        self.measured.clear()

    @property
    def refused(self) -> int:  # type: ignore[override]
        return self.listener.refused.total()

    # ------------------------------------------------------------ as the listener's thread

    def _respond(self, request: Requests, wire: socket.socket) -> Answer | None:
        if isinstance(request, AskTerms):
            return Terms(self.settings, self.sketch, time.time())
        if isinstance(request, Echo):
            return Echoed(bytes(max(0, min(request.wanted, LONGEST // 2))))
        if isinstance(request, Meet):
            return TurnedAway("a store listens here, and no worker")
        dispatcher = self.dispatcher
        assert dispatcher is not None
        while not dispatcher.lock.acquire(timeout=SHORT):
            if not self.listener.open:  # whoever closes it may have the lock
                return RunEnded()
        try:
            if isinstance(request, Attach):
                return self._attach(request, wire)
            return self._enter(dispatcher, request, wire)
        except Exception as error:
            dispatcher.fail(error)
            return RunEnded()
        finally:
            dispatcher.lock.release()

    def _attach(self, request: Attach, wire: socket.socket) -> Answer | None:
        link = self.port.named(request.link)
        fits = link is not None and 0 <= request.index < len(link.frames.connections)
        if link is None or link.ended or not fits or request.received < 0:
            return NoSuchLink()
        link.attach(request.index, wire, request.received)
        return None

    def _enter(self, dispatcher: Dispatcher, request: Enter, wire: socket.socket) -> Answer | None:
        protocol = dispatcher.server.protocol
        if request.difference or request.sketch != hash_of(self.sketch):
            different = request.difference or "they describe it differently"
            return TurnedAway(f"{request.host} runs another script than the store: {different}")
        if not 1 <= request.connections <= MOST:
            return TurnedAway("a link has one to four connections")
        address = address_of(wire)
        if self._barred(address):
            self.listener.refused["broke the rules"] += 1
            return TurnedAway(
                f"{OFFENCES} links from {address} have ended because a worker broke the rules: "
                "install the store's version of offbeat there, look for what changes bytes on the "
                "way, and start the store again"
            )
        same = self.port.numbered(request.link)
        if same is not None:
            return self._again(request, wire, *same)
        number = self._number(request, protocol.workers)
        if number is None and self._may_be_free_soon(request, protocol.workers):
            return NotYet()
        if number is None:
            return TurnedAway(
                f"worker {request.number} is there already"
                if request.insists
                else f"all {protocol.workers} places of this run are taken: start its store with a "
                "larger -n, or wait until a worker has left"
            )
        now = protocol.run_time.at(dispatcher.server.clock())
        self.log.write(
            Linked(now, number, request.host[:200], request.round_trip, request.connections)
        )
        link = self.port.link(number, request.link, request.connections, request.round_trip)
        if number in self.measured:
            self._forget(number)
        self.measured[number], self.addresses[number] = link, address
        dispatcher.connect(number, link)
        link.attach(0, wire, answer=Entered(number))
        return None

    def _again(
        self, request: Enter, wire: socket.socket, number: int, link: WorkerLink
    ) -> Answer | None:
        """It has been let in, and has not heard of it."""
        if link.ended or link.frames.came or request.connections != len(link.frames.connections):
            return TurnedAway("a link has a name of its own")
        link.attach(0, wire, answer=Entered(number))
        return None

    def _barred(self, address: str) -> bool:
        """Whether workers from there have broken the rules so often that they would go on so."""
        for number in [number for number, link in self.measured.items() if link.misbehaved]:
            self._forget(number)
        return self.offences[address] >= OFFENCES

    def _number(self, request: Enter, workers: int) -> int | None:
        """The place that a worker wants, or the first that nobody has, or has had."""
        wanted = request.number
        if request.instead and 0 <= wanted < workers:
            link = self.port.way(wanted)
            if link is None or link.abandoned:
                return wanted
        free = [number for number in range(workers) if not self._taken(number)]
        if wanted in free or request.insists:
            return wanted if wanted in free else None
        assert self.dispatcher is not None
        met = self.dispatcher.server.protocol.met
        return min(free, key=lambda number: (number in met, number), default=None)

    def _may_be_free_soon(self, request: Enter, workers: int) -> bool:
        """Whether a place is kept for one that is out of reach, and may be who asks now.

        Who comes instead of one that is gone waits until it is: whoever said so may be wrong.
        """
        if request.instead and request.insists and 0 <= request.number < workers:
            return True
        wanted = [request.number] if request.insists else range(workers)
        links = [self.port.way(number) for number in wanted]
        return any(link is not None and link.broken for link in links)

    def _taken(self, number: int) -> bool:
        """One that is out of reach keeps its place until it is given up."""
        link = self.port.way(number)
        if link is None or link.ended:
            return False
        assert self.dispatcher is not None
        protocol = self.dispatcher.server.protocol
        return not link.broken or number not in protocol.met or protocol.store.present(number)
