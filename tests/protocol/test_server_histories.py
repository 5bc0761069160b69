"""Many histories of workers that are late, silent, dead or repeated: nothing is lost."""

import pytest

import offbeat as ob
from tests.protocol.allreduce_histories import AllreduceHistory
from tests.protocol.histories import History

DISCIPLINES = [
    *("bsp", "ssp:2", "asp", "soft:2", "bsp:backup=1", "local:2"),
    *("downpour:2,3", "easgd:2", "asup:1", "ringmaster:2", "rennala:3,redo=yes"),
]
SEEDS = 150


def check(history: History, about: str) -> bool:
    """Whether the run came to its end; if so, all is accounted for."""
    try:
        done = history.run()
        if done:
            history.check_end()
    except BaseException as error:
        error.add_note(about)
        raise
    return done


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_whatever_happens_every_sample_counts_once_and_nobody_waits_for_ever(discipline):
    for seed in range(SEEDS):
        least = 2 if discipline in ("soft:2", "bsp:backup=1") else 1  # workers
        assert check(History(ob.parse(discipline), seed, least), f"{discipline}, seed {seed}")


@pytest.mark.parametrize("discipline", ["bsp", "local:2", "local:3"])
def test_so_it_is_where_workers_add_up_among_themselves(discipline):
    """A run whose parameters are lost with all who held them is not finished."""
    finished = 0
    for seed in range(SEEDS):
        history = AllreduceHistory(ob.parse(discipline), seed)
        finished += check(history, f"{discipline} by all-reduce, seed {seed}")
    assert finished > 0.9 * SEEDS
