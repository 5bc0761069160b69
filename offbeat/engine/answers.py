"""What the server says: put down while it has the floor, sent when others may have it.

Whoever is sent something wakes, and may push the sender aside. Nobody should have to wait for one
who was pushed aside with the floor in its hands.
"""

import socket
import threading
from collections import deque


class Answers:
    """Packets for each worker, that leave in the order in which they were put here."""

    def __init__(self, workers: int):
        self.unsent: list[deque[tuple[socket.socket, bytes]]] = [deque() for _ in range(workers)]
        self.sending = [threading.Lock() for _ in range(workers)]
        self.due: list[int] = []  # for whom something has been put here

    def put(self, number: int, wire: socket.socket, packet: bytes) -> None:
        """As one who has the floor."""
        self.unsent[number].append((wire, packet))
        self.due.append(number)

    def take(self) -> list[int]:
        """As one who has the floor and leaves it: whom to send something then."""
        due, self.due = self.due, []
        return due

    def send(self, due: list[int], last: int | None = None) -> None:
        """Send what they are due, `last` after the others: it runs where this thread runs."""
        if last in due and len(due) > 1:
            due = [number for number in due if number != last] + [last]
        for number in due:
            unsent = self.unsent[number]
            with self.sending[number]:  # so that no second packet overtakes the first
                while unsent:
                    wire, packet = unsent.popleft()
                    try:
                        wire.send(packet)
                    except OSError:
                        continue  # its death shows when its wire is read
