"""Threads that read batches before they are asked for, into a queue with few places."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from offbeat.data.lease import Lease
from offbeat.data.random_state import RandomState, undisturbed
from offbeat.data.reader import Reader
from offbeat.data.stream import StreamReader
from offbeat.errors import ConfigError, RunError

DRAWS = (
    "the dataset draws random numbers, which must come in the order of the steps: leave prefetch "
    "out, or draw in the model"
)


AHEAD = 2  # batches that a reader thread reads ahead


class Read(NamedTuple):
    """A batch, and where its reading has left the generators, if that was done elsewhere."""

    batch: Any
    chance: RandomState | None = None


class Source(Protocol):
    """Something that reads batches elsewhere: a process that has generators of its own."""

    def ask(self, lease: Lease) -> None:
        """Read this after all that was asked before."""

    def take(self, lease: Lease) -> Read:
        """Wait for the batch of `lease`, the first that was asked for and not yet taken."""

    def close(self) -> None:
        """End it."""


class _Lane:
    """A source, and the leases that its thread waits for."""

    def __init__(self, source: Source):
        self.source = source
        self.told: SimpleQueue[Lease | None] = SimpleQueue()
        self.outstanding = 0


class Prefetcher(Reader):
    """Reads what it is told of, in that order; `read` takes it from the queue.

    The queue is bounded by what it is told of: a worker holds only so many leases ahead. Without
    `sources` it reads here, in a thread; otherwise each of them has one that waits for it. What
    comes from a source leaves the generators as if it had been read here: who reads, and how many,
    changes nothing that is drawn.
    """

    def __init__(self, reader: Reader, sources: Sequence[Source] = ()):
        super().__init__(
            reader.dataset, reader.seed, reader.shuffle, reader.collate, reader.reading
        )
        self.plain = reader
        self.lanes = [_Lane(source) for source in sources or [_Here(self)]]
        self.batches: dict[Lease, Read | Exception] = {}
        self.came = threading.Condition()
        self.expected: set[Lease] = set()
        self.awaited: Lease | None = None  # until it is there, only the reader does anything
        self.busy = self.waited = 0.0  # seconds spent reading, and seconds a step had to wait
        self.depths = self.takes = 0
        for lane in self.lanes:
            work = partial(self._work, lane)
            threading.Thread(target=work, name="offbeat reader", daemon=True).start()

    def announce(self, lease: Lease) -> None:
        """This one will be asked for."""
        self.expected.add(lease)
        with self.came:
            lane = min(self.lanes, key=attrgetter("outstanding"))
            lane.outstanding += 1
        # Told at once, so that it need not wait for its thread here between two batches.
        lane.source.ask(lease)
        lane.told.put(lease)

    def forget(self) -> None:
        """Nothing that was announced will be asked for any more."""
        with self.came:
            self.expected.clear()
            self.batches.clear()

    def read(self, lease: Lease, part: slice = slice(None)) -> Any:
        if part != slice(None) or lease not in self.expected:
            return self.plain.read(lease, part)
        start = time.perf_counter()
        with self.came:
            self.depths += len(self.batches)
            self.takes += 1
            while lease not in self.batches:
                self.awaited = lease
                self.came.wait()
            self.expected.discard(lease)
            found = self.batches.pop(lease)
        self.waited += time.perf_counter() - start
        if isinstance(found, Exception):
            raise found
        if found.chance is not None:
            found.chance.recall()
        return found.batch

    def close(self) -> None:
        """Read nothing more."""
        for lane in self.lanes:
            lane.told.put(None)
            lane.source.close()

    def _work(self, lane: _Lane) -> None:
        while (lease := lane.told.get()) is not None:
            start = time.perf_counter()
            found: Read | Exception
            try:
                found = lane.source.take(lease)
            except Exception as error:  # raised where the batch is asked for
                found = error
            with self.came:
                lane.outstanding -= 1
                self.busy += time.perf_counter() - start
                if lease in self.expected:
                    self.batches[lease] = found
                    self.came.notify()
                if lease == self.awaited:
                    self.awaited = None

    def _read(self, lease: Lease) -> Any:
        """Whoever reads ahead has said that nothing is drawn; where it can be seen, it is."""
        with self.came:
            alone = self.awaited is not None
        if not alone:
            return self.plain.read(lease)
        batch, drawn = _draws(lambda: self.plain.read(lease))
        if drawn:
            raise RunError(f"batches are read ahead, but {DRAWS}")
        return batch

    def figures(self) -> dict[str, float]:
        """How full the queue was, and which share of reading was hidden behind computing."""
        if not self.takes:
            return {}
        hidden = 1 - min(1.0, self.waited / self.busy) if self.busy else 1.0
        return {"input_queue": self.depths / self.takes, "reading_hidden": hidden}


class _Here:
    """Reads in the thread that asks."""

    def __init__(self, ahead: Prefetcher):
        self.ahead = ahead

    def ask(self, lease: Lease) -> None:
        """There is time enough for that later."""

    def take(self, lease: Lease) -> Read:
        if lease not in self.ahead.expected:
            return Read(None)  # nobody wants it any more
        return Read(self.ahead._read(lease))

    def close(self) -> None:
        """The thread ends by itself."""


def worth_it(reader: Reader) -> bool:
    """Whether reading ahead pays, and can change nothing.

    Generators belong to a whole process. Samples that are drawn while a step computes would race
    with whatever the step draws, and no run could be repeated. One look does not tell: a dataset
    may draw for some samples only. So unasked it is done for data that cannot draw at all.
    Tensors in memory are indexed faster than a thread is woken.
    """
    return not isinstance(reader.dataset, TensorDataset) and cannot_draw(reader)


def cannot_draw(reader: Reader) -> bool:
    """Whether batches are made without any code of the user's, and so without chance."""
    order = reader.reading.order
    known = reader.collate is None and (order is None or order.quiet)
    return known and _cannot_draw(reader.dataset)


def _cannot_draw(data: Any) -> bool:
    """Whether data is made of tensors, lists and PyTorch's own ways to put these together."""
    if type(data) in (TensorDataset, list, tuple):
        return True
    if type(data) is Subset:
        return _cannot_draw(data.dataset)
    if type(data) is ConcatDataset:
        return all(_cannot_draw(one) for one in data.datasets)
    if type(data) is StackDataset:
        inside: Any = data.datasets
        return all(map(_cannot_draw, inside.values() if isinstance(inside, dict) else inside))
    return False


def check(reader: Reader, batch: int) -> None:
    """Refuse to read ahead, although it was asked for, where the first batch draws."""
    if isinstance(reader, StreamReader):
        raise ConfigError(
            "prefetch=True reads in a thread, and a stream has generators of its own: pass "
            "DataLoader(stream, num_workers=1), which reads ahead in a process"
        )
    order = reader.reading.order
    if order is not None and not order.quiet:
        raise ConfigError(
            f"prefetch=True reads in a thread, and {order} draws from the generators of the whole "
            "process: leave prefetch out, or pass DataLoader(..., num_workers=1), which reads "
            "ahead in a process"
        )
    with undisturbed():
        if _draws(lambda: reader.read(Lease(0, 0, min(batch, len(reader)))))[1]:
            raise ConfigError(f"prefetch=True, but {DRAWS}")


def _draws(read: Callable[[], Any]) -> tuple[Any, bool]:
    """What was read, and whether a generator has moved meanwhile."""
    before = RandomState()
    found = read()
    return found, RandomState() != before
