"""The Ray cluster of a run: one that is there, or one that is started on this machine for it."""

import logging
import math
import os
import resource
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from offbeat.config.run_config import OnRay
from offbeat.errors import ConfigError
from offbeat.report.words import counted
from offbeat.transport.dial import Address

HERE = "127.0.0.1"
REACH = 5.0  # seconds that a cluster's address may take to answer; Ray itself tries for minutes
SETTLE = 5.0  # seconds until Ray knows again what a run that has just ended leaves free
LOOK = 0.2  # seconds between two looks at what is free
DRAIN = 1.0  # seconds between two looks at what is to go
LONGEST_SOCKET = 30  # letters of a folder below which Ray's sockets lie; it adds about 70
TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def needed() -> Any:
    """Ray, where it is installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "engine='ray' needs Ray: pip install offbeat[ray], on every host of the cluster"
        ) from error
    return ray


@dataclass(frozen=True)
class Node:
    """One host of a cluster, as Ray sees it."""

    id: str
    name: str
    address: str
    free: Mapping[str, float]
    whole: Mapping[str, float]  # if nobody else were there

    def room(self, need: Mapping[str, float]) -> int:
        """How many workers it has room for, each of which needs so much."""
        return room_in(self.free, need)

    def __str__(self) -> str:
        free = ", ".join(
            f"{amount:g} {name}"
            for name, amount in sorted(self.free.items())
            if name in ("CPU", "GPU") or not name.startswith(("node:", "memory", "object_store"))
        )
        return f"{self.name} ({free or 'nothing'} free)"


def room_in(there: Mapping[str, float], need: Mapping[str, float]) -> int:
    shares = [there.get(name, 0.0) / amount for name, amount in need.items() if amount]
    return math.floor(min(shares) + 1e-6) if shares else 1_000_000


@dataclass(frozen=True)
class RayCluster:
    """A connection to a cluster; `own` is one that nobody else knows, on this machine alone."""

    ray: Any
    own: bool

    @property
    def home(self) -> str:
        """The address of this host at which the others reach it."""
        if self.own:
            return HERE
        me = self.ray.get_runtime_context().get_node_id()
        return next(node.address for node in self.nodes() if node.id == me)

    def nodes(self) -> list[Node]:
        """All that live, and what they have left."""
        # Ray has no public word for what is free on which host.
        free = self.ray._private.state.available_resources_per_node()
        return [
            Node(
                told["NodeID"],
                told["NodeManagerHostname"],
                told["NodeManagerAddress"],
                free.get(told["NodeID"], {}),
                told["Resources"],
            )
            for told in self.ray.nodes()
            if told["Alive"]
        ]

    def has_room(self, engine: OnRay, workers: int) -> None:
        """Wait for room for so many workers as long as that was asked for, and refuse then."""
        until = time.monotonic() + max(engine.wait, SETTLE)
        need = engine.resources
        while (found := sum(node.room(need) for node in self.nodes())) < workers:
            total = sum(room_in(node.whole, need) for node in self.nodes())
            if time.monotonic() > until or (total < workers and not engine.wait):
                raise ConfigError(self._short(need, found, workers))
            time.sleep(LOOK)

    def _short(self, need: Mapping[str, float], found: int, workers: int) -> str:
        each = ", ".join(f"{amount:g} {name}" for name, amount in need.items())
        hosts = "; ".join(map(str, self.nodes()))
        fewer = f"use {counted(found, 'worker')}, " if found else ""
        return (
            f"this cluster has room for {found} of {counted(workers, 'worker')}, each of which "
            f"needs {each}: {hosts}. To go on, {fewer}ask for less with worker_resources=, add "
            "hosts, or wait for them with wait=600"
        )


def last_line(error: Exception) -> str:
    """What Ray says of an error, without where in Ray it was."""
    return str(error).strip().splitlines()[-1].strip()


class Draining:
    """The hosts that Ray is about to take away; a thread asks, because an answer may take long."""

    def __init__(self, ray: Any):
        self.ray, self.nodes = ray, frozenset[str]()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._ask, name="draining", daemon=True)

    def _ask(self) -> None:
        while not self.over.wait(DRAIN):
            with suppress(Exception):  # whoever cannot be asked is asked again
                self.nodes = frozenset(self.ray._private.state.state.get_draining_nodes())

    @contextmanager
    def followed(self) -> Iterator[None]:
        self.thread.start()
        try:
            yield
        finally:
            self.over.set()


@contextmanager
def connected(engine: OnRay, workers: int) -> Iterator[RayCluster]:
    """The cluster that was asked for; what was started for it is gone afterwards."""
    with running(engine.address) as cluster:
        if cluster is not None:
            yield cluster
            return
        ray = needed()
        with _folder() as folder:
            try:
                _start(ray, engine, workers, folder)
                yield RayCluster(ray, True)
            finally:
                ray.shutdown()


@contextmanager
def running(address: str | None) -> Iterator[RayCluster | None]:
    """A cluster that is there already; None if none has to be, and none is."""
    ray = needed()
    if ray.is_initialized():
        there = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", there):
            raise ConfigError(
                f"this program is connected to the Ray cluster at {there}, and address= names "
                f"{address}: leave address out, or call ray.shutdown() before"
            )
        yield RayCluster(ray, False)
        return
    with _environment_kept():
        if not _joined(ray, address):
            yield None
            return
        try:
            yield RayCluster(ray, False)
        finally:
            ray.shutdown()


def _joined(ray: Any, address: str | None) -> bool:
    """Connect to a cluster that is there; False if none has to be, and none is."""
    if address is not None and "://" in address:
        raise ConfigError(
            f"{address} is for Ray Client, whose program is on no host of the cluster: send it "
            "there with ray job submit -- offbeat run --engine ray ..."
        )
    if address is None:
        address = _known(ray)
        if address is None:
            return False
    elif address != "auto" and not _answers(address):
        raise ConfigError(_nobody(address))
    try:
        _init(ray, address=address)
    except ConnectionError as error:
        raise ConfigError(_nobody(address)) from error
    except (RuntimeError, ValueError) as error:  # another version, or no token, and it says which
        told = " ".join(str(error).split())
        raise ConfigError(f"Ray does not let us in at {address}: {told}") from error
    return True


def _known(ray: Any) -> str | None:
    """The cluster that this machine has been joined to by `ray start`, or this job is of.

    Not any that runs here, as Ray's "auto" has it: that may be the private one of another run.
    """
    found: str | None = ray._private.services.canonicalize_bootstrap_address(None)
    if found is None or _answers(found):
        return found
    if os.environ.get("RAY_ADDRESS"):
        raise ConfigError(_nobody(found))
    return None  # it was killed, and what it has left still names it


def _answers(address: str) -> bool:
    where = Address.read(address)
    try:
        socket.create_connection((where.host, where.port), REACH).close()
    except OSError:
        return False
    return True


def _nobody(address: str) -> str:
    return (
        f"no Ray cluster answers at {address}: start one with ray start --head, and join this "
        "machine to it with ray start --address=HOST:6379; or leave address out to try it here"
    )


# ---------------------------------------------------------------- on this machine


def _start(ray: Any, engine: OnRay, workers: int, folder: Path) -> None:
    """A cluster with a place for every worker: they are processes here, whatever cores there are.

    It ends with this process, also if that is killed.
    """
    if not any(name in os.environ for name in TOKENS) and not _users_token().exists():
        os.environ["RAY_AUTH_TOKEN"] = _own_token()  # else Ray leaves one in the user's home
    need = {name: amount * workers for name, amount in engine.resources.items() if amount}
    need.pop("GPU", None)  # there are as many as there are
    _init(
        ray,
        address="local",
        num_cpus=math.ceil(max(need.pop("CPU", 0), os.cpu_count() or 1)),
        resources=need,
        include_dashboard=False,
        _node_ip_address=HERE,
        _temp_dir=str(folder),
    )


def _init(ray: Any, **how: Any) -> None:
    """Ray has a handler for SIGTERM, with which a run could not save when it is to stop."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(logging_level=logging.ERROR, **how)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@cache
def _own_token() -> str:
    """The same for all clusters of this process, because Ray remembers the first."""
    return secrets.token_hex(32)


def _users_token() -> Path:
    return Path.home() / ".ray" / "auth_token"


@contextmanager
def _folder() -> Iterator[Path]:
    """Where Ray keeps its sockets and logs; a process waits to remove it, if this one is killed."""
    inside = tempfile.gettempdir()
    folder = tempfile.mkdtemp(
        prefix="offbeat-", dir=inside if len(inside) < LONGEST_SOCKET else "/tmp"
    )
    read, write = os.pipe()
    with warnings.catch_warnings():  # threads of the parent are not there, and not missed
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            os.setsid()
            os.closerange(0, read)
            os.closerange(read + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            os.read(read, 1)  # until nobody has the other end any more
            _remove(folder)
        finally:
            os._exit(0)
    os.close(read)
    try:
        yield Path(folder)
    finally:
        os.close(write)
        with suppress(ChildProcessError):  # where the program ignores SIGCHLD
            os.waitpid(pid, 0)


def _remove(folder: str) -> None:
    """Ray's processes end by themselves, some a minute later; until then they may write there."""
    for _ in range(100):
        left = [process for process in Path("/proc").glob("[0-9]*") if _works_in(process, folder)]
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        if not left and not os.path.exists(folder):
            return
        time.sleep(LOOK)


def _works_in(process: Path, folder: str) -> bool:
    """Whether Ray has started it for a cluster there; some give themselves another name."""
    with suppress(OSError):  # it has ended, or is another user's
        words = (process / "cmdline").read_bytes()
        if not words.startswith(b"ray::"):  # whatever a program has forked may have its logs open
            return folder.encode() in words
        real = os.path.realpath  # also of one that is closed meanwhile
        return any(real(one).startswith(real(folder)) for one in (process / "fd").iterdir())
    return False


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Ray and the token of our own cluster change it for the processes that Ray starts."""
    before = {name: word for name, word in os.environ.items() if name.startswith("RAY_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(before)
