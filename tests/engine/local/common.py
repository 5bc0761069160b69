"""What the fault tests share: a brake, a script of blows triggered by the log, and a last look."""

import gc
import os
import select
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import offbeat as ob
from offbeat.log.log import read
from offbeat.log.records import Admitted, Dropped, Joined, Record, Updated
from tests.contract.common import Problem, problem, recount, run

PATIENCE = 0.5  # for runs in which somebody is stopped; a kill is noticed without it
Step = Callable[[Record], bool]


def me() -> str:
    """The name of this process, as `ps` shows it."""
    return Path("/proc/self/comm").read_text().strip()


def children(of: int | str = "self") -> dict[str, int]:
    """The processes of the run that a process has started and that live, by their names."""
    found = {}
    for file in Path(f"/proc/{of}/task").glob("*/children"):
        try:
            pids = file.read_text().split()
        except OSError:
            continue  # it has just ended
        for pid in pids:
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if name.startswith("offbeat") and state != "Z":
                found[name] = int(pid)
    return found


def shard_processes() -> dict[str, int]:
    """The shard processes of a run that this process has started."""
    server = children().get("offbeat server")
    found = {} if server is None else children(server)
    return {name: pid for name, pid in found.items() if name.startswith("offbeat shard")}


class Gate:
    """Shut, it slows every step down; open, it does not; no kill can leave it half open.

    So a run lasts until the faults have happened, and is fast from then on.
    """

    def __init__(self, seconds: float = 0.05):
        self.seconds = seconds
        self.reading, self.writing = os.pipe()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        select.select([self.reading], [], [], self.seconds)
        return F.mse_loss(output, target)

    def open(self) -> None:
        os.write(self.writing, b"!")

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)


class Script(ob.Listener):
    """Steps in order: each is tried on every record until it is done; then the gate opens."""

    def __init__(self, gate: Gate, steps: Sequence[Step]):
        self.gate, self.left = gate, list(steps)
        self.all: list[Any] = []

    def see(self, record: Any) -> None:
        self.all.append(record)
        if self.left and self.left[0](record):
            self.left.pop(0)
            if not self.left:
                self.gate.open()


def after(updates: int) -> Step:
    """Done when the store has made so many more updates."""
    left = [updates]

    def step(record: Record) -> bool:
        left[0] -= isinstance(record, Updated)
        return left[0] <= 0

    return step


def hit(pid: int, what: signal.Signals) -> None:
    """Signal a process; one that is killed is gone afterwards, though nobody has missed it yet."""
    os.kill(pid, what)
    if what == signal.SIGKILL:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def ended(handles: Sequence[int]) -> None:
    """Wait until the processes of these handles are gone, and close them."""
    try:
        for handle in handles:  # readable when its process is gone
            assert select.select([handle], [], [], 60)[0]
    finally:
        for handle in handles:
            os.close(handle)


def strike(*names: str, what: signal.Signals = signal.SIGKILL) -> Step:
    """Signals processes, as soon as all of them are there."""

    def step(record: Record) -> bool:
        there = children()
        if not set(names) <= there.keys():
            return False
        for name in names:
            hit(there[name], what)
        return True

    return step


def seen(kind: type[Record], worker: int | None = None) -> Step:
    """Done when such a record has come."""
    return lambda record: (
        isinstance(record, kind) and (worker is None or getattr(record, "worker", None) == worker)
    )


def contributed(worker: int, incarnation: int) -> Step:
    """Done when that incarnation of a worker, or a later one, has contributed, in time or not."""

    def step(record: Record) -> bool:
        sent: list[Any] = record.parts if isinstance(record, Updated) else []
        sent = [record] if isinstance(record, Admitted) else sent
        sent = [record.part] if isinstance(record, Dropped) else sent
        return any(s.worker == worker and s.incarnation >= incarnation for s in sent)

    return step


def joined(record: Record) -> bool:
    return isinstance(record, Joined)


# ---------------------------------------------------------------- runs


def faulty(
    gate: Gate, discipline: ob.Discipline | str, steps: Sequence[Step], **options: Any
) -> tuple[ob.Run, Script, Problem]:
    """A run of three workers during which all steps of a script happen."""
    what = problem(samples=48)._replace(loss=gate)
    script = Script(gate, steps)
    options = {"workers": 3, "epochs": 12} | options
    done = run("local", what, discipline, listeners=[script], **options)
    assert not script.left, "the run was over before everything had happened"
    return done, script, what


def assert_exact(done: ob.Run, samples: int, epochs: int) -> None:
    """Every sample of every epoch was dealt with once, by the ledger and by the log."""
    ledger = done.summary().ledger
    assert len(ledger) == epochs
    for epoch in ledger:
        assert epoch["repeated"] == epoch["missing"] == 0, ledger
        assert epoch["applied"] + epoch["dropped"] == samples, ledger
    if done.folder is not None:
        records = list(read(done.folder / "log.jsonl"))
        for mine, theirs in zip(recount(records, samples, epochs), ledger, strict=True):
            assert mine.items() <= theirs.items()
        assert sum(isinstance(r, Updated) for r in records) == done.summary().updates


def assert_replays(done: ob.Run, what: Problem, **options: Any) -> None:
    assert done.folder is not None
    assert ob.replay(done.folder, *what, **options).check().compared == done.summary().updates


def open_files() -> list[str]:
    """What this process has open, without what another thread may open meanwhile."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # the listing itself
    return sorted(found)


@contextmanager
def nothing_left() -> Iterator[None]:
    """However it ends: no process, no socket, no memory stays."""
    before = Counter(open_files())
    yield
    assert children() == {}
    if Counter(open_files()) - before:
        gc.collect()  # a cycle may keep the memory of a run for a while
    assert not Counter(open_files()) - before


def message_of(kind: type[BaseException], action: Callable[[], Any]) -> str:
    """What an action says when it fails; the error itself would keep what it hangs on to open."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
