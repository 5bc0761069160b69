"""Random faults over TCP: kills, cuts, slow wires and torn connections, chosen by a seed."""

import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.network.hosts import Host
from tests.cluster.common import Site, joins, killed, lost, sent, site
from tests.contract.common import CODECS, NAMES, named

pytestmark = pytest.mark.cluster

WORKERS, BLOWS = 3, 10
PATIENCE = 2.0
EPOCHS = 90
DEATHS = 2  # of worker processes that one `offbeat work` is to make good
SLOW = 64e3  # bits a second: about ten exchanges


class Chaos:
    """Deals out faults to a run; none before all that the last one has hit are well again.

    The others go on meanwhile, some more updates each time.
    """

    def __init__(self, here: Site, rng: random.Random, work: Callable[[Host], None]):
        self.here, self.rng, self.work = here, rng, work
        self.deaths: Counter[str] = Counter()
        self.dealt: list[str] = []
        self.faults: dict[str, Callable[[Host], None]] = {
            "kill a worker": self._kill_worker,
            "kill a host": self._kill_host,
            "kill a host that is cut off": self._kill_unheard,
            "kill the server": self._kill_server,
            "cut for a moment": self._cut_for_a_moment,
            "cut until it dials": self._cut_until_it_dials,
            "cut for long": self._cut_for_long,
            "cut off the store": self._cut_off_the_store,
            "slow down": self._slow_down,
            "tear": lambda host: host.tear(),
            "tear twice": self._tear_twice,
            "tear while cut off": self._tear_while_cut_off,
        }

    def strike(self) -> None:
        here = self.here
        self._moves(self.rng.randrange(1, 8))
        name, host = self.rng.choice(sorted(self.faults)), self.rng.choice(here.others)
        self.dealt.append(f"{name} {host.name}")
        self.faults[name](host)
        since = len(here.records())
        for other in here.others:
            here.contributes(other, since=since)

    def _moves(self, count: int) -> None:
        """So many contributions come from somebody."""
        since = len(self.here.records())
        self.here.until(lambda records: len(list(sent(records[since:]))) >= count, "the run moves")

    def _given_up(self, host: Host) -> None:
        worker = self.here.number(host)
        before = len(lost(self.here.records(), worker))
        self.here.until(lambda records: len(lost(records, worker)) > before, f"{worker} is lost")

    def _kill_worker(self, host: Host) -> None:
        self.deaths[host.name] += 1
        if self.deaths[host.name] > DEATHS:  # as many as its supervisor is patient with
            self._kill_host(host)
            return
        worker = self.here.number(host)
        before = joins(self.here.records(), worker)[-1]
        killed(host, "offbeat work")
        self.here.contributes(host, incarnation=before + 1)

    def _kill_host(self, host: Host) -> None:
        self.deaths[host.name] = 0
        worker = self.here.number(host)
        before = len(lost(self.here.records(), worker))
        host.kill()
        self.here.until(lambda records: len(lost(records, worker)) > before, f"{worker} is lost")
        self.work(host)

    def _kill_unheard(self, host: Host) -> None:
        host.cut()
        host.kill()
        self._given_up(host)
        host.heal()
        self.deaths[host.name] = 0
        self.work(host)

    def _kill_server(self, host: Host) -> None:
        killed(self.here.store_host, "offbeat server")

    def _cut_for_a_moment(self, host: Host) -> None:
        host.cut()
        host.speaks_in_vain()
        host.heal()

    def _cut_until_it_dials(self, host: Host) -> None:
        host.cut()
        host.dials_in_vain()
        host.heal()

    def _cut_for_long(self, host: Host) -> None:
        host.cut()
        self._given_up(host)
        self._moves(2)
        host.heal()

    def _cut_off_the_store(self, host: Host) -> None:
        store = self.here.store_host
        store.cut()
        if self.rng.random() < 0.5:
            host.dials_in_vain()
        else:
            self._given_up(host)
        store.heal()

    def _slow_down(self, host: Host) -> None:
        host.limit(SLOW)
        self._moves(self.rng.randrange(2, 20))
        host.limit(None)

    def _tear_twice(self, host: Host) -> None:
        host.tear()
        self._moves(1)
        host.tear()

    def _tear_while_cut_off(self, host: Host) -> None:
        host.cut()
        host.speaks_in_vain()
        host.tear()
        host.heal()


def struck(seed: int, name: str, folder: Path) -> list[str]:
    """A run of which everything else is chosen by `seed` too; what was done to it."""
    rng = random.Random(seed)
    codec, pull = rng.choice(CODECS), rng.choice([None, "int8"])
    discipline = named(WORKERS)[name]
    if discipline.pairs or discipline.weigh.elementwise:
        pull = None  # they need what the store has
    options = ["--sync", str(discipline), "--patience", str(PATIENCE)]
    options += ["--codec", str(codec)] if codec is not None else []
    options += ["--pull-codec", pull] if pull is not None else []
    options += ["--checkpoint-every", "20"] if rng.random() < 0.5 else []
    safe = [] if rng.random() < 0.3 else ["--no-tls"]
    dealt: list[str] = []
    try:
        with site(folder, WORKERS, epochs=EPOCHS) as here:

            def work(host: Host) -> None:
                for old in [one for one in here.workers if one.host is host]:
                    old.ended(-signal.SIGKILL)
                    here.workers.remove(old)
                here.work(host, *safe)

            chaos = Chaos(here, rng, work)
            dealt = chaos.dealt
            here.begin(*options, plain=bool(safe))
            for _ in range(BLOWS):
                chaos.strike()
            here.ends_right()
    except BaseException as error:
        error.add_note(f"{name}, seed {seed}, {options}, {dealt}; look into {folder}")
        raise
    return dealt


@pytest.mark.parametrize(("name", "seed"), [("bsp", 1), ("asp", 2)], ids=str)
def test_some_faults(name, seed, tmp_path):
    assert len(struck(seed, name, tmp_path)) == BLOWS


# Two hundred in all.
SEEDS = range(100, 120)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_two_hundred_faults(seed, tmp_path):
    assert len(SEEDS) * BLOWS == 200
    assert len(struck(seed, NAMES[seed % len(NAMES)], tmp_path)) == BLOWS
