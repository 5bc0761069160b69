"""Workers of one host that are killed: how often they are started again, and as which."""

import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from offbeat.engine.hosts.supervisor import Place, supervise
from offbeat.engine.spawn import RESTARTS
from offbeat.errors import RunError

KILLS = 2 * RESTARTS + 1


class Dying:
    """A worker that is killed again and again; each time it notes as which it has come."""

    def __init__(self, notes: Path, steps: bool):
        self.notes, self.steps = notes, steps

    def __call__(self, place: Place) -> int:
        with open(self.notes, "a") as out:
            out.write(f"{place.number}\n")
        place.tell(7)
        if self.steps:
            place.tell(7)
        if self.count() <= KILLS:
            self.die()
        return 0

    def count(self) -> int:
        return len(self.notes.read_text().splitlines())

    def die(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_one_that_works_is_started_again_as_often_as_it_takes(tmp_path, capfd):
    worker = Dying(tmp_path / "notes", steps=True)
    assert supervise(1, worker) == 0
    assert worker.notes.read_text().split() == ["-1", *["7"] * KILLS]
    assert capfd.readouterr().err.count("killed by SIGKILL: starting it again") == KILLS


def test_one_that_never_works_is_given_up(tmp_path, capfd):
    worker = Dying(tmp_path / "notes", steps=False)
    with pytest.raises(RunError, match=f"{RESTARTS + 1} times in a row without any work"):
        supervise(1, worker)
    assert worker.count() == RESTARTS + 1
