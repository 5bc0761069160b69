"""Links that are cut, torn and silent: every ledger exact, every replay identical, nothing left."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.log.records import Joined, Lost
from tests.contract.common import check_run, problem
from tests.engine.hosts.common import over_tcp, through
from tests.engine.hosts.proxy import Fate, Proxy
from tests.engine.local.common import nothing_left

pytestmark = pytest.mark.usefixtures("unhurried")

PATIENCE = 0.5
SHORT, LATE = 0.1, 1.5  # seconds of silence: within patience, and beyond it
KINDS = ("asp", "bsp", "ssp:1", "local:2", "soft:2")


def survives(folder: Path, proxy: Proxy, seed: int, **options: Any) -> list[Any]:
    """A run over links that break; returns its records."""
    what = problem(samples=48)
    connections = 1 + 3 * (seed % 2)
    options = {"workers": 2 + seed % 2, "epochs": 4, "patience": PATIENCE} | options
    with nothing_left(), through(proxy, connections):
        done = over_tcp(what, KINDS[seed % len(KINDS)], out=folder, **options)
        for epoch in done.summary().ledger:
            assert epoch["repeated"] == epoch["missing"] == 0
    return check_run(folder, what, options["epochs"])


@pytest.mark.parametrize("seed", range(6))
def test_torn_connections_are_taken_up_again(tmp_path: Path, seed: int) -> None:
    proxy = Proxy(seed)
    survives(tmp_path / "run", proxy, seed)
    assert proxy.torn > 3


@pytest.mark.parametrize("seed", range(3))
def test_links_that_are_silent_for_a_while(tmp_path: Path, seed: int) -> None:
    proxy = Proxy(100 + seed, (SHORT,))
    survives(tmp_path / "run", proxy, seed)
    assert proxy.silenced + proxy.torn > 3


def test_links_that_are_silent_for_too_long(tmp_path: Path) -> None:
    """The one that was given up comes again, as another incarnation."""
    proxy = Proxy()
    proxy.next = [Fate(lasts=30_000, silent=LATE)]
    records = survives(tmp_path / "run", proxy, 0, patience=0.6, emulate=(0.004, 0.004), epochs=40)
    assert proxy.silenced == 1
    assert any(isinstance(record, Lost) for record in records)
    again = [r for r in records if isinstance(r, Joined) and r.incarnation > 1]
    assert again


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_two_hundred_random_faults(tmp_path: Path, seed: int) -> None:
    proxy = Proxy(1000 + seed, (SHORT, SHORT, LATE))
    survives(tmp_path / "run", proxy, seed, overlap=seed % 7 == 0 and seed % 5 < 3)
