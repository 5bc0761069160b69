"""A wire between two network namespaces on which every frame takes its time.

    python delay.py NAMESPACE DEVICE NAMESPACE DEVICE SECONDS

It makes both devices, says `ready`, and carries frames until it is killed. Not every kernel has
netem, which would do the same; this needs /dev/net/tun alone. Segmentation is left to the devices
as on a virtual machine, so that one read brings up to 64 kB and Python is fast enough.
"""

import ctypes
import errno
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_PROTOCOL, OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, and segments of TCP over IPv4 and IPv6
NEW_NETWORK = 0x40000000
LARGEST = 1 << 17  # bytes of a frame, with its header
MOST = 1 << 25  # bytes under way in one direction; what is more is lost, as on a real wire
AT_ONCE = 64  # frames read before looking at the clock again

_system = ctypes.CDLL(None, use_errno=True)


class Direction:
    """Frames on their way from one device to the other."""

    def __init__(self, source: int, target: int, seconds: float):
        self.source, self.target, self.seconds = source, target, seconds
        self.frames: deque[tuple[float, bytes]] = deque()
        self.nbytes = self.lost = 0

    def read(self) -> None:
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self.source, LARGEST)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EIO:  # the device is down
                    return
                raise
            if self.nbytes + len(frame) > MOST:
                self.lost += 1
                continue
            self.nbytes += len(frame)
            self.frames.append((time.monotonic() + self.seconds, frame))

    def deliver(self, now: float) -> None:
        """All that has been under way for long enough."""
        while self.frames and self.frames[0][0] <= now:
            _, frame = self.frames.popleft()
            self.nbytes -= len(frame)
            try:
                os.write(self.target, frame)
            except OSError:  # it is down, or has no room: a frame is lost
                self.lost += 1

    @property
    def due(self) -> float | None:
        return self.frames[0][0] if self.frames else None


def device(namespace: str, name: str) -> int:
    """Make one in a namespace, into which this process goes."""
    inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if _system.setns(inside, NEW_NETWORK):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    finally:
        os.close(inside)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = TAP | NO_PROTOCOL | OFFLOAD_HEADER
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, TUNSETOFFLOAD, OFFLOADS)
    return tap


def carry(one: int, other: int, seconds: float) -> None:
    """For ever."""
    ways = {one: Direction(one, other, seconds), other: Direction(other, one, seconds)}
    while True:
        due = [way.due for way in ways.values() if way.due is not None]
        left = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select(list(ways), [], [], left)
        for source in ready:
            ways[source].read()
        now = time.monotonic()
        for way in ways.values():
            way.deliver(now)


def main() -> None:
    here, mine, there, theirs, seconds = sys.argv[1:]
    # It stays where the last one is: at the switch, where nobody kills it with the host.
    other, one = device(there, theirs), device(here, mine)
    print("ready", flush=True)
    carry(one, other, float(seconds))


if __name__ == "__main__":
    main()
