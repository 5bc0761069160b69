"""Where workers and their receivers run: nobody stays on a core that another one needs."""

import numpy as np
import pytest

from offbeat.engine.local import cpu
from offbeat.engine.local.cpu import ATTENTION, NOWHERE, CpuPolicy, PlacedCpu


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
        monkeypatch.setattr(cpu, "os", made)
        monkeypatch.setattr(cpu, "here", lambda: made.core)
        monkeypatch.setattr(cpu, "_allow", made.allow)
        return made

    return make


def at(*where):
    return PlacedCpu(np.array(where))


def test_a_worker_says_where_it_is_and_stays_if_it_is_alone_there(machine):
    m, found = machine({0, 1}, 1), at(0, NOWHERE)
    found.worker(1).step_begins()
    assert found.cells.tolist() == [0, 1]
    assert m.moves == []


def test_of_two_workers_on_one_core_the_later_goes_to_a_free_one(machine):
    m, found = machine({0, 1, 2}, 0), at(0, 1, 0)
    found.worker(2).step_begins()
    assert m.core == 2
    assert m.moves == [{2}, {0, 1, 2}]  # it may be moved again at any time
    m.core = 0
    found.worker(0).step_begins()
    assert m.core == 0


def test_a_worker_that_was_put_beside_another_leaves_at_once_though_it_is_the_earlier(machine):
    m, worker = machine({0, 1}, 0), at(NOWHERE, 1).worker(0)
    worker.step_begins()
    m.core = 1
    worker.step_begins()
    assert m.core == 0


def test_two_that_have_left_one_core_together_do_not_go_on_doing_so(machine):
    cells = np.array([NOWHERE, NOWHERE])
    one, other = PlacedCpu(cells).worker(0), PlacedCpu(cells).worker(1)
    m = machine({0, 1}, 0)
    cells[:] = 0
    for number, worker in enumerate((one, other)):  # both were put on core 0, both leave
        m.core = 0
        cells[1 - number] = 0
        worker.step_begins()
        assert m.core == 1
    before = len(m.moves)
    one.step_begins()  # both are on core 1 now
    other.step_begins()
    assert len(m.moves) == before


def test_where_no_core_is_free_everybody_stays(machine):
    m, found = machine({0, 1}, 0), at(0, 1, 0)
    found.worker(2).step_begins()
    assert m.moves == []


def test_a_core_that_this_process_may_not_use_is_not_free(machine):
    m, found = machine({0}, 0), at(0, 0)
    found.worker(1).step_begins()
    assert m.moves == []


def test_a_receiver_leaves_another_workers_core_for_its_own_workers(machine):
    m, found = machine({0, 1}, 1), at(0, 1)
    found.received(0)
    assert m.core == 0


@pytest.mark.parametrize("where", [(1, 0), (0, 2), (NOWHERE, 1), (0, 1, 1)])
def test_a_receiver_stays_where_it_is_in_nobodys_way(machine, where):
    m, found = machine({0, 1, 2}, 1), at(*where)
    found.received(0)
    assert m.moves == []


def test_here_is_a_core_of_this_process():
    assert cpu.here() in cpu.os.sched_getaffinity(0)


def test_a_thread_that_moves_is_there_and_may_go_on_to_all_its_cores():
    before = cpu.os.sched_getaffinity(0)
    for core in before:
        cpu.move(core)
        assert cpu.os.sched_getaffinity(0) == before


def test_a_worker_looks_around_once_in_a_while_and_whenever_it_was_moved(machine):
    m, found = machine({0, 1}, 1), at(0, NOWHERE)
    worker = found.worker(1)
    worker.step_begins()
    found.cells[0] = 1  # another one has come here since
    for _ in range(cpu.LOOK - 1):
        worker.step_begins()
    assert m.moves == []
    worker.step_begins()
    assert m.core == 0
    worker.step_begins()
    assert found.cells.tolist() == [1, 0]  # where it is now is told at once


def test_a_worker_with_a_core_of_its_own_keeps_it_awake_while_it_waits():
    assert at(0, NOWHERE).worker(1).attention == ATTENTION > 0.0


def test_a_policy_may_leave_everything_to_the_system(machine):
    m, policy = machine({0, 1}, 0), CpuPolicy()
    worker = policy.worker(1)
    assert worker.attention == 0.0
    worker.step_begins()
    policy.received(1)
    assert m.moves == []
