"""Who has no token and comes all the same: `python -m benchmarks.network.attackers HOST PORT`.

A thousand connections that say nothing are made again as they are ended, one sends a byte now and
then, and one after the other sends garbage, half a greeting, a wrong proof, or what another one
has said.
"""

import os
import selectors
import socket
import sys
import time
from contextlib import suppress
from itertools import cycle

from offbeat.transport.handshake import HELLO, MAGIC, NUMBER, Introduction

READY = "attacking"  # is said when they are all there
IDLE = 1000  # connections that say nothing
AGAIN = 20  # of those that were ended, made again at a time
PAUSE = 0.02  # seconds until the next that says something, and until some are made again
SLOW = 0.5  # seconds between two bytes


def connect(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_connection((host, port), 1.0)
    except OSError:
        return None


def garbage() -> list[bytes]:
    """What somebody may say who does not know the token."""
    wrong = Introduction(b"a token that was guessed")
    proof = wrong.hear(MAGIC + os.urandom(NUMBER))
    assert proof is not None
    hello = MAGIC + os.urandom(NUMBER)
    return [
        os.urandom(HELLO * 100),
        hello[: HELLO // 2],
        hello + proof[NUMBER:],
        hello + bytes(NUMBER) + b"\xff" * 64,
        b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + os.urandom(200),
    ]


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    idle: list[socket.socket] = []
    watch = selectors.DefaultSelector()
    words = cycle(garbage())
    slow, slow_at = connect(host, port), 0.0

    def fill(most: int) -> None:
        for _ in range(min(most, IDLE - len(idle))):
            if (wire := connect(host, port)) is not None:
                idle.append(wire)
                watch.register(wire, selectors.EVENT_READ)

    fill(IDLE)
    print(READY, flush=True)
    while True:
        fill(AGAIN)
        wire = connect(host, port)
        if wire is not None:
            with wire, suppress(OSError):
                wire.sendall(next(words))
        if time.monotonic() > slow_at:
            slow_at = time.monotonic() + SLOW
            try:
                assert slow is not None
                slow.sendall(MAGIC[:1])
            except (AssertionError, OSError):
                slow = connect(host, port)
        for key, _ in watch.select(0):  # it was ended by the other side
            gone = key.fileobj
            assert isinstance(gone, socket.socket)
            watch.unregister(gone)
            idle.remove(gone)
            gone.close()
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
