"""Flows that share links fairly: how fast each one is, and when it is over.

Everything goes between a host and the store, so the links of one direction are a trunk (the
store's) with branches (the hosts'). Max-min fairness on such a tree is one water level: each flow
of a branch gets the least of its own limit (an even part of the branch, or what its window lets
through) and the level, and the level is what fills the trunk.

All flows of a branch get the same, and so do all flows that only the trunk limits. So there is one
clock for these, which counts the bytes that each of them has got, and one for each other branch.
When something changes, only the branches whose limit the level has passed are looked at, and no
flow is.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

# Bytes a second are added up as whole numbers of this part of one: sums are exact, whatever was
# added and taken away before, so a run that goes on from a checkpoint has the same ones.
_PART = 1 << 30


class Bounds(NamedTuple):
    """What a branch can take, in bytes a second: all of its flows together, and each of them."""

    link: float
    flow: float = math.inf


class HeapEntry(NamedTuple):
    """A branch in a heap; void if the branch has been moved since."""

    key: float
    branch: int
    move: int


class Flow(NamedTuple):
    """A flow is over when its branch has given `mark` bytes to each; equal ones go in order."""

    mark: float
    order: int
    name: int


class Branch:
    """One host's link in one direction, and the flows over it."""

    __slots__ = (
        *("at", "bounds", "cut", "flows", "limit", "move"),
        *("open", "placed", "served", "share", "taken"),
    )

    def __init__(self, bounds: Bounds):
        self.bounds, self.share, self.cut = bounds, 1.0, False
        self.flows: list[Flow] = []  # a heap
        self.served = 0.0  # bytes that each flow had got `at` a time, or at the trunk's clock
        self.at = 0.0
        self.placed = self.open = False  # `open` if only the trunk limits it
        self.limit = 0.0  # of each flow
        self.taken = 0  # of the trunk
        self.move = 0

    def bound(self) -> None:
        """How fast its flows can be, as many as there are."""
        link, flow = self.bounds
        link = 0.0 if self.cut or not self.share else link * self.share
        self.limit = min(link / len(self.flows), flow)
        whole = min(link, len(self.flows) * flow)
        self.taken = 0 if math.isinf(whole) else _parts(whole)

    @property
    def left(self) -> float:
        """Bytes until its next flow is over, counted from `served`."""
        return max(0.0, self.flows[0].mark - self.served)


class Trunk:
    """All flows of one direction."""

    def __init__(self, capacity: float, branches: Sequence[Bounds]):
        self.endless = math.isinf(capacity)
        self.capacity = 0 if self.endless else _parts(capacity)
        self.branches = [Branch(bounds) for bounds in branches]
        self.now = 0.0
        self.level = math.inf  # bytes a second of each flow that only the trunk limits
        self.clock = 0.0  # bytes that each of those has got
        self.taken = 0  # by the branches below the level
        self.open = 0  # flows of the others
        self.begun = 0
        self.changed: set[int] = set()  # branches whose place has to be found again
        self.below: list[HeapEntry] = []  # branches below the level, the highest limit first
        self.above: list[HeapEntry] = []  # those above it, the lowest limit first
        self.times: list[HeapEntry] = []  # when the next flow of a branch below is over
        self.clocks: list[HeapEntry] = []  # at which clock that of one above is
        self._next: float | None = None

    # ------------------------------------------------------------ what happens

    def begin(self, name: int, branch: int, nbytes: float, now: float) -> None:
        """A flow begins."""
        self._to(now)
        self._take_out(branch)
        one = self.branches[branch]
        heappush(one.flows, Flow(one.served + nbytes, self.begun, name))
        self.begun += 1

    def end(self, name: int, branch: int, now: float) -> float:
        """A flow is broken off; returns the bytes that it had yet to move."""
        self._to(now)
        self._take_out(branch)
        one = self.branches[branch]
        flow = next(flow for flow in one.flows if flow.name == name)
        left = max(0.0, flow.mark - one.served)
        one.flows.remove(flow)
        heapify(one.flows)
        self._rest(one)
        return left

    def change(self, branch: int, now: float, *, share: float, cut: bool) -> None:
        """A branch has another share of its bandwidth from now on, or nothing gets through."""
        self._to(now)
        self._take_out(branch)
        one = self.branches[branch]
        one.share, one.cut = share, cut

    def next(self) -> float:
        """When the next flow is over, if nothing changes before; infinite if none is."""
        if self._next is None:
            self._settle()
            at = self.times[0].key if self._top(self.times) else math.inf
            if self._top(self.clocks) and self.level > 0:
                left = max(0.0, self.clocks[0].key - self.clock)
                at = min(at, self.now + left / self.level)
            self._next = at
        return self._next

    def over(self) -> int:
        """The flow that is over next; its time is now."""
        now = self.next()
        self._to(now)
        if self._top(self.times) and self.times[0].key <= now:
            branch = self.times[0].branch
        else:
            branch = self.clocks[0].branch
            self.clock = max(self.clock, self.clocks[0].key)  # not short of it by a rounding
        self._take_out(branch)
        one = self.branches[branch]
        one.served = max(one.served, one.flows[0].mark)
        name = heappop(one.flows).name
        self._rest(one)
        return name

    def rates(self) -> dict[int, float]:
        """Bytes a second of each flow, by its name."""
        self._settle()
        return {
            flow.name: self.level if branch.open else branch.limit
            for branch in self.branches
            for flow in branch.flows
        }

    # ------------------------------------------------------------ the water level

    def _to(self, now: float) -> None:
        """Time passes."""
        if now > self.now:
            self._settle()
            if self.open:
                self.clock += self.level * (now - self.now)
            self.now = now

    def _take_out(self, number: int) -> None:
        """A branch changes: what its flows have got by now, and its place is open."""
        self.changed.add(number)
        self._next = None
        branch = self.branches[number]
        if not branch.placed:
            return
        branch.placed = False
        branch.move += 1
        if branch.open:
            branch.served += self.clock - branch.at
            self.open -= len(branch.flows)
        else:
            if self.now > branch.at:
                branch.served += branch.limit * (self.now - branch.at)
            self.taken -= branch.taken

    def _rest(self, branch: Branch) -> None:
        """A branch without flows counts from zero again, so that its numbers stay small."""
        if not branch.flows:
            branch.served = branch.at = 0.0
            branch.open = False

    def _settle(self) -> None:
        """Find the places of what has changed, and the level."""
        if not self.changed:
            return
        for number in self.changed:
            branch = self.branches[number]
            if branch.flows:
                branch.bound()
                endless = math.isinf(branch.limit) and not self.endless
                self._put(number, above=endless or branch.limit > self.level)
        self.changed.clear()
        # Either way the level rises, so what goes below it stays there.
        while self._top(self.below) and -self.below[0].key > self._filled():
            self._move(self.below[0].branch, above=True)
        while self._top(self.above) and self.above[0].key <= self._filled():
            self._move(self.above[0].branch, above=False)
        self.level = self._filled()
        if not self.open:
            self.clock = 0.0

    def _filled(self) -> float:
        """The level at which the trunk is full."""
        if self.endless:
            return math.inf
        if not self.open:
            return math.inf if self.taken <= self.capacity else 0.0
        return max(0, self.capacity - self.taken) / (self.open * _PART)

    def _move(self, number: int, above: bool) -> None:
        self._take_out(number)
        self.changed.discard(number)
        self._put(number, above)

    def _put(self, number: int, above: bool, at: float | None = None) -> None:
        """Put a branch above or below the level, where it has been since `at`."""
        branch = self.branches[number]
        branch.placed, branch.open = True, above
        if above:
            branch.at = self.clock if at is None else at
            self.open += len(branch.flows)
            self._push(self.above, branch.limit, number)
            self._push(self.clocks, branch.at + branch.left, number)
            return
        branch.at = self.now if at is None else at
        self.taken += branch.taken
        self._push(self.below, -branch.limit, number)
        if branch.limit > 0:
            self._push(self.times, branch.at + branch.left / branch.limit, number)

    def _push(self, heap: list[HeapEntry], key: float, number: int) -> None:
        if len(heap) > 4 * len(self.branches) + 64:
            heap[:] = [entry for entry in heap if self._counts(entry)]
            heapify(heap)
        heappush(heap, HeapEntry(key, number, self.branches[number].move))

    def _counts(self, entry: HeapEntry) -> bool:
        branch = self.branches[entry.branch]
        return branch.placed and entry.move == branch.move

    def _top(self, heap: list[HeapEntry]) -> bool:
        """Whether there is anything in a heap; what is void on top of it goes."""
        while heap and not self._counts(heap[0]):
            heappop(heap)
        return bool(heap)

    # ------------------------------------------------------------ state

    def meta(self) -> dict[str, Any]:
        """What `load_meta` goes on from, to the bit."""
        self._settle()
        return {
            "now": self.now,
            "clock": self.clock,
            "begun": self.begun,
            "branches": {
                str(number): {
                    "share": branch.share,
                    "cut": branch.cut,
                    "open": branch.open,
                    "served": branch.served,
                    "at": branch.at,
                    "flows": sorted(branch.flows),
                }
                for number, branch in enumerate(self.branches)
                if branch.flows or branch.cut or branch.share != 1
            },
        }

    def load_meta(self, meta: dict[str, Any]) -> None:
        self.now, self.clock, self.begun = meta["now"], meta["clock"], meta["begun"]
        for key, saved in meta["branches"].items():
            number = int(key)
            branch = self.branches[number]
            branch.share, branch.cut = saved["share"], saved["cut"]
            branch.flows = [Flow(*flow) for flow in saved["flows"]]
            if not branch.flows:
                continue
            branch.served = saved["served"]
            branch.bound()
            self._put(number, saved["open"], saved["at"])
        self.level = self._filled()


def _parts(rate: float) -> int:
    """A rate as a whole number."""
    numerator, denominator = rate.as_integer_ratio()
    return numerator * _PART // denominator
