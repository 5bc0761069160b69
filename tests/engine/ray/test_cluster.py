"""The cluster of a run: which one, whether it has room, and that our own leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.run_config import OnRay
from offbeat.engine.ray import cluster
from offbeat.engine.ray.cluster import Node, RayCluster
from offbeat.errors import ConfigError
from tests.engine.ray.common import until

ROOT = Path(__file__).resolve().parents[3]


def node(**free: float) -> Node:
    return Node("1", "lab1", "192.168.1.5", free, free)


@pytest.mark.parametrize(
    ("free", "need", "room"),
    [
        ({"CPU": 4.0}, {"CPU": 1}, 4),
        ({"CPU": 0.3}, {"CPU": 0.1}, 3),
        ({"CPU": 4.0, "GPU": 1.0}, {"CPU": 1, "GPU": 1}, 1),
        ({"CPU": 4.0}, {"CPU": 1, "GPU": 1}, 0),
        ({"CPU": 4.0}, {"CPU": 1, "GPU": 0}, 4),
    ],
)
def test_room_is_of_whatever_there_is_least(
    free: Mapping[str, float], need: Mapping[str, float], room: int
) -> None:
    assert node(**free).room(need) == room


class TwoHosts:
    """As much of Ray as says what is there; each look finds what comes next of `free`."""

    def __init__(self, *free: float):
        self.free, self._private, self.state = list(free), self, self

    def nodes(self) -> list[dict[str, Any]]:
        kind = {"NodeManagerAddress": "192.168.1.5", "Alive": True, "Resources": {"CPU": 2.0}}
        dead = {**kind, "NodeID": "3", "NodeManagerHostname": "lab3", "Alive": False}
        names = {"1": "lab1", "2": "lab2"}
        return [{**kind, "NodeID": k, "NodeManagerHostname": v} for k, v in names.items()] + [dead]

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        free = self.free.pop(0) if len(self.free) > 1 else self.free[0]
        return {"1": {"CPU": free}, "2": {"CPU": 2.0}, "3": {"CPU": 2.0}}


def test_more_than_a_cluster_has_is_refused_at_once() -> None:
    with pytest.raises(ConfigError) as told:
        RayCluster(TwoHosts(1.0), False).has_room(OnRay(), 5)
    assert str(told.value) == (
        "this cluster has room for 3 of 5 workers, each of which needs 1 CPU: lab1 (1 CPU free); "
        "lab2 (2 CPU free). To go on, use 3 workers, ask for less with worker_resources=, add "
        "hosts, or wait for them with wait=600"
    )


def test_one_waits_for_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOK", 0.0)
    ray = TwoHosts(0.0, 1.0, 2.0)
    RayCluster(ray, False).has_room(OnRay(), 4)
    assert len(ray.free) == 1


def test_one_waits_for_hosts_that_are_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOK", 0.0)
    ray = TwoHosts(0.0, 1.0, 8.0)
    with pytest.raises(ConfigError, match="room for 2 of 6"):
        RayCluster(ray, False).has_room(OnRay(), 6)
    RayCluster(ray, False).has_room(OnRay(wait=60.0), 6)


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install offbeat\[ray\]"):
        cluster.needed()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1: start one with ray start"),
        ("ray://127.0.0.1:10001", "ray job submit"),
        ("here:there", "is no address"),
    ],
)
def test_an_address_where_nobody_is(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster._joined(cluster.needed(), address)


# ---------------------------------------------------------------- a cluster of our own


def living(home: Path) -> set[int]:
    """The processes that were started with this home, whoever has started them."""
    found = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                process.name.isdigit()
                and b"HOME=%b\0" % bytes(home) in (process / "environ").read_bytes()
            ):
                found.add(int(process.name))
    return found


@contextmanager
def nothing_of(home: Path) -> Iterator[dict[str, str]]:
    """An environment of which nothing is there any more afterwards, nor of Ray's in its home."""
    places = home / "tmp"
    places.mkdir(parents=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"HOME": str(home), "TMPDIR": str(places), "PYTHONPATH": str(ROOT)}
    yield environment
    until(lambda: not living(home), "all processes end")
    until(lambda: not list(places.iterdir()), "its folder is removed")
    assert [path.name for path in home.iterdir()] == ["tmp"]


HOLD = """
from offbeat.config.run_config import OnRay
from offbeat.engine.ray.cluster import connected
with connected(OnRay(), 1) as cluster:
    print(cluster.own, cluster.home, flush=True)
    input()
"""


def test_our_own_cluster_is_gone_even_if_we_are_killed() -> None:
    home = Path(f"/tmp/ob{os.getpid()}")
    try:
        with nothing_of(home) as environment:
            process = subprocess.Popen(
                [sys.executable, "-c", HOLD],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            with process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"True 127.0.0.1\n"
                assert len(living(home)) > 3
                process.send_signal(signal.SIGKILL)
    finally:
        for path in (home / "tmp", home):
            path.rmdir()


@pytest.mark.parametrize(
    ("name", "inside", "named", "rays"),
    [
        ("ray::DashboardAgent", True, False, True),
        ("ray::DashboardAgent", False, False, False),  # of another cluster
        ("sleep", False, True, True),
        ("sleep", True, False, False),  # the program's own, which has inherited a log
    ],
)
def test_only_what_ray_has_started_is_ended(
    tmp_path: Path, name: str, inside: bool, named: bool, rays: bool
) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    with open((folder if inside else tmp_path) / "log", "w") as log:
        words = [f"{name}{folder if named else ''}", "1000"]
        with subprocess.Popen(words, executable="sleep", stdout=log) as process:
            there = Path(f"/proc/{process.pid}")
            try:
                until((there / "cmdline").read_bytes, "it has begun")
                assert cluster._works_in(there, str(folder)) == rays
            finally:
                process.kill()
