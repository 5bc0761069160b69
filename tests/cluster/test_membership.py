"""Workers that come late, go away and come back; hosts, processes and wires that fail."""

import os
import signal

import pytest

from offbeat.log.records import Left, Linked, Lost
from tests.cluster.common import PATIENCE, joins, killed, lost, of, site

pytestmark = pytest.mark.cluster


def test_workers_come_late_go_away_and_come_back(tmp_path):
    with site(tmp_path, 4) as here:
        one, two, three, four = here.others
        here.serve("-n", "1:3", "--sync", "ssp:3")
        here.work(one)
        here.contributes(one)
        visitor = here.work(two)
        here.contributes(two)
        worker = here.number(two)
        os.kill(visitor.process.pid, signal.SIGINT)
        visitor.ended(130)
        here.workers.remove(visitor)
        here.until(
            lambda records: lost(records, worker) or of(records, Left, worker), "it has left"
        )
        here.goes_on(but=[two, three, four])

        since = len(here.records())
        here.work(two)
        here.until(
            lambda records: any(
                isinstance(r, Linked) and r.host == "lab3" for r in records[since:]
            ),
            "it comes back",
        )
        here.contributes(two, since=since)
        here.work(three)
        here.contributes(three)
        turned_away = here.work(four)
        assert "all 3 places of this run are taken" in turned_away.ended(2)
        here.workers.remove(turned_away)
        here.goes_on(but=[four])
        summary = here.ends_right()
        assert {figures["link"]["host"] for figures in summary["per_worker"]} == {
            "lab2",
            "lab3",
            "lab4",
        }


def test_a_worker_that_is_killed_is_started_again_in_its_place(tmp_path):
    with site(tmp_path) as here:
        here.begin("--sync", "ssp:3")
        host = here.others[0]
        worker = here.number(host)
        killed(host, "offbeat work")
        here.contributes(host, incarnation=2)
        assert here.number(host) == worker
        here.ends_right()
        assert joins(here.records(), worker) == [1, 2]
        assert "was killed by SIGKILL: starting it again" in here.workers[0].said()


@pytest.mark.parametrize("unheard", [False, True], ids=["and heard", "and not heard"])
def test_a_host_is_killed(unheard, tmp_path):
    """Its system may say that its connections are closed, or be gone itself."""
    with site(tmp_path) as here:
        here.begin("--sync", "bsp")
        host = here.others[0]
        worker = here.number(host)
        if unheard:
            host.cut()
        host.kill()
        assert not host.processes()
        here.workers[0].ended(-signal.SIGKILL)
        here.until(lambda records: lost(records, worker), f"worker {worker} is given up")
        here.goes_on(but=[host])
        if unheard:
            host.heal()
        here.workers[0] = here.work(host, "--no-tls")
        here.contributes(host, incarnation=2)
        here.ends_right()
        assert here.number(host) == worker
        assert joins(here.records(), worker) == [1, 2]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_the_host_of_the_store_is_cut_off(sync, tmp_path):
    with site(tmp_path) as here:
        here.begin("--sync", sync)
        store = here.store_host
        store.cut()
        for host in here.others:
            host.dials_in_vain()
        store.heal()
        here.goes_on()
        assert all(joins(here.records(), worker) == [1] for worker in range(3))

        store.cut()
        here.until(lambda records: all(lost(records, w) for w in range(3)), "all are given up")
        store.heal()
        for host in here.others:
            here.contributes(host, incarnation=2)
        here.goes_on()
        here.ends_right()
        assert all(joins(here.records(), worker) == [1, 2] for worker in range(3))


@pytest.mark.parametrize("sync", ["bsp", "easgd:2"])
def test_the_server_of_the_store_is_killed(sync, tmp_path):
    """As on one machine it goes on from memory; workers come again by themselves."""
    with site(tmp_path) as here:
        here.begin("--sync", sync)
        killed(here.store_host, "offbeat server")
        for host in here.others:
            here.contributes(host, incarnation=2)
        here.goes_on()
        here.ends_right()
        assert all(joins(here.records(), worker) == [1, 2] for worker in range(3))


def test_connections_that_are_torn_are_made_again(tmp_path):
    with site(tmp_path) as here:
        here.begin("--sync", "bsp", plain=False)
        for _ in range(2):
            for host in here.others:
                before = host.ports()
                host.tear()
                here.goes_on()
                assert not before & host.ports()
        here.ends_right()
        assert not [record for record in here.records() if isinstance(record, Lost)]
        assert all(joins(here.records(), worker) == [1] for worker in range(3))


def test_wires_that_are_slow_and_far(tmp_path):
    """Four connections each, bytes that take longer than a step, and all of it encrypted."""
    with site(tmp_path, delays=(0.0, 0.02, 0.02, 0.0), epochs=16) as here:
        for host in here.others:
            host.limit(100e3)
        here.begin("--sync", "asp", "--patience", f"{10 * PATIENCE:g}", plain=False)
        summary = here.ends_right()
        assert summary["lost"] == 0
        far = {r.host: r.connections for r in here.records() if isinstance(r, Linked)}
        assert far == {"lab2": 4, "lab3": 4, "lab4": 1}
