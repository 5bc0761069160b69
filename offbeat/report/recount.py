"""The ledger of a run as its log alone gives it."""

from collections.abc import Sequence

from offbeat.data.lease import Lease


class Recount:
    """Of every sample: applied once, repeated, dropped or skipped.

    Work and memory grow with the log and not with the dataset, which may only be claimed.
    """

    def __init__(self, samples: int, epochs: int, left_out: int = 0):
        self.samples, self.epochs, self.left_out = samples, epochs, left_out
        self.done: list[dict[str, int]] = []
        self.open: dict[int, dict[tuple[int, int], int]] = {}  # how often each range was applied
        self.lost: dict[int, dict[str, int]] = {}
        self.settled: dict[int, int] = {}

    def settle(self, leases: Sequence[Lease], outcome: str) -> None:
        for epoch, start, stop in leases:
            if not (0 <= epoch < self.epochs and 0 <= start < stop <= self.samples):
                raise ValueError(
                    f"tells of samples {start} to {stop} of epoch {epoch}, and run.json of "
                    f"{self.samples} samples and {self.epochs} epochs"
                )
            ranges = self.open.get(epoch)
            if ranges is None:
                ranges = self.open[epoch] = {}
                self.lost[epoch] = {"dropped": 0, "skipped": 0}
                self.settled[epoch] = 0
            if outcome == "applied":
                ranges[start, stop] = ranges.get((start, stop), 0) + 1
            else:
                self.lost[epoch][outcome] += stop - start
            self.settled[epoch] += stop - start
            while self.settled.get(len(self.done), 0) >= self.samples:
                closing = len(self.done)
                self.done.append(self._counts(closing))
                del self.open[closing], self.lost[closing], self.settled[closing]

    def _counts(self, epoch: int) -> dict[str, int]:
        edges: dict[int, int] = {}
        for (start, stop), times in self.open[epoch].items():
            edges[start] = edges.get(start, 0) + times
            edges[stop] = edges.get(stop, 0) - times
        once = more = depth = before = 0
        for position in sorted(edges):
            once += position - before if depth == 1 else 0
            more += position - before if depth > 1 else 0
            depth, before = depth + edges[position], position
        lost = self.lost[epoch]
        missing = self.samples - once - more - sum(lost.values())
        return {"applied": once, "repeated": more, "missing": missing, **lost}

    def counts(self) -> list[dict[str, int]]:
        """Of every epoch that has begun."""
        counts = self.done + [self._counts(epoch) for epoch in sorted(self.open)]
        return [one | {"left_out": self.left_out} for one in counts] if self.left_out else counts
