"""What the tests of Ray share: runs on the tests' own cluster, and a look at what is left there."""

import copy
import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import offbeat as ob
from offbeat.engine.ray.cluster import RayCluster
from tests.contract.common import Problem, optimizer_for
from tests.engine.local.common import children

SLOT = {"CPU": 0.25}  # of a cluster that has few processors
LONG = 200.0  # seconds: a bound, and not what anything takes


def on_ray(what: Problem, discipline: ob.Discipline | str, **options: Any) -> ob.Run:
    """Train a copy with two workers, unless more are asked for."""
    options = {"batch_size": 4, "epochs": 2, "workers": 2, "worker_resources": SLOT} | options
    if "optimizer" not in options:
        options["optimizer"] = optimizer_for(discipline)
    fresh = what._replace(model=copy.deepcopy(what.model))
    return ob.train(*fresh, discipline=discipline, engine="ray", **options)


def until(true: Callable[[], bool], what: str = "it") -> None:
    """Wait for something that another process is about to do."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, f"{what} does not happen"
        time.sleep(0.02)  # which orders nothing: it lets others have the processor


@contextmanager
def nothing_held(cluster: RayCluster) -> Iterator[None]:
    """Ray has all again that it had before: no actor is left."""
    before, files = free(cluster), own_files()
    yield
    assert children() == {}
    gc.collect()  # a cycle may keep the memory of a run for a while
    left = own_files() - files
    assert not left, left
    until(lambda: free(cluster) == before, "Ray has everything back")


def own_files() -> Counter[str]:
    """What this process has open, apart from sockets, of which Ray has many."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return Counter(name for name in found if not name.startswith("socket:"))


def free(cluster: RayCluster) -> list[float]:
    return [round(node.free.get("CPU", 0.0), 3) for node in cluster.nodes()]
