"""Whole runs over hosts, by the commands that a user types; what their logs say."""

import json
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from benchmarks.network.hosts import Hosts
from benchmarks.peers.launch import ROOT, PeerFailed
from offbeat.log.log import read
from offbeat.log.records import Entry, Updated

SCRIPT = Path(__file__).with_name("train.py")
OFFBEAT = (sys.executable, "-m", "offbeat")
PORT = 7077
LONG = 900.0  # seconds after which a run has failed
REACHED = "reached after seconds:"  # is said by a script that had a goal
WARM_UP = 2  # contributions of each worker that do not count


class Place(Protocol):
    """Where commands run: a host, or a folder of this machine."""

    address: str
    folder: Path

    def run(self, *words: str | Path, **options: Any) -> subprocess.Popen[Any]: ...


@dataclass(frozen=True)
class Scene:
    """So many workers, each on a host of its own, and one more host for the store."""

    emulate: Sequence[float]  # seconds of each worker's steps
    bits: float | None = None  # a second, of every host's wire, each way
    model: str = "image"
    batch: int = 32
    steps: int = 100  # of a worker, on average
    rate: float = 0.05
    seed: int = 0
    goal: tuple[str, float, int | None] | None = None  # folder of MNIST, accuracy, samples of it

    @property
    def arguments(self) -> list[str]:
        samples = str(self.steps * len(self.emulate))
        goal = [] if self.goal is None else list(map(str, self.goal))
        return [self.model, str(self.batch), samples, str(self.rate), str(self.seed), *goal]

    @contextmanager
    def hosts(self, more: int = 0) -> Iterator[Hosts]:
        """The store's, those of the workers, and so many more."""
        count = len(self.emulate) + 1 + more
        with tempfile.TemporaryDirectory() as folder, Hosts(count, Path(folder)) as hosts:
            for host in hosts:
                host.limit(self.bits)
            yield hosts


@dataclass
class Outcome:
    """A run that is over: its records, its summary, and what worker 0's script has printed."""

    records: list[Entry]
    summary: dict[str, Any]
    said: str

    @property
    def reached(self) -> float | None:
        """Seconds to the goal, if it was reached."""
        _, found, seconds = self.said.partition(REACHED)
        return float(seconds.split()[0]) if found else None

    def per_second(self, warm_up: int = WARM_UP) -> float:
        """Samples/s of all workers, each over its own seconds, until the first one's last."""
        times: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for record in self.records:
            if isinstance(record, Updated):
                for part in record.parts:
                    times[part.worker].append((record.time, part.samples))
        end = min(mine[-1][0] for mine in times.values())
        total = 0.0
        for mine in times.values():
            inside = [one for one in mine[warm_up:] if one[0] <= end]
            samples = sum(after[1] for _, after in pairwise(inside))
            total += samples / (inside[-1][0] - inside[0][0])
        return total


def train(
    scene: Scene, *options: str, meanwhile: Callable[[Hosts], None] | None = None, more: int = 0
) -> Outcome:
    """A run of this scene with these options of its store.

    When its store is there, `meanwhile` is called with all hosts: the store's, those of the
    workers, and so many `more`.
    """
    with scene.hosts(more) as hosts:
        return train_over(list(hosts), scene, options, lambda: meanwhile and meanwhile(hosts))


def train_over(
    hosts: Sequence[Place],
    scene: Scene,
    options: Sequence[str],
    meanwhile: Callable[[], object] = lambda: None,
) -> Outcome:
    """The same over hosts that are there, the store's first."""
    token = secrets.token_urlsafe(32)
    for host in hosts:
        place = host.folder / "offbeat.token"
        place.write_text(token)
        place.chmod(0o600)
    store, *others = hosts[: len(scene.emulate) + 1]
    at, count = f"{store.address}:{PORT}", len(others)
    words = ["store", "--json", "--listen", at, "--no-tls", "-n", str(count), "--out", "run"]
    serving = _start(store, *words, *options, str(SCRIPT), *scene.arguments)
    assert serving.stderr is not None
    heard = []
    while "waiting for" not in (heard or [""])[-1]:
        heard.append(serving.stderr.readline())
        if not heard[-1]:
            raise PeerFailed(f"no store: {''.join(heard).strip()}")
    meanwhile()
    working = []
    for host, seconds in zip(others, scene.emulate, strict=True):
        least = ["--emulate", f"{1e3 * seconds:g}ms"] if seconds else []
        work = ["work", "--at", at, "--no-tls", *least, str(SCRIPT), *scene.arguments]
        working.append(_start(host, *work))
    said, complaints = serving.communicate(timeout=LONG)
    printed = [worker.communicate(timeout=LONG) for worker in working]
    if serving.returncode:
        raise PeerFailed(
            f"{complaints.strip()} {printed[0][1].strip()} {serving.returncode}"[-900:]
        )
    records = list(read(store.folder / "run" / "log.jsonl"))
    return Outcome(records, json.loads(said)["summary"], "".join(out for out, _ in printed))


def _start(host: Place, *words: str) -> subprocess.Popen[str]:
    return host.run(
        *OFFBEAT,
        *words,
        environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
