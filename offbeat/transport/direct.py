"""Link and port within one process: what is said is dealt with at once, and nothing is copied."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from offbeat.errors import RunError
from offbeat.protocol.messages import Go, Message, Push, ToStore, ToWorker
from offbeat.transport.link import Received, StoreGone
from offbeat.worker.contribution import Contribution, Snapshot


class DirectPort:
    """The server's end: two queues for each worker."""

    def __init__(self, workers: int):
        self.said: list[deque[Received]] = [deque() for _ in range(workers)]
        self.answers: list[deque[tuple[Any, Snapshot]]] = [deque() for _ in range(workers)]
        self.due: list[int] = []
        self.closed: set[int] = set()

    def receive(self, worker: int) -> Received | None:
        if not self.said[worker]:
            if worker in self.closed:
                return None
            raise BlockingIOError
        return self.said[worker].popleft()

    def spoken(self, worker: int) -> bool:
        return bool(self.said[worker])

    def put(self, worker: int, message: Message, snapshot: Any) -> None:
        if worker not in self.closed:
            self.answers[worker].append((message, snapshot))
            self.due.append(worker)

    def take(self) -> list[int]:
        due, self.due = self.due, []
        return due

    def send(self, workers: list[int], last: int | None = None) -> None:
        """What is put can be taken from the queue at once."""

    def connect(self, worker: int) -> None:
        """A new link takes the place of one that has ended."""
        self.closed.discard(worker)
        self.said[worker].clear()
        self.answers[worker].clear()

    def disconnect(self, worker: int) -> None:
        self.closed.add(worker)


class DirectLink:
    """A worker's end; `hear` has the server deal with what lies in the worker's queue."""

    def __init__(self, port: DirectPort, worker: int, hear: Callable[[int], None]):
        self.port, self.worker, self.hear = port, worker, hear
        self.came = 0.0
        self.prepared: Received | None = None
        self.pulled: Snapshot | None = None  # what came with the last message

    def prepare(self, push: Push, contribution: Contribution) -> None:
        self.prepared = Received(push, contribution)

    def push(self) -> None:
        assert self.prepared is not None
        self._say(self.prepared)

    def send(self, message: ToStore) -> None:
        self._say(Received(message))

    def _say(self, what: Received) -> None:
        if self.worker in self.port.closed:
            raise StoreGone
        self.port.said[self.worker].append(what)
        self.hear(self.worker)

    def receive(self) -> ToWorker:
        self.came = time.perf_counter()
        answers = self.port.answers[self.worker]
        if answers:
            message, self.pulled = answers.popleft()
            return message  # type: ignore[no-any-return]
        if self.worker in self.port.closed:
            raise StoreGone
        # Nobody else is here who could make it come.
        raise RunError(f"worker {self.worker} waits for an answer that nobody will give")

    def snapshot(self, go: Go) -> Snapshot:
        assert self.pulled is not None
        return self.pulled

    def close(self) -> None:
        if self.worker not in self.port.closed:
            self.port.disconnect(self.worker)
            self.hear(self.worker)
