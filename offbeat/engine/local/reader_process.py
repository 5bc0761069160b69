"""Reader processes: forked by a worker, they read its batches ahead and hand them over in memory.

What they send is pickled, as PyTorch's own readers do it: it comes from a fork of the process that
reads it, over a pair of sockets that nobody else has.
"""

import mmap
import os
import socket
import struct
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data._utils import worker as torch_worker

from offbeat.config.job import Job
from offbeat.config.run_config import Local
from offbeat.data.lease import Lease
from offbeat.data.prefetch import AHEAD, Prefetcher, Read, worth_it
from offbeat.data.random_state import RandomState
from offbeat.data.reader import Reader, mix
from offbeat.data.stream import StreamReader
from offbeat.engine.local.process import fork, startable
from offbeat.errors import RunError

ASKED = struct.Struct("<qqq")  # epoch, start and stop of a lease
LENGTH = struct.Struct("<I")
ALIGNED = 64  # bytes, for tensors in what is handed over
INLINE = 1 << 16  # bytes that go through the socket; more lie in memory that both have


class Head(msgspec.Struct, array_like=True):
    """What is said of a batch before it: the sizes of its parts, or what went wrong."""

    sizes: list[int] = []
    wrong: str = ""
    trace: str = ""


# ---------------------------------------------------------------- a batch as bytes


class _Packer(ForkingPickler):
    """Leaves the numbers of tensors and arrays where they are; `parts` has them afterwards."""

    def __init__(self, into: BytesIO):
        self.parts: list[memoryview] = []
        super().__init__(into, 5, True, lambda part: self.parts.append(part.raw()))

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not plain or value.device.type != "cpu" or value.is_quantized:
            return NotImplemented
        order = sorted(range(value.dim()), key=value.stride, reverse=True)  # as it lies in memory
        lying = value.detach().resolve_conj().resolve_neg().permute(order)
        array = lying.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (array, value.dtype, tuple(lying.shape), order)


def _tensor(
    array: "np.ndarray[Any, Any]", kind: torch.dtype, shape: tuple[int, ...], order: list[int]
) -> Tensor:
    lying = torch.from_numpy(array).view(kind).view(shape)
    return lying.permute([order.index(dimension) for dimension in range(len(order))])


def _places(sizes: Sequence[int]) -> list[int]:
    """Where each of several parts begins; the last number is where all end."""
    return list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))


def send(wire: socket.socket, value: Any) -> None:
    """Hand `value` over to the process at the other end of `wire`."""
    text = BytesIO()
    packer = _Packer(text)
    packer.dump(value)
    parts = [text.getbuffer(), *packer.parts]
    sizes = [part.nbytes for part in parts]
    *places, end = _places(sizes)
    if end <= INLINE:
        _say(wire, Head(sizes))
        for part, size in zip(parts, sizes, strict=True):
            wire.sendall(part)
            wire.sendall(bytes(-size % ALIGNED))
        return
    memory = os.memfd_create("offbeat batch")  # without a name that could stay behind
    try:
        os.ftruncate(memory, end)
        for part, place in zip(parts, places, strict=True):
            done = 0
            while done < part.nbytes:
                done += os.pwrite(memory, part[done:], place + done)
        _say(wire, Head(sizes), memory)
    finally:
        os.close(memory)


def receive(wire: socket.socket) -> Any:
    """What the process at the other end of `wire` has sent; EOFError if it is gone."""
    first, handles, _, _ = socket.recv_fds(wire, LENGTH.size, 1)
    try:
        first += _exactly(wire, LENGTH.size - len(first))
        head = msgspec.msgpack.decode(_exactly(wire, LENGTH.unpack(first)[0]), type=Head)
        if head.wrong:
            raise RunError(f"{head.wrong}\n\nIn the reader process:\n{head.trace}")
        *places, end = _places(head.sizes)
        if handles:
            whole = memoryview(mmap.mmap(handles[0], end, mmap.MAP_SHARED | mmap.MAP_POPULATE))
        else:
            whole = memoryview(_exactly(wire, end))
    finally:
        for handle in handles:
            os.close(handle)
    found = [whole[at : at + size] for at, size in zip(places, head.sizes, strict=True)]
    return ForkingPickler.loads(found[0], buffers=found[1:])


def _say(wire: socket.socket, head: Head, *handles: int) -> None:
    told = msgspec.msgpack.encode(head)
    socket.send_fds(wire, [LENGTH.pack(len(told))], handles)
    wire.sendall(told)


def _exactly(wire: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    view = memoryview(found)
    while len(view):
        got = wire.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return found


# ---------------------------------------------------------------- the processes


class ReaderProcess:
    """One of `count` readers of a worker, seen from there; it ends with the worker, or before."""

    def __init__(self, reader: Reader, number: int, count: int):
        self.number = number
        self.ending = threading.Lock()
        self.wire, theirs = socket.socketpair()
        with theirs, startable("a reader process"):
            main = partial(_serve, theirs, reader, number, count)
            self.child = fork("offbeat reader", main, torch.get_num_threads())

    def ask(self, lease: Lease) -> None:
        """Read this after all that was asked before."""
        with suppress(ConnectionError):  # whoever takes the batch is told that it is gone
            self.wire.sendall(ASKED.pack(*lease))

    def take(self, lease: Lease) -> Read:
        """Its batch, and where its reading has left the generators."""
        try:
            batch, chance = receive(self.wire)
        except (EOFError, ConnectionError):
            with self.ending:
                words = self.child.reap()
            if words is not None:
                raise RunError(words.message) from None
            raise RunError(
                f"reader process {self.number} ended with status {self.child.status} while it "
                f"read samples {lease.start} to {lease.stop - 1}: is there memory enough? "
                "num_workers=0 reads in the worker itself"
            ) from None
        return Read(batch, chance)

    def close(self) -> None:
        """End it, whatever it is reading."""
        with self.ending:
            self.child.kill()
            self.child.reap()
        self.wire.close()


def _serve(wire: socket.socket, reader: Reader, number: int, count: int) -> None:
    """Read what is asked for, from generators that are seeded as a worker seeds its own."""
    seed = mix(reader.seed, 6, number) & 0xFFFFFFFF
    told: Any = torch_worker.WorkerInfo(number, count, seed, reader.dataset)
    torch_worker._worker_info = told  # for what a user's own code asks of get_worker_info
    begun = reader.reading.begin is None
    with suppress(EOFError, ConnectionError):
        while True:
            lease = Lease(*ASKED.unpack(_exactly(wire, ASKED.size)))
            try:
                if not begun and reader.reading.begin is not None:
                    reader.reading.begin(number)
                    begun = True
                reader.reseed(lease)
                batch = reader.read(lease)
                send(wire, (batch, RandomState()))
            except ConnectionError:
                raise
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
                _say(wire, Head([], wrong, traceback.format_exc()))


# ---------------------------------------------------------------- what a worker reads with


def processes(job: Job, local: Local | None) -> int:
    """Reader processes of each worker."""
    numbers = job.content
    if numbers.accumulate > 1 or numbers.cut is not None:
        return 0  # a step reads in parts, or each process of a replica for itself
    if local is not None and local.prefetch is False:
        return 0
    found = numbers.reader.reading.processes
    # A stream is read forward, from its beginning: one reads it for a worker.
    return min(1, found) if isinstance(numbers.reader, StreamReader) else found


def leases_ahead(job: Job, local: Local | None) -> int:
    """How many batches a worker reads ahead."""
    numbers = job.content
    count = processes(job, local)
    if count:
        return count * numbers.reader.reading.depth
    if local is None or numbers.accumulate > 1:
        return 0
    asked = worth_it(numbers.reader) if local.prefetch is None else local.prefetch
    return AHEAD if asked else 0


def prefetcher(job: Job, local: Local | None) -> Prefetcher | None:
    """What reads ahead in this process, if anything does; its readers are forked here."""
    if not leases_ahead(job, local):
        return None
    reader, count = job.content.reader, processes(job, local)
    return Prefetcher(reader, [ReaderProcess(reader, number, count) for number in range(count)])
