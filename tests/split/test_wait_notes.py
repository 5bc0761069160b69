"""Notes of who waits for what: their words, and that they are taken back."""

import numpy as np
import pytest

from offbeat.split.part import BACK, ONWARD, TIED
from offbeat.split.tensor_group import SHARED
from offbeat.split.wait_notes import FIELDS, KINDS, WaitNotes


def wait_notes(processes: int) -> WaitNotes:
    return WaitNotes(np.zeros((processes, FIELDS), dtype=np.int64))


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ((ONWARD, 1, 3), "activation 3 for stage 1"),
        ((BACK, 0, 2), "gradient 2 for stage 0"),
        ((TIED, 0, 3), "the tied gradient of stage 3"),
        (("order", 0, 0), "an order"),
        (("answer", 0, 0), "an answer"),
        (("made", 0, 0), "an answer"),
        (SHARED, "its share of a module"),
    ],
)
def test_every_kind_of_waiting_has_words(tag: tuple[str, int, int], words: str) -> None:
    notes = wait_notes(2)
    notes.writer(1, lambda: 7)(0, tag)
    assert notes.told() == (
        f"process 1 waits for {words} from process 0 since step 7; process 0 waits for nobody"
    )


def test_every_kind_that_is_sent_is_known() -> None:
    from offbeat.engine.local.pipeline_group import MADE
    from offbeat.engine.local.replica_group import ANSWER, ORDER
    from offbeat.split.script_replica import OUT

    assert {ONWARD, BACK, TIED, ORDER[0], ANSWER[0], MADE[0], SHARED[0], OUT} == set(KINDS)


def test_a_note_is_taken_back() -> None:
    notes = wait_notes(3)
    write = notes.writer(0, lambda: 1)
    write(1, (BACK, 0, 0))
    write(None, None)
    assert notes.told() == "process 0 and 1 and 2 wait for nobody"


def test_the_step_is_the_one_in_which_waiting_began() -> None:
    notes, step = wait_notes(2), [4]
    write = notes.writer(0, lambda: step[0])
    write(1, (BACK, 0, 0))
    step[0] = 9
    assert "since step 4" in notes.told()


def test_a_worker_of_one_process_has_nothing_to_tell() -> None:
    assert wait_notes(1).told() == ""
