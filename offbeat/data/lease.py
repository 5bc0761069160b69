"""Which samples a worker trains on: leases hand them out, the ledger says what became of each."""

from collections import deque
from collections.abc import Iterable, Sequence, Set
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from offbeat.data.shares import LeaseSizes
from offbeat.errors import ConfigError


class Lease(NamedTuple):
    """A range of one epoch's shuffled order, given to one worker at a time."""

    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


class Ledger:
    """Of every sample of every epoch: applied once, dropped, skipped or repeated."""

    def __init__(self, samples: int, left_out: int = 0):
        """`left_out` are samples of each epoch that make no whole batch, beside `samples`."""
        self.samples, self.left_out = samples, left_out
        self.done: list[dict[str, int]] = []  # counts of finished epochs, in order
        self.open: dict[int, dict[tuple[int, int], int]] = {}  # times applied, per range
        self.lost: dict[int, dict[str, int]] = {}  # dropped and skipped, per open epoch
        self.applied = 0  # samples in applied contributions, all epochs
        self._settled: dict[int, int] = {}

    def settle(self, leases: Sequence[Lease], outcome: str) -> list[int]:
        """Record what became of `leases`; returns the epochs that this completes."""
        full = False
        for epoch, start, stop in leases:
            if epoch not in self.open:
                self.open[epoch] = {}
                self.lost[epoch] = {"dropped": 0, "skipped": 0}
                self._settled[epoch] = 0
            samples = stop - start
            if outcome == "applied":
                ranges, mine = self.open[epoch], (start, stop)
                ranges[mine] = ranges.get(mine, 0) + 1
                self.applied += samples
            else:
                self.lost[epoch][outcome] += samples
            settled = self._settled[epoch] + samples
            self._settled[epoch] = settled
            full |= settled >= self.samples
        closed: list[int] = []
        # Epochs close in order, so that "epoch 3 is done" also says that 0 to 2 are.
        while full and self._settled.get(len(self.done), 0) >= self.samples:
            closed.append(self._close(len(self.done)))
        return closed

    def _close(self, epoch: int) -> int:
        self.done.append(self._counts(epoch))
        del self.open[epoch], self.lost[epoch], self._settled[epoch]
        return epoch

    def _counts(self, epoch: int) -> dict[str, int]:
        if self._once(epoch):  # the common case, without a look at every sample
            return {"applied": self.samples, "repeated": 0, "missing": 0, **self.lost[epoch]}
        times = self.times(epoch)
        return {
            "applied": int(np.count_nonzero(times == 1)),
            "repeated": int(np.count_nonzero(times > 1)),
            "missing": int(np.count_nonzero(times == 0)) - sum(self.lost[epoch].values()),
            **self.lost[epoch],
        }

    def _once(self, epoch: int) -> bool:
        """Whether the ranges of an open epoch follow each other from first sample to last."""
        reached = 0
        for (start, stop), count in sorted(self.open[epoch].items()):
            if start != reached or count != 1:
                return False
            reached = stop
        return reached == self.samples

    def times(self, epoch: int) -> np.ndarray[Any, Any]:
        """How often each sample of an open epoch has been applied."""
        times = np.zeros(self.samples, dtype=np.uint8)
        for (start, stop), count in self.open[epoch].items():
            times[start:stop] += count
        return times

    def summary(self) -> list[dict[str, int]]:
        """Counts of every epoch that has begun."""
        counts = self.done + [self._counts(epoch) for epoch in sorted(self.open)]
        return [one | {"left_out": self.left_out} for one in counts] if self.left_out else counts

    def state(self) -> dict[str, Any]:
        runs = {str(epoch): _runs(self.times(epoch)) for epoch in self.open}
        return {
            "done": self.done,
            "applied": self.applied,
            "open": runs,
            "lost": {str(epoch): counts for epoch, counts in self.lost.items()},
            "settled": {str(epoch): count for epoch, count in self._settled.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        self.done, self.applied = list(state["done"]), state["applied"]
        self.open = {int(epoch): _from_runs(runs) for epoch, runs in state["open"].items()}
        self.lost = {int(epoch): dict(counts) for epoch, counts in state["lost"].items()}
        self._settled = {int(epoch): count for epoch, count in state["settled"].items()}


def _runs(times: np.ndarray[Any, Any]) -> list[list[int]]:
    """Run-length form [length, value] of an epoch, short because leases are ranges."""
    edges = np.flatnonzero(np.diff(times)) + 1
    bounds = [0, *edges.tolist(), len(times)]
    return [[stop - start, int(times[start])] for start, stop in pairwise(bounds) if stop > start]


def _from_runs(runs: list[list[int]]) -> dict[tuple[int, int], int]:
    stops = accumulate(length for length, _ in runs)
    return {
        (stop - length, stop): count
        for stop, (length, count) in zip(stops, runs, strict=True)
        if count
    }


class Leases:
    """Hands out the samples of all epochs, one lease at a time; those of the lost go out again."""

    def __init__(
        self,
        samples: int,
        batch: int,
        epochs: int,
        left_out: int = 0,
        sizes: LeaseSizes | None = None,
    ):
        """`sizes` says how many samples a worker gets at a time, if not `batch` always."""
        if samples < 1:
            raise ConfigError("the dataset is empty: there is nothing to train on")
        if batch < 1 or epochs < 1:
            raise ConfigError(f"batch_size and epochs must be at least 1, not {batch} and {epochs}")
        if batch > samples:
            raise ConfigError(
                f"a batch of {batch} is larger than the dataset of {samples} samples: "
                f"use batch_size={samples} or less"
            )
        self.batch, self.epochs = batch, epochs
        self._batches = -(-samples // batch)  # of an epoch
        self.sizes = LeaseSizes(batch) if sizes is None else sizes
        self.ledger = Ledger(samples, left_out)
        self.held: dict[int, list[Lease]] = {}
        self.returned: deque[Lease] = deque()
        self.epoch, self.position = 0, 0

    @property
    def finished(self) -> bool:
        """Every sample of every epoch has been dealt with."""
        return len(self.ledger.done) == self.epochs

    def progress(self, settled: int) -> int:
        """Batches that a plain loop has done when it is through with so many samples."""
        return self._batches * settled // self.ledger.samples

    @property
    def exhausted(self) -> bool:
        """Nothing to hand out now; what is held by others may still come back."""
        return not self.returned and self.epoch >= self.epochs

    def issue(self, worker: int) -> Lease | None:
        """The next samples for `worker`, or None when there are none now."""
        if self.returned:
            lease = self._returned(worker)
        elif self.epoch < self.epochs:
            lease = self._fresh(worker)
        else:
            return None
        self.held.setdefault(worker, []).append(lease)
        return lease

    def _fresh(self, worker: int) -> Lease:
        start, sizes = self.position, self.sizes
        size, there = sizes.of(worker), self.ledger.samples - start
        if there - size < sizes.least:  # near the end of an epoch
            size = self._part(size, there)
        stop = start + size
        lease = Lease(self.epoch, start, stop)
        self._go_to(stop)
        return lease

    def _returned(self, worker: int) -> Lease:
        """The next one that has come back; of one that is too large for `worker`, a part."""
        lease = self.returned.popleft()
        size = self._part(self.sizes.of(worker), lease.samples)
        if size < lease.samples:
            self.returned.appendleft(lease._replace(start=lease.start + size))
        return lease._replace(stop=lease.start + size)

    def _part(self, size: int, there: int) -> int:
        """How many of `there` samples in a row go out, so that not too few are left behind."""
        least = self.sizes.least
        if size >= there or there - size >= least:
            return min(size, there)
        return there - least if there >= 2 * least else there

    def _go_to(self, stop: int) -> None:
        self.position = stop
        if stop == self.ledger.samples:
            self.epoch, self.position = self.epoch + 1, 0

    def recover(self, settled: Set[Lease]) -> None:
        """Nobody holds anything: all that was handed out and is not `settled` goes out again.

        How far the handing out had come is known from what has been settled. In which pieces the
        rest had gone out is not, so it is cut into batches.
        """
        out = {*self.returned, *(lease for held in self.held.values() for lease in held)}
        furthest = max(((lease.epoch, lease.stop) for lease in settled), default=(0, 0))
        while (self.epoch, self.position) < furthest:
            stop = furthest[1] if self.epoch == furthest[0] else self.ledger.samples
            out.add(Lease(self.epoch, self.position, stop))
            self._go_to(stop)
        self.held.clear()
        self.returned.clear()
        for epoch, start, stop in remaining(out, settled):
            while start < stop:
                size = self._part(self.batch, stop - start)
                self.returned.append(Lease(epoch, start, start + size))
                start += size

    def settle(self, worker: int, leases: Sequence[Lease], outcome: str) -> list[int]:
        """`worker`'s leases ended as `outcome`; returns the epochs that this completes."""
        self.hand_in(worker, leases)
        return self.ledger.settle(leases, outcome)

    def hand_in(self, worker: int, leases: Sequence[Lease]) -> None:
        """An admitted contribution answers for `leases` from now on, no longer `worker`."""
        held = self.held.get(worker)
        if held == leases:  # the common case: all it holds
            self.held[worker] = []
        elif held:
            self.held[worker] = [lease for lease in held if lease not in leases]

    def give_back(self, worker: int, leases: Sequence[Lease]) -> None:
        """`worker` computed these in vain: they are issued again, before anything new."""
        self.hand_in(worker, leases)
        self.returned.extend(leases)

    def reclaim(self, worker: int) -> list[Lease]:
        """Take back what a lost worker held, to be issued before anything new."""
        self.sizes.forget(worker)
        leases = self.held.pop(worker, [])
        self.returned.extend(leases)
        return leases

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "held": {str(worker): leases for worker, leases in self.held.items() if leases},
            "returned": list(self.returned),
            "ledger": self.ledger.state(),
            **({"sizes": learnt} if (learnt := self.sizes.state()) else {}),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self.held = {
            int(worker): [Lease(*lease) for lease in leases]
            for worker, leases in state["held"].items()
        }
        self.returned = deque(Lease(*lease) for lease in state["returned"])
        self.ledger.load(state["ledger"])
        if "sizes" in state:
            self.sizes.load(state["sizes"])


def remaining(leases: Iterable[Lease], settled: Iterable[Lease]) -> list[Lease]:
    """The samples of `leases` that are not `settled`, in ranges as long as can be, in order."""
    edges: dict[tuple[int, int], int] = {}
    for sign, several in ((1, leases), (-1, settled)):
        for epoch, start, stop in several:
            edges[epoch, start] = edges.get((epoch, start), 0) + sign
            edges[epoch, stop] = edges.get((epoch, stop), 0) - sign
    found: list[Lease] = []
    depth, since = 0, 0
    for epoch, place in sorted(edges):
        before, depth = depth, depth + edges[epoch, place]
        if before <= 0 < depth:
            since = place
        elif depth <= 0 < before:
            found.append(Lease(epoch, since, place))
    return found
