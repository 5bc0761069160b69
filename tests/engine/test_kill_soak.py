"""Random kills and stops of workers, tester and server, under every discipline and codec."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.log import Updated
from tests.contract.common import CODECS, NAMES, named, problem, run, scratch
from tests.engine.common import Gate, assert_exact, assert_replays, children, nothing_left

SAMPLES, EPOCHS, WORKERS = 48, 30, 3
PATIENCE = 0.5


class Chaos(ob.Listener):
    """Strikes at random after random numbers of updates; the gate opens with the last blow."""

    def __init__(self, gate: Gate, rng: random.Random, blows: int):
        self.gate, self.rng, self.blows = gate, rng, blows
        self.wait = rng.randrange(1, 8)
        self.stopped: dict[int, int] = {}  # processes to wake, and after how many updates
        self.dealt: list[str] = []

    def see(self, record: Any) -> None:
        if not isinstance(record, Updated):
            return
        for pid in [p for p, left in self.stopped.items() if left <= 0]:
            del self.stopped[pid]
            if pid in children().values():  # it may have been replaced meanwhile
                os.kill(pid, signal.SIGCONT)
        self.stopped = {pid: left - 1 for pid, left in self.stopped.items()}
        self.wait -= 1
        if self.wait <= 0 and self.blows:
            self._strike()
            self.wait = self.rng.randrange(1, 8)

    def _strike(self) -> None:
        there = children()
        # Server and tester have no successor that could be stopped for good and replaced.
        what = self.rng.choice(["kill", "kill", "stop", "freeze"])
        names = sorted(there) if what == "kill" else [n for n in sorted(there) if n[-1].isdigit()]
        names = [name for name in names if there[name] not in self.stopped]
        if not names:
            return
        name = self.rng.choice(names)
        self.dealt.append(f"{what} {name}")
        self.blows -= 1
        os.kill(there[name], signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "stop":
            self.stopped[there[name]] = self.rng.randrange(1, 40)
        if not self.blows:
            self.gate.open()


def struck(seed: int, blows: int, folder: Path) -> list[str]:
    """One run with everything chosen by `seed`; returns what was done to it."""
    rng = random.Random(seed)
    name, codec = rng.choice(NAMES), rng.choice(CODECS)
    gate = Gate(0.02)
    what = problem(samples=SAMPLES)._replace(loss=gate)
    chaos = Chaos(gate, rng, blows)
    out = folder / f"seed-{seed}"
    try:
        with nothing_left():
            done = run(
                "local",
                what,
                named(WORKERS)[name],
                workers=WORKERS,
                epochs=EPOCHS,
                codec=codec,
                patience=PATIENCE,
                test=what.data if rng.random() < 0.5 else None,
                checkpoint_every=rng.choice([None, 1, 5]),
                overlap=False,
                out=out,
                listeners=[chaos],
            )
            gate.open()
            assert_exact(done, SAMPLES, EPOCHS)
            assert_replays(done, what)
            del done
    except BaseException as error:
        error.add_note(f"seed {seed}: {name}, codec {codec}, {chaos.dealt}; its folder: {out}")
        raise
    finally:
        gate.close()
    return chaos.dealt


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place for run folders that stays when the test fails."""
    with scratch() as place:
        yield place


@pytest.mark.parametrize("seed", range(4))
def test_a_few_blows(folder, seed):
    assert len(struck(seed, 3, folder)) >= 1


@pytest.mark.soak
@pytest.mark.parametrize("part", range(2))
def test_a_hundred_blows(folder, part):
    """In two halves, one for each core."""
    dealt: list[str] = []
    seed = 1000 * (part + 1)
    while len(dealt) < 50:
        dealt += struck(seed, 3, folder)
        seed += 1
    assert {what.split()[0] for what in dealt} == {"kill", "stop", "freeze"}
    assert any("server" in what for what in dealt)
