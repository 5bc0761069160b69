"""Flows that share links: shares worked out by hand, and what holds for any of them."""

import json
import math
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.engine.sim.network import Bounds, Trunk


def shares(capacity: float, branches: dict[int, tuple[Bounds, int]]) -> dict[int, float]:
    """Rates of the flows of some branches, each given with how many flows it has."""
    trunk = Trunk(capacity, [branches[number][0] for number in sorted(branches)])
    for number, (_, count) in branches.items():
        for index in range(count):
            trunk.begin(10 * number + index, number, 1000.0, 0.0)
    return trunk.rates()


# ---------------------------------------------------------------- by hand


def test_one_flow_gets_the_narrowest_of_its_links() -> None:
    assert shares(100.0, {0: (Bounds(30.0), 1)}) == {0: 30.0}
    assert shares(20.0, {0: (Bounds(30.0), 1)}) == {0: 20.0}
    assert shares(100.0, {0: (Bounds(30.0, 5.0), 1)}) == {0: 5.0}
    assert shares(math.inf, {0: (Bounds(math.inf, 5.0), 1)}) == {0: 5.0}


def test_the_flows_of_a_host_share_its_link() -> None:
    assert shares(math.inf, {0: (Bounds(30.0), 3)}) == {0: 10.0, 1: 10.0, 2: 10.0}


def test_three_hosts_share_the_link_of_the_store() -> None:
    each = {number: (Bounds(96.0), 1) for number in range(3)}
    assert shares(96.0, each) == {0: 32.0, 10: 32.0, 20: 32.0}


def test_what_one_cannot_use_the_others_get() -> None:
    # 10 and 2 x 12 are below the level, and the others have what is left: (100 - 34) / 2
    branches = {
        0: (Bounds(10.0), 1),
        1: (Bounds(math.inf), 1),
        2: (Bounds(24.0), 2),
        3: (Bounds(50.0), 1),
    }
    assert shares(100.0, branches) == {0: 10.0, 10: 33.0, 20: 12.0, 21: 12.0, 30: 33.0}


def test_a_window_leaves_room_for_others() -> None:
    branches = {0: (Bounds(100.0, 8.0), 2), 1: (Bounds(100.0), 1)}
    assert shares(100.0, branches) == {0: 8.0, 1: 8.0, 10: 84.0}


def test_times_when_flows_come_and_go() -> None:
    trunk = Trunk(16.0, [Bounds(16.0), Bounds(4.0)])
    trunk.begin(0, 0, 64.0, 0.0)
    assert trunk.next() == 4.0
    trunk.begin(1, 1, 8.0, 1.0)  # 48 bytes are left at 12 a second, and 8 at 4
    assert trunk.next() == 3.0
    assert trunk.over() == 1
    assert trunk.next() == 4.5  # 24 bytes are left at 16 a second
    assert trunk.over() == 0
    assert trunk.next() == math.inf


def test_a_cut_stops_a_flow_and_gives_its_share_to_the_others() -> None:
    trunk = Trunk(16.0, [Bounds(16.0), Bounds(16.0)])
    for name in (0, 1):
        trunk.begin(name, name, 64.0, 0.0)
    trunk.change(0, 2.0, share=1.0, cut=True)  # both have 48 bytes left
    assert trunk.rates() == {0: 0.0, 1: 16.0}
    trunk.change(0, 4.0, share=0.25, cut=False)  # one has 48 left, the other 16
    assert trunk.rates() == {0: 4.0, 1: 12.0}
    assert trunk.next() == 4.0 + 16 / 12
    assert trunk.over() == 1
    assert trunk.next() == pytest.approx(4.0 + 48 / 4)
    assert trunk.end(0, 0, 8.0) == pytest.approx(48 - 16)
    assert trunk.next() == math.inf


def test_nothing_takes_no_time_and_endless_links_neither() -> None:
    trunk = Trunk(math.inf, [Bounds(math.inf), Bounds(1.0)])
    trunk.begin(0, 0, 1e12, 3.0)
    trunk.begin(1, 1, 0.0, 3.0)
    assert trunk.next() == 3.0
    assert {trunk.over(), trunk.over()} == {0, 1}
    assert trunk.next() == math.inf


def test_equal_flows_are_over_in_the_order_of_their_branches() -> None:
    trunk = Trunk(7.0, [Bounds(3.0) for _ in range(5)])
    for number in (3, 1, 4, 0, 2):
        trunk.begin(number, number, 10.0, 0.0)
    ends = [(trunk.over(), trunk.now) for _ in range(5)]
    assert [name for name, _ in ends] == [0, 1, 2, 3, 4]
    assert [at for _, at in ends] == pytest.approx([50 / 7] * 5, rel=1e-15)


# ---------------------------------------------------------------- whatever the links

RATES = st.sampled_from([1.0, 2.5, 3.0, 7.0, 10.0, 33.3, 1e4, math.inf])


class Drawn(NamedTuple):
    capacity: float
    bounds: list[Bounds]


@st.composite
def trees(draw: st.DrawFn) -> Drawn:
    count = draw(st.integers(1, 6))
    bounds = [Bounds(draw(RATES), draw(RATES)) for _ in range(count)]
    return Drawn(draw(RATES), bounds)


class Step(NamedTuple):
    """Something happens to a branch: a flow begins or is broken off, or its link changes."""

    what: str
    branch: int
    wait: float
    nbytes: float


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["begin", "begin", "begin", "end", "cut", "heal", "half"]),
        st.integers(0, 5),
        st.sampled_from([0.0, 0.0, 0.5, 1.7, 30.0]),
        st.sampled_from([0.0, 1.0, 8.0, 50.0, 1e3]),
    ),
    min_size=1,
    max_size=40,
)


def link_of(trunk: Trunk, number: int) -> float:
    branch = trunk.branches[number]
    return 0.0 if branch.cut else branch.bounds.link * branch.share


def exact(rate: float) -> Fraction | float:
    return rate if math.isinf(rate) else Fraction(rate)


def filled(trunk: Trunk, capacity: float) -> dict[int, float]:
    """Max-min shares by the book: all flows grow alike, until a link of theirs is full."""
    branch_of = {
        flow.name: number for number, one in enumerate(trunk.branches) for flow in one.flows
    }
    links: list[tuple[Fraction | float, set[int]]] = [(exact(capacity), set(branch_of))]
    for number, one in enumerate(trunk.branches):
        mine = {flow.name for flow in one.flows}
        links.append((exact(link_of(trunk, number)), mine))
        links += [(exact(one.bounds.flow), {name}) for name in mine]
    rates: dict[int, Fraction | float] = {}
    while growing := branch_of.keys() - rates.keys():
        level, full = math.inf, set()
        for room, names in links:
            more = names & growing
            if not more or math.isinf(room):
                continue
            each = (room - sum(rates[name] for name in names - more)) / len(more)
            if each < level:
                level, full = each, set()
            if each == level:
                full |= more
        rates |= dict.fromkeys(full or growing, level)
    return {name: float(rate) for name, rate in rates.items()}


def check_rates(trunk: Trunk, capacity: float) -> None:
    """No link carries more than it can, and every flow has a link that is full because of it."""
    rates = trunk.rates()
    assert rates == pytest.approx(filled(trunk, capacity), rel=1e-6, abs=1e-6)
    whole = sum(rates.values())
    assert whole <= capacity * (1 + 1e-9) + 1e-6
    fastest = max(rates.values(), default=0.0)
    for number, branch in enumerate(trunk.branches):
        mine = [rates[flow.name] for flow in branch.flows]
        link = link_of(trunk, number)
        assert sum(mine) <= link * (1 + 1e-9) + 1e-6
        for rate in mine:
            assert rate <= branch.bounds.flow
            assert (
                math.isclose(rate, branch.bounds.flow, rel_tol=1e-6)
                or (sum(mine) >= link * (1 - 1e-6) - 1e-6 and rate >= max(mine) * (1 - 1e-9))
                or (whole >= capacity * (1 - 1e-6) - 1e-6 and rate >= fastest * (1 - 1e-6))
            )


class Network:
    """A trunk under test, with the bytes of every flow added up from its rates."""

    def __init__(self, drawn: Drawn):
        self.capacity = drawn.capacity
        self.trunk = Trunk(drawn.capacity, drawn.bounds)
        self.now = 0.0
        self.asked: dict[int, float] = {}
        self.moved: dict[int, float] = {}
        self.where: dict[int, int] = {}
        self.ends: list[tuple[int, float]] = []

    def to(self, now: float) -> None:
        """Let time pass, and flows be over."""
        while (at := self.trunk.next()) <= now:
            self.flow(at)
            name = self.trunk.over()
            self.ends.append((name, at))
            del self.where[name]
            assert self.moved.pop(name) == pytest.approx(self.asked[name], rel=1e-6, abs=1e-6)
            check_rates(self.trunk, self.capacity)
        self.flow(now)

    def flow(self, now: float) -> None:
        assert now >= self.now
        if now > self.now:
            for name, rate in self.trunk.rates().items():
                self.moved[name] += rate * (now - self.now)
        else:  # endless rates take no time
            for name, rate in self.trunk.rates().items():
                if math.isinf(rate):
                    self.moved[name] = self.asked[name]
        self.now = now

    def apply(self, name: int, step: Step) -> None:
        branch = step.branch % len(self.trunk.branches)
        self.to(self.now + step.wait)
        if step.what == "begin":
            self.asked[name], self.moved[name], self.where[name] = step.nbytes, 0.0, branch
            self.trunk.begin(name, branch, step.nbytes, self.now)
        elif step.what == "end":
            mine = [one for one, place in self.where.items() if place == branch]
            if mine:
                left = self.trunk.end(mine[0], branch, self.now)
                del self.where[mine[0]]
                moved = self.moved.pop(mine[0])
                if not math.isinf(self.trunk.branches[branch].bounds.link):
                    assert left + moved == pytest.approx(self.asked[mine[0]], rel=1e-6, abs=1e-6)
        else:
            cut = step.what == "cut"
            share = 0.5 if step.what == "half" else 1.0
            self.trunk.change(branch, self.now, share=share, cut=cut)
        check_rates(self.trunk, self.capacity)


@given(drawn=trees(), steps=STEPS)
def test_fair_at_every_moment_and_no_byte_too_many(drawn: Drawn, steps: list[Step]) -> None:
    network = Network(drawn)
    for name, step in enumerate(steps):
        network.apply(name, step)
    for number in range(len(drawn.bounds)):
        network.trunk.change(number, network.now, share=1.0, cut=False)
    network.to(network.now + 1e6)
    assert not network.where  # all are over


@given(drawn=trees(), steps=STEPS, at=st.integers(0, 39))
def test_one_that_is_written_down_goes_on_to_the_bit(
    drawn: Drawn, steps: list[Step], at: int
) -> None:
    one, other = Network(drawn), Network(drawn)
    for name, step in enumerate(steps):
        one.apply(name, step)
        other.apply(name, step)
        if name == at:
            saved = json.loads(json.dumps(other.trunk.meta()))
            other.trunk = Trunk(drawn.capacity, drawn.bounds)
            other.trunk.load_meta(saved)
    for network in (one, other):
        for number in range(len(drawn.bounds)):
            network.trunk.change(number, network.now, share=1.0, cut=False)
        network.to(network.now + 1e6)
    assert one.ends == other.ends


def test_thousands_of_changes_leave_nothing_behind() -> None:
    trunk = Trunk(1e3, [Bounds(10.0 + number) for number in range(50)])
    for name in range(5000):
        trunk.begin(name, name % 50, 7.0 + name % 3, trunk.now)
        if name >= 200:
            trunk.over()
    while trunk.next() < math.inf:
        trunk.over()
    assert (trunk.taken, trunk.open, trunk.clock) == (0, 0, 0.0)
    most = 4 * len(trunk.branches) + 64
    for heap in (trunk.above, trunk.below, trunk.times, trunk.clocks):
        assert len(heap) <= most + 1
