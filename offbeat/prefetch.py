"""A thread that reads batches before they are asked for, into a queue with few places."""

import random
import threading
import time
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from offbeat.data import Reader
from offbeat.lease import Lease


class Prefetcher(Reader):
    """Reads what it is told of, in that order; `read` takes it from the queue.

    The queue is bounded by what it is told of: a worker holds only so many leases ahead.
    """

    def __init__(self, reader: Reader):
        super().__init__(reader.dataset, reader.seed, reader.shuffle, reader.collate)
        self.told: SimpleQueue[Lease] = SimpleQueue()
        self.batches: dict[Lease, Any] = {}
        self.came = threading.Condition()
        self.expected: set[Lease] = set()
        self.reading = self.waited = 0.0  # seconds spent reading, and seconds a step had to wait
        self.depths = self.takes = 0
        threading.Thread(target=self._work, name="offbeat reader", daemon=True).start()

    def announce(self, lease: Lease) -> None:
        """This one will be asked for."""
        self.expected.add(lease)
        self.told.put(lease)

    def forget(self) -> None:
        """Nothing that was announced will be asked for any more."""
        with self.came:
            self.expected.clear()
            self.batches.clear()

    def read(self, lease: Lease, part: slice = slice(None)) -> Any:
        if part != slice(None) or lease not in self.expected:
            return super().read(lease, part)
        start = time.perf_counter()
        with self.came:
            self.depths += len(self.batches)
            self.takes += 1
            while lease not in self.batches:
                self.came.wait()
            self.expected.discard(lease)
            batch = self.batches.pop(lease)
        self.waited += time.perf_counter() - start
        if isinstance(batch, Exception):
            raise batch
        return batch

    def _work(self) -> None:
        while True:
            lease = self.told.get()
            if lease not in self.expected:
                continue
            start = time.perf_counter()
            try:
                batch = super().read(lease)
            except Exception as error:  # raised where the batch is asked for
                batch = error
            self.reading += time.perf_counter() - start
            with self.came:
                if lease in self.expected:
                    self.batches[lease] = batch
                    self.came.notify()

    def figures(self) -> dict[str, float]:
        """How full the queue was, and which share of reading was hidden behind computing."""
        if not self.takes:
            return {}
        hidden = 1 - min(1.0, self.waited / self.reading) if self.reading else 1.0
        return {"input_queue": self.depths / self.takes, "reading_hidden": hidden}


def worth_it(reader: Reader, batch: int) -> bool:
    """Whether reading ahead in a thread pays, and changes nothing.

    Tensors in memory are indexed faster than a thread is woken; and a dataset that draws random
    numbers must draw them in the order of the steps, or no run could be repeated.
    """
    if isinstance(reader.dataset, TensorDataset) and reader.collate is None:
        return False
    before = _random_state()
    reader.read(Lease(0, 0, min(batch, len(reader))))
    return before == _random_state()


def _random_state() -> tuple[bytes, str, tuple[Any, ...]]:
    numbers: Any = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        f"{numbers[1].tolist()} {numbers[2:]}",
        random.getstate(),
    )
