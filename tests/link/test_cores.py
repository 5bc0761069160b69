"""Where workers and their hearers run: nobody stays on a core that another one needs."""

import numpy as np
import pytest

from offbeat.link import cores
from offbeat.link.cores import NOWHERE, Cores


class Machine:
    """Some cores, and a thread that runs on one of them."""

    def __init__(self, allowed, core):
        self.allowed, self.core = set(allowed), core
        self.moves = []

    def sched_getaffinity(self, thread):
        return set(self.allowed)

    def allow(self, thread, size, mask):
        bits = int.from_bytes(mask, "little")
        allowed = {core for core in range(8 * size) if bits >> core & 1}
        if self.core not in allowed:
            self.core = min(allowed)
        self.moves.append(allowed)


@pytest.fixture
def machine(monkeypatch):
    def make(allowed, core):
        made = Machine(allowed, core)
        monkeypatch.setattr(cores, "os", made)
        monkeypatch.setattr(cores, "here", lambda: made.core)
        monkeypatch.setattr(cores, "_allow", made.allow)
        return made

    return make


def at(*where):
    return Cores(np.array(where))


def test_a_worker_says_where_it_is_and_stays_if_it_is_alone_there(machine):
    m, found = machine({0, 1}, 1), at(0, NOWHERE)
    found.settle(1)
    assert found.cells.tolist() == [0, 1]
    assert m.moves == []


def test_of_two_workers_on_one_core_the_later_goes_to_a_free_one(machine):
    m, found = machine({0, 1, 2}, 0), at(0, 1, 0)
    found.settle(2)
    assert m.core == 2
    assert m.moves == [{2}, {0, 1, 2}]  # it may be moved again at any time
    m.core = 0
    found.settle(0)
    assert m.core == 0


def test_a_worker_that_was_put_beside_another_leaves_at_once_though_it_is_the_earlier(machine):
    m, found = machine({0, 1}, 0), at(NOWHERE, 1)
    found.settle(0)
    m.core = 1
    found.settle(0)
    assert m.core == 0


def test_two_that_have_left_one_core_together_do_not_go_on_doing_so(machine):
    cells = np.array([NOWHERE, NOWHERE])
    one, other = Cores(cells), Cores(cells)
    m = machine({0, 1}, 0)
    cells[:] = 0
    for number, worker in enumerate((one, other)):  # both were put on core 0, both leave
        m.core = 0
        cells[1 - number] = 0
        worker.settle(number)
        assert m.core == 1
    before = len(m.moves)
    one.settle(0)  # both are on core 1 now
    other.settle(1)
    assert len(m.moves) == before


def test_a_spare_core_is_one_without_a_worker_or_the_present_one(machine):
    machine({0, 1, 2}, 0)
    assert at(0, 1).spare() == 2
    assert at(NOWHERE, NOWHERE).spare() == 2
    assert at(0, 1, 2).spare() == 0


def test_where_no_core_is_free_everybody_stays(machine):
    m, found = machine({0, 1}, 0), at(0, 1, 0)
    found.settle(2)
    assert m.moves == []


def test_a_core_that_this_process_may_not_use_is_not_free(machine):
    m, found = machine({0}, 0), at(0, 0)
    found.settle(1)
    assert m.moves == []


def test_one_who_hears_leaves_another_workers_core_for_its_own_workers(machine):
    m, found = machine({0, 1}, 1), at(0, 1)
    found.follow(0)
    assert m.core == 0


@pytest.mark.parametrize("where", [(1, 0), (0, 2), (NOWHERE, 1), (0, 1, 1)])
def test_one_who_hears_stays_where_it_is_in_nobodys_way(machine, where):
    m, found = machine({0, 1, 2}, 1), at(*where)
    found.follow(0)
    assert m.moves == []


def test_here_is_a_core_of_this_process():
    assert cores.here() in cores.os.sched_getaffinity(0)


def test_a_thread_that_moves_is_there_and_may_go_on_to_all_its_cores():
    before = cores.os.sched_getaffinity(0)
    for core in before:
        cores.move(core)
        assert cores.os.sched_getaffinity(0) == before


def test_a_worker_looks_around_once_in_a_while_and_whenever_it_was_moved(machine):
    m, found = machine({0, 1}, 1), at(0, NOWHERE)
    found.settle(1)
    found.cells[0] = 1  # another one has come here since
    for _ in range(cores.LOOK - 1):
        found.settle(1)
    assert m.moves == []
    found.settle(1)
    assert m.core == 0
    found.settle(1)
    assert found.cells.tolist() == [1, 0]  # where it is now is told at once


@pytest.mark.parametrize(
    ("home", "allowed", "core", "then"),
    [(1, {0, 1}, 1, 0), (1, {0, 1}, 0, 0), (NOWHERE, {0, 1}, 1, 1), (1, {1}, 1, 1)],
    ids=["beside all", "elsewhere", "no such core", "no other core"],
)
def test_one_who_has_time_leaves_the_core_where_all_are_heard(machine, home, allowed, core, then):
    m, found = machine(allowed, core), at(0, 1)
    found.home[0] = home
    found.stand_aside()
    assert m.core == then
    assert m.moves == ([] if core == then else [{then}, allowed])  # and may be moved again
