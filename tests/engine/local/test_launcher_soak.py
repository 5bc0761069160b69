"""Random kills and stops of workers, tester and server, under every discipline and codec."""

import os
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.log.records import Updated
from tests.contract.common import CODECS, NAMES, named, problem, run
from tests.engine.local.common import (
    Gate,
    assert_exact,
    assert_replays,
    children,
    hit,
    nothing_left,
)

pytestmark = pytest.mark.usefixtures("unhurried")

SAMPLES, WORKERS = 48, 3
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
        there = {n: pid for n, pid in children().items() if pid not in self.stopped}
        what = self.rng.choice(["kill", "kill", "pause", "stop", "freeze"])
        names = sorted(there)
        if what in ("stop", "freeze"):  # no log, no updates, no waking: not for the server
            names = [name for name in names if name[-1].isdigit()]
        if not names:
            return
        name = self.rng.choice(names)
        pid = there[name]
        self.dealt.append(f"{what} {name}")
        self.blows -= 1
        hit(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "pause":
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            os.kill(pid, signal.SIGCONT)
        elif what == "stop":
            self.stopped[pid] = self.rng.randrange(1, 40)
        if not self.blows:
            self.gate.open()


def struck(name: str, seed: int, blows: int, epochs: int) -> list[str]:
    """One run with everything else chosen by `seed`; returns what was done to it."""
    rng = random.Random(seed)
    codec = rng.choice(CODECS)
    gate = Gate(0.02)
    what = problem(samples=SAMPLES)._replace(loss=gate)
    chaos = Chaos(gate, rng, blows)
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        with nothing_left():
            done = run(
                "local",
                what,
                named(WORKERS)[name],
                workers=WORKERS,
                epochs=epochs,
                codec=codec,
                patience=PATIENCE,
                test=what.data if rng.random() < 0.5 else None,
                checkpoint_every=rng.choice([None, 1, 5]),
                out=folder / "run",
                listeners=[chaos],
            )
            gate.open()
            assert_exact(done, SAMPLES, epochs)
            assert_replays(done, what)
    except BaseException as error:
        error.add_note(f"{name}, seed {seed}, codec {codec}, {chaos.dealt}; look into {folder}")
        raise
    finally:
        gate.close()
    shutil.rmtree(folder)  # kept when something failed
    return chaos.dealt


@pytest.mark.parametrize(
    ("name", "seed"), [("bsp", 1), ("ssp", 2), ("easgd", 3), ("fedbuff", 5)], ids=str
)
def test_a_few_blows(name, seed):
    assert len(struck(name, seed, blows=3, epochs=30)) == 3


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [100, 200])
def test_many_blows(name, seed):
    """Two hundred and twenty in all, most of them in the middle of something."""
    assert len(struck(name, seed + NAMES.index(name), blows=5, epochs=90)) == 5
