"""Any link with faults: messages that are late, repeated or lost, and links that are cut.

A link keeps order, and delivers or ends. So a message that is lost is a link that ends before it,
and the worker does not know whether it got through. Only pushes are ever sent twice: the store
knows them by their sequence numbers. What different workers say may overtake each other, because a
late message holds up its own link alone.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.protocol.messages import Go, Push, ToStore, ToWorker
from offbeat.transport.link import Link, StoreGone
from offbeat.worker.contribution import Contribution, Snapshot


@dataclass(frozen=True)
class Faults:
    """How likely each fault is, at every message that a worker sends."""

    late: float = 0.0
    repeated: float = 0.0  # of pushes
    lost: float = 0.0
    cut: float = 0.0  # right after a message has got through
    seconds: float = 0.0  # that a late one takes at the most


class FaultyLink:
    """A link behind which faults happen by a seed; `sleep` lets time pass, real or not."""

    def __init__(self, link: Link, faults: Faults, seed: int, sleep: Callable[[float], None]):
        self.link, self.faults, self.sleep = link, faults, sleep
        self.chance = random.Random(seed)
        self.ended = False

    @property
    def came(self) -> float:
        return self.link.came

    def prepare(self, push: Push, contribution: Contribution) -> None:
        self.link.prepare(push, contribution)

    def push(self) -> None:
        self._deliver(self.link.push)
        if self._happens(self.faults.repeated):
            self.link.push()

    def send(self, message: ToStore) -> None:
        self._deliver(lambda: self.link.send(message))

    def _deliver(self, send: Callable[[], None]) -> None:
        if self.ended:
            raise StoreGone
        if self._happens(self.faults.late):
            self.sleep(self.chance.random() * self.faults.seconds)
        if self._happens(self.faults.lost):
            self.close()
            raise StoreGone
        send()
        if self._happens(self.faults.cut):
            self.close()

    def _happens(self, chance: float) -> bool:
        return bool(chance) and self.chance.random() < chance

    def receive(self) -> ToWorker:
        if self.ended:
            raise StoreGone
        return self.link.receive()

    def snapshot(self, go: Go) -> Snapshot:
        return self.link.snapshot(go)

    def close(self) -> None:
        self.ended = True
        self.link.close()
