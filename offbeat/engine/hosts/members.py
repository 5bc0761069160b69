"""Where the other workers of a run reach this one, while they add up among themselves."""

import socket

from offbeat.engine.hosts.listener import Listener, Security, listen
from offbeat.protocol.messages import StartRound
from offbeat.transport.dial import Address
from offbeat.transport.handshake import Answer, Meet, Requests, TurnedAway
from offbeat.transport.tcp_group import Meeting, TcpGroup
from offbeat.transport.tls import store_context


class Members:
    """A listener at the address from which this worker reaches its store, and at no other.

    It asks of whoever comes what a store asks, and hands members of a group on to it.
    """

    def __init__(self, token: bytes, encrypts: bool, patience: float):
        self.patience = patience
        self.meeting = Meeting(token, encrypts, patience)
        self.security = Security(token, *store_context(None)) if encrypts else Security(token)
        self.host = ""
        self.listening: socket.socket | None = None
        self.listener: Listener | None = None

    def place(self, host: str) -> str:
        """Where this worker listens, at this address of its machine."""
        if self.listening is None or host != self.host:
            self._stop()
            self.host, self.listening = host, listen(Address(host, 0))
            self.listener = Listener(self.listening, self.security, self._respond, self.patience)
            self.listener.start()
        return str(Address(host, self.listening.getsockname()[1]))

    def _respond(self, request: Requests, wire: socket.socket) -> Answer | None:
        if isinstance(request, Meet):
            self.meeting.arrivals.put(request, wire)
            return None
        return TurnedAway("a worker listens here, and no store")

    def group(self, start: StartRound, me: int) -> TcpGroup:
        """The group that adds up a round."""
        return self.meeting.group(start, me)

    def close(self) -> None:
        """Nobody reaches this worker any more."""
        self._stop()
        self.meeting.arrivals.close()

    def _stop(self) -> None:
        if self.listener is not None and self.listening is not None:
            self.listener.close()
            self.listening.close()
        self.listener = self.listening = None
