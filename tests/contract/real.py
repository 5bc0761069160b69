"""What a simulated cluster describes, done to real processes: by the log or by the step, never by
a clock.
"""

import multiprocessing
import os
import select
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat as ob
from offbeat.log.records import Lost, Updated
from offbeat.protocol.server import ServerProtocol

QUICK = 0.25  # a patience for runs in which somebody is stopped; else the default is never reached
SLOWEST = 0.003  # seconds: no emulated step takes longer
STEP = 0.01  # seconds of virtual time that count as one update


# ---------------------------------------------------------------- processes


def children() -> dict[str, int]:
    """The processes of the run that this process has launched, by their names."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except FileNotFoundError:
                continue
            if name.startswith("offbeat"):  # a browser that other tests use may be there too
                found[name] = int(pid)
    return found


def myself() -> int | None:
    """The number of the worker that this process is."""
    first, _, number = Path("/proc/self/comm").read_text().strip().partition(" ")
    return int(number) if first == "offbeat" and number.isdigit() else None


def strike(worker: int | str, what: int) -> int | None:
    """Send a signal to a worker, or to the "server"; None if there is none of that name."""
    pid = children().get(f"offbeat {worker}")
    if pid is not None:
        os.kill(pid, what)
    return pid


# ---------------------------------------------------------------- faults by the log


class Trouble(ob.Listener):
    """Kills and stops workers as the updates come in, and lets the stopped go on.

    A stopped worker goes on when so many more updates have come, or when it has been given up.
    """

    def __init__(self, kills: list[tuple[int, int]], stops: list[tuple[int, int, int]]):
        self.kills, self.stops = kills, stops  # (after, worker), (after, worker, for so many)
        self.updates = 0
        self.stopped: dict[int, tuple[int, int]] = {}  # pid of each, and until which update

    def see(self, record: Any) -> None:
        if isinstance(record, Lost):
            self._go_on(record.worker)
        if not isinstance(record, Updated):
            return
        self.updates += 1
        for worker in [w for w, (_, until) in self.stopped.items() if until <= self.updates]:
            self._go_on(worker)
        for _, worker in [fault for fault in self.kills if fault[0] == self.updates]:
            strike(worker, signal.SIGKILL)
        for _, worker, lasting in [fault for fault in self.stops if fault[0] == self.updates]:
            pid = strike(worker, signal.SIGSTOP)
            if pid is not None:
                self.stopped[worker] = pid, self.updates + lasting

    def _go_on(self, worker: int) -> None:
        pid, _ = self.stopped.pop(worker, (0, 0))
        if pid and pid == children().get(f"offbeat {worker}"):
            os.kill(pid, signal.SIGCONT)


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for real processes from those with a cluster: speeds, deaths and pauses.

    Links are as fast as the memory here, and nobody comes late: everybody is waited for.
    """
    options = {"threads": 1} | dict(options)  # the test's own process has one too
    cluster = options.pop("cluster", None)
    if cluster is None:
        return options
    cluster = ob.Cluster.read(cluster) if isinstance(cluster, str) else cluster
    generator = np.random.default_rng(0)
    steps = [float(m.compute.draw(generator, 9).mean()) / 10 for m in cluster.machines]
    kills, stops = [], []
    for worker, machine in enumerate(cluster.machines):
        kills += [(1 + round(f.at / STEP), worker) for f in machine.failures]
        stops += [
            (1 + round(p.at / STEP), worker, 1 + round(p.lasting / STEP)) for p in machine.pauses
        ]
    options |= {"workers": len(cluster), "emulate": [min(SLOWEST, step) for step in steps]}
    if kills or stops:
        options["listeners"] = [*options.get("listeners", ()), Trouble(kills, stops)]
        options.setdefault("checkpoint_every", 2)  # records are told at once when one is saved
    if stops:
        options["patience"] = QUICK
    return options


# ---------------------------------------------------------------- faults by the step


class AtStep:
    """A loss that does something else too, in a given worker before its given step."""

    def __init__(self, loss: Callable[..., Any], acts: Mapping[tuple[int, int], Callable[[], Any]]):
        self.loss, self.acts = loss, acts
        self.steps = 0  # each forked process counts its own

    def __call__(self, *batch: Any) -> Any:
        worker = myself()
        if worker is not None:
            self.steps += 1
            self.acts.get((worker, self.steps), int)()
        return self.loss(*batch)


@contextmanager
def held_at(version: int) -> Iterator[None]:
    """From `version` on nobody gets another turn, however long the launcher takes to see it."""
    proceed = ServerProtocol.proceed

    def held(server: ServerProtocol, now: float) -> bool:
        return server.store.version < version and proceed(server, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerProtocol, "proceed", held)
        yield


class Gate:
    """Shut until somebody opens it, in whichever process; then it stays open."""

    def __init__(self) -> None:
        self.handle = os.eventfd(0)

    def open(self) -> None:
        os.eventfd_write(self.handle, 1)

    def wait(self) -> None:
        select.select([self.handle], [], [])

    def is_open(self) -> bool:
        return bool(select.select([self.handle], [], [], 0)[0])


class Once:
    """Sends this process a signal, the first time that any process comes by."""

    def __init__(self, what: int):
        self.what = what
        self.left = os.eventfd(1, os.EFD_NONBLOCK)

    def __call__(self) -> None:
        try:
            os.eventfd_read(self.left)
        except BlockingIOError:
            return
        os.kill(os.getpid(), self.what)


class OpenWhen(ob.Listener):
    """Opens a gate at the first record of which `test` is true."""

    def __init__(self, gate: Gate, test: Callable[[Any], bool]):
        self.gate, self.test = gate, test

    def see(self, record: Any) -> None:
        if self.test(record):
            self.gate.open()


class WakeLost(ob.Listener):
    """Lets a stopped worker go on when it has been given up."""

    def see(self, record: Any) -> None:
        if isinstance(record, Lost):
            strike(record.worker, signal.SIGCONT)


class Together:
    """Holds up whoever comes by until all workers have; afterwards nobody, whatever has died."""

    def __init__(self, workers: int):
        self.passed = Gate()
        context = multiprocessing.get_context("fork")
        self.barrier = context.Barrier(workers, action=self.passed.open)

    def __call__(self) -> None:
        if not self.passed.is_open():
            self.barrier.wait()


def level(engine: str, what: Any, workers: int) -> Any:
    """The same problem, of which everybody begins the first step before anybody ends it.

    In virtual time that is so anyway; real processes come when they come.
    """
    if engine == "sim" or workers == 1:
        return what
    together = Together(workers)
    acts = {(worker, 1): together for worker in range(workers)}
    return what._replace(loss=AtStep(what.loss, acts))
