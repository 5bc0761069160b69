"""Shared memory: laid out without overlap, seen by forked children, refused where there is none."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.engine.local.process import fork
from offbeat.engine.local.shared_memory import MemoryPlan, SharedMemory
from offbeat.errors import ConfigError
from offbeat.model.table import Entry, Table
from offbeat.store.board import UNBOUND, Row
from offbeat.transport import memory
from offbeat.transport.memory import PAGE, Arena, pages
from tests.engine.local.common import nothing_left


def table(*sizes: int, dtype: torch.dtype = torch.float32) -> Table:
    return Table.of([Entry(f"t{i}", (size,), dtype, "trained") for i, size in enumerate(sizes)])


def plan(incoming: int = 1, outgoing: int = 1, workers: int = 2) -> MemoryPlan:
    tables = [table(3, 5), table(7, dtype=torch.float64)]
    return MemoryPlan(tables, table(2), table(), workers, incoming, outgoing)


@given(st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=8))
def test_pieces_lie_on_pages_of_their_own(sizes):
    arena = Arena(sum(pages(size) for size in sizes))
    pieces = [arena.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert len(piece) == sizes[number]
        piece.fill_(number)
    for number, piece in enumerate(pieces):
        assert bool((piece == number).all())
    starts = [piece.data_ptr() for piece in pieces if len(piece)]
    assert all((start - pieces[0].data_ptr()) % PAGE == 0 for start in starts) or not sizes[0]
    arena.close()


def test_new_memory_is_zero():
    arena = Arena(3 * PAGE)
    assert not arena.take(3 * PAGE).any()
    arena.close()


def test_the_memory_stays_while_a_tensor_is_in_it_and_goes_with_it():
    with nothing_left():
        arena = Arena(PAGE)
        piece = arena.take(8)
        arena.close()
        piece.fill_(1)
        del arena
        assert piece.sum() == 8
        del piece


def test_too_little_memory_is_told_with_what_to_do(monkeypatch):
    monkeypatch.setattr(memory, "memory_left", lambda: 2 * PAGE)
    with nothing_left():
        with pytest.raises(
            ConfigError, match=r"of shared memory are not to be had .*fewer workers"
        ):
            Arena(3 * PAGE)
        Arena(2 * PAGE).close()


def test_a_system_that_refuses_is_told_in_the_same_words(monkeypatch):
    def refuse(file: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with nothing_left(), pytest.raises(ConfigError, match="No space left on device"):
        Arena(PAGE)


@pytest.mark.parametrize("incoming", [0, 1, 2])
@pytest.mark.parametrize("outgoing", [0, 1, 2])
def test_a_plan_says_exactly_what_is_used(incoming, outgoing):
    made = SharedMemory(plan(incoming, outgoing, workers=3))
    assert made.arena.used == made.plan.nbytes
    assert len(made.slots) == 3
    for slot in made.slots:
        assert len(slot.incoming) == max(1, incoming)
        assert len(slot.outgoing) == outgoing
    made.arena.close()


def test_without_incoming_places_workers_read_the_store_itself():
    made = SharedMemory(plan(incoming=0))
    assert all(slot.incoming == [made.parameters] for slot in made.slots)
    made.arena.close()


def test_a_board_begins_with_nobody_on_it():
    made = SharedMemory(plan())
    assert made.cells.shape == (Row.COUNT, 2)
    assert (made.cells[Row.BINDING] == UNBOUND).all()
    assert (made.applied, made.given_up) == (0, 0)
    made.arena.close()


def test_what_one_process_writes_another_reads_and_nothing_else_changes():
    made = SharedMemory(plan())

    def write() -> None:
        for flat in made.slots[1].outgoing[0]:
            for view in flat.views.values():
                view.fill_(3.0)
        made.cells[Row.CLOCK, 1] = 17

    child = fork("offbeat x", write)
    child.reap()
    assert child.status == 0
    for flat in made.slots[1].outgoing[0]:
        assert all(bool((view == 3.0).all()) for view in flat.views.values())
    for flat in [*made.parameters, *made.slots[0].outgoing[0], *made.slots[1].incoming[0]]:
        assert not any(bool(view.any()) for view in flat.views.values())
    assert made.cells[Row.CLOCK].tolist() == [0, 17]
    made.arena.close()


def resident() -> int:
    """Bytes of shared memory that this process has in its tables."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            ours = "/memfd:offbeat" in line
        elif ours and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


def test_a_piece_that_was_let_go_is_still_there() -> None:
    arena = Arena(64 * PAGE)
    first, second = arena.take(8 * PAGE), arena.take(40 * PAGE)
    before = resident()
    first.fill_(3)
    second.fill_(5)
    held = resident()
    assert held >= before + 48 * PAGE
    arena.let_go(second)
    assert resident() <= held - 40 * PAGE
    assert bool((first == 3).all())
    assert bool((second == 5).all())
    arena.close()
