"""A real Ray cluster over hosts: processes and hosts that die, are cut off, added and drained."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network.hosts import Host, Hosts, until
from tests.cluster.common import (
    LONG,
    PATIENCE,
    TOLD,
    Command,
    Offbeat,
    Site,
    environment,
    joins,
    lost,
)

pytestmark = pytest.mark.cluster

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
GCS = 6379
EPOCHS = 120  # an actor takes a while to start
# Ray's own patience with a host that is silent; the run has another, and does not wait for this.
NOTICES = (
    '{"health_check_period_ms": 1000, "health_check_timeout_ms": 1000, '
    '"health_check_failure_threshold": 3, "gcs_rpc_server_reconnect_timeout_s": 5}'
)
DRAIN = """
import sys, ray
ray.init(address=sys.argv[1], logging_level=40)
node, = [n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == sys.argv[2] and n["Alive"]]
gcs = ray._raylet.GcsClient(address=sys.argv[1])
assert gcs.drain_node(node, 2, "it goes", 2**53)[0]
"""
NODE = ["--disable-usage-stats", "--object-store-memory=80000000", "--block"]


class RayCommand(Command):
    """A command of Ray's, with the token of its cluster."""

    def _start(self) -> Any:
        with open(self.out, "w") as out, open(self.complaints, "w") as complaints:
            options = {"stdout": out, "stderr": complaints, "environment": environment()}
            return self.host.run(*RAY, *self.words, **options)


class RaySite(Site):
    """A cluster whose first host has the driver, and with it the store, and no workers."""

    def __init__(self, hosts: Hosts, folder: Path):
        super().__init__(hosts, folder, epochs=EPOCHS)
        at, temp = f"{self.store_host.address}:{GCS}", f"--temp-dir={folder / 'ray'}"
        self.gcs = at
        place = [f"--port={GCS}", f"--node-ip-address={self.store_host.address}", temp]
        settings = ["--include-dashboard=false", f"--system-config={NOTICES}", "--num-cpus=0"]
        self.nodes = [RayCommand(self.store_host, "start", "--head", *place, *settings, *NODE)]
        self.nodes[0].says("Ray runtime started")

    def join(self, *hosts: Host) -> None:
        """Hosts with room for one worker each come to the cluster."""
        for host in hosts:
            place = [f"--address={self.gcs}", f"--node-ip-address={host.address}", "--num-cpus=1"]
            self.nodes.append(RayCommand(host, "start", *place, *NODE))
            self.nodes[-1].says("Ray runtime started")  # they share files, and hosts do not

    def starts(self, *options: str, job: bool = False) -> None:
        """A driver that is told where the cluster is, or has it in its environment as a `job`."""
        words = ["run", "--engine", "ray", "--json", "--out", "run", "--patience", str(PATIENCE)]
        if not job:
            words += ["--address", self.gcs]
        with pytest.MonkeyPatch.context() as patch:
            if job:
                patch.setenv("RAY_ADDRESS", self.gcs)
            self.store = Offbeat(self.store_host, *words, *options, *self.script)

    def drain(self, host: Host) -> None:
        """Ray is told that this host is about to go, in an hour."""
        words = [sys.executable, "-c", DRAIN, self.gcs, host.address]
        done = self.store_host.run(*words, environment=environment())
        assert done.wait(LONG) == 0


@contextmanager
def without_token() -> Iterator[None]:
    """Whatever a Ray has left in the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield


@contextmanager
def ray_site(workers: int) -> Iterator[RaySite]:
    """Hosts for a driver and so many workers, in a folder with a name that Ray's sockets bear."""
    with tempfile.TemporaryDirectory(prefix="ob", dir="/tmp") as name, without_token():
        folder = Path(name)
        with Hosts(1 + workers, folder) as hosts:
            found = RaySite(hosts, folder)
            try:
                yield found
            except BaseException as error:
                for command in filter(None, [found.store, *found.nodes]):
                    error.add_note(f"{command.host.name}: {' '.join(command.words)}")
                    error.add_note(command.said()[-3000:])
                told = [str(r)[:300] for r in found.records() if isinstance(r, TOLD)]
                error.add_note("\n".join(told))
                raise
            finally:
                found.close()


def worker_of(host: Host) -> int:
    """The process of the worker on a host."""

    def there() -> int | None:
        for pid in host.processes():
            with suppress(OSError):
                if b"ray::ScriptActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    found: int = until(there, f"a worker runs on {host.name}")
    return found


def test_processes_and_hosts_that_die_and_come() -> None:
    with ray_site(3) as here:
        one, two, three = here.others
        here.join(one, two)
        here.starts("-n", "2:3", "--sync", "ssp:3")
        here.contributes(one)
        here.contributes(two)
        worker, since = here.number(one), len(here.records())
        os.kill(worker_of(one), signal.SIGKILL)
        here.until(lambda records: lost(records, worker), f"worker {worker} is lost")
        here.contributes(one, since=since)  # as another, which has waited for room

        here.join(three)  # which there was no room for
        here.contributes(three)
        two.cut()  # nobody hears of its end
        two.kill()
        dead = here.number(two)
        here.until(lambda records: lost(records, dead), "lab3 is given up")
        here.goes_on(but=[two])
        here.drain(three)
        gone = here.number(three)
        here.until(lambda records: lost(records, gone), "lab4 is left")
        here.goes_on(but=[two, three])
        here.ends_right()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_host_is_cut_off_for_less_than_patience_and_for_more(sync: str) -> None:
    with ray_site(3) as here:
        here.join(*here.others)
        here.starts("-n", "3", "--sync", sync, job=sync == "asp")
        for host in here.others:
            here.contributes(host)
        host = here.others[1]
        worker = here.number(host)
        host.cut()
        host.speaks_in_vain()
        host.heal()
        here.goes_on()
        assert joins(here.records(), worker) == [1]

        host.cut()
        here.until(lambda records: lost(records, worker), f"worker {worker} is given up")
        here.goes_on(but=[host])
        since = len(here.records())
        host.heal()
        here.contributes(host, incarnation=2, since=since)
        here.ends_right()


SLOW = 2e7  # bits a second


def test_a_doctor_finds_the_slow_wire() -> None:
    with ray_site(2) as here:
        one, two = here.others
        here.join(one, two)
        two.limit(SLOW)
        words = ["doctor", "--cluster", "--address", here.gcs, "-n", "2", "--json", "--no-tls"]
        told = json.loads(Offbeat(here.store_host, *words, "--model-bytes", "10000000").ended())
        store, *others = told["hosts"]
        assert (store["address"], store["of_store"]) == (here.store_host.address, True)
        ways = {host["address"]: host["bandwidth"] for host in others}
        assert ways[one.address] > 2 * ways[two.address]
        assert ways[two.address] < SLOW / 8
        state = {finding["name"]: finding for finding in told["findings"]}
        assert [name for name in state if state[name]["state"] != "good"] == ["links"]
        assert state["links"]["state"] == "warn"
        assert f"on the slowest ({two.name})" in state["links"]["found"]
