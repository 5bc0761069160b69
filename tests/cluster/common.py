"""What the tests over hosts share: runs that last until all has happened, and a last look."""

import contextlib
import io
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.network.hosts import Host, Hosts, until
from offbeat.cli import main
from offbeat.log.log import read
from offbeat.log.records import (
    Admitted,
    Dropped,
    Ended,
    Joined,
    Left,
    Linked,
    Lost,
    Refused,
    Updated,
)
from tests.contract.common import recount

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = Path(__file__).with_name("train.py")
OFFBEAT = (sys.executable, "-m", "offbeat")
PORT = 7077
PATIENCE = 3.0
SAMPLES, EPOCHS = 96, 40  # of batches of four: a minute or more as long as the gate is shut
TOLD = Linked | Joined | Lost | Refused | Left | Ended  # when something has failed
LONG = 120.0  # seconds after which it is a fault if a run has not ended


def environment() -> dict[str, str]:
    """One thread for each process: there are many of them."""
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Command:
    """A command that runs on a host; what it prints lies in two files there."""

    def __init__(self, host: Host, *words: str | Path):
        self.host, self.words = host, list(map(str, words))
        # Others may begin at the same time, from other threads: the number is the system's.
        place = host.folder / f"said-{secrets.token_hex(4)}"
        place.mkdir()
        self.out, self.complaints = place / "out", place / "err"
        self.process = self._start()

    def _start(self) -> Any:
        with open(self.out, "w") as out, open(self.complaints, "w") as complaints:
            options = {"stdout": out, "stderr": complaints}
            return self.host.run(*self.words, environment=environment(), **options)

    def says(self, words: str) -> None:
        """Wait for something that it says."""
        until(
            lambda: words in self.said() or self.process.poll() is not None,
            f"{' '.join(self.words)} says {words!r}",
        )
        assert words in self.said(), self.said()

    def said(self) -> str:
        return self.complaints.read_text() + self.out.read_text()

    def ended(self, code: int | None = 0) -> str:
        """Wait for its end, and whether that was as it should be; what it has said."""
        found = self.process.wait(LONG)
        said = self.said()
        assert code is None or found == code, f"{' '.join(self.words)} ends with {found}\n{said}"
        return said


class Offbeat(Command):
    """A command of ours, in a process that has everything imported: that takes as long as a test.

    tests/cluster/test_page.py types them.
    """

    def _start(self) -> Any:
        self.out.touch()
        self.complaints.touch()
        return self.host.fork(lambda: main(self.words), self.out, self.complaints)


class Site:
    """A store's host, hosts of workers, and a run of theirs that goes on until the gate opens."""

    def __init__(self, hosts: Hosts, folder: Path, samples: int = SAMPLES, epochs: int = EPOCHS):
        self.hosts, self.samples, self.epochs = hosts, samples, epochs
        self.store_host, *self.others = hosts
        token = secrets.token_urlsafe(32)
        for host in hosts:
            place = host.folder / "offbeat.token"
            place.write_text(token)
            place.chmod(0o600)
        self.gate = folder / "gate"
        os.mkfifo(self.gate)
        self.handle = os.open(self.gate, os.O_RDWR)
        self.run = self.store_host.folder / "run"
        self.script = [str(SCRIPT), str(self.gate), str(samples), str(epochs)]
        self.store: Command | None = None
        self.workers: list[Command] = []
        self.size, self.kept = -1, []  # of the log when it was read last, and what it said

    # ------------------------------------------------------------ commands

    @property
    def at(self) -> str:
        return f"{self.store_host.address}:{PORT}"

    def serve(self, *options: str) -> Command:
        """A store, as soon as workers may come."""
        words = ["store", "--json", "--listen", self.at, "--out", "run", *options]
        if "--patience" not in options:
            words += ["--patience", str(PATIENCE)]
        self.store = Offbeat(self.store_host, *words, *self.script)
        self.store.says("waiting for")
        return self.store

    def work(self, host: Host, *options: str) -> Command:
        words = ["work", "--at", self.at, *options, *self.script]
        found = Offbeat(host, *words)
        self.workers.append(found)
        return found

    def begin(self, *options: str, plain: bool = True) -> None:
        """A store and a worker on each other host, all of which have contributed."""
        safe = ["--no-tls"] if plain else []
        self.serve("-n", str(len(self.others)), *safe, *options)
        for host in self.others:
            self.work(host, *safe)
        for host in self.others:
            self.contributes(host)

    def open(self) -> None:
        os.write(self.handle, b"!")

    def close(self) -> None:
        os.close(self.handle)

    # ------------------------------------------------------------ what the log says

    def records(self) -> list[Any]:
        """Of the run so far; they are written before anybody is answered."""
        path = self.run / "log.jsonl"
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            if size != self.size:
                self.kept, self.size = list(read(path)), size
        return self.kept

    def until(self, what: Callable[[Sequence[Any]], Any], told: str) -> Any:
        def look() -> Any:
            assert self.store is None or self.store.process.poll() is None, self.store.said()
            return what(self.records())

        return until(look, told)

    def number(self, host: Host) -> int:
        """The worker that is there."""
        name = host.name
        linked = [r for r in self.records() if isinstance(r, Linked) and r.host == name]
        assert linked, f"nobody has come from {name}"
        return int(linked[-1].worker)

    def contributes(self, host: Host, incarnation: int = 1, since: int = 0) -> None:
        """Wait until that incarnation of a worker has, after so many records."""

        def look(records: Sequence[Any]) -> bool:
            if not any(isinstance(r, Linked) and r.host == host.name for r in records):
                return False
            worker = self.number(host)
            return any(
                part.worker == worker and part.incarnation >= incarnation
                for part in sent(records[since:])
            )

        self.until(look, f"{host.name} contributes as incarnation {incarnation}")

    def goes_on(self, but: Sequence[Host] = (), rounds: int = 2) -> None:
        """Wait until there are updates to which all have contributed so often, some apart."""
        since = len(self.records())
        workers = {self.number(host) for host in self.others if host not in but}

        def look(records: Sequence[Any]) -> bool:
            heard = [part.worker for part in sent(records[since:])]
            return all(heard.count(worker) >= rounds for worker in workers)

        self.until(look, "the others go on")

    # ------------------------------------------------------------ the end

    def ends_right(self) -> dict[str, Any]:
        """Open the gate, wait for everybody, and look at ledger, log and replay; the summary."""
        assert self.store is not None
        self.open()
        self.store.ended()
        for worker in self.workers:
            worker.ended(None if worker.host not in self.others else 0)
        return self.exact()

    def exact(self) -> dict[str, Any]:
        """Every sample of every epoch was dealt with once, and a replay has the same bits."""
        assert self.store is not None
        summary: dict[str, Any] = json.loads(self.store.out.read_text())["summary"]
        ledger = summary["ledger"]
        assert len(ledger) == self.epochs
        for epoch in ledger:
            assert epoch["repeated"] == epoch["missing"] == 0, ledger
            assert epoch["applied"] + epoch["dropped"] == self.samples, ledger
        records = list(read(self.run / "log.jsonl"))
        counted = recount(records, self.samples, self.epochs)
        for mine, theirs in zip(counted, ledger, strict=True):
            assert mine.items() <= theirs.items()
        updates = sum(isinstance(record, Updated) for record in records)
        assert summary["updates"] == updates
        said = run_here("run", "--replay", str(self.run), *self.script)
        assert f"identical at all {updates} versions" in said, said
        return summary


@contextmanager
def site(folder: Path, workers: int = 3, **options: Any) -> Iterator[Site]:
    """Hosts for a store and so many workers; if something fails, what all have said is told."""
    delays = options.pop("delays", ())
    with Hosts(1 + workers, folder, delays) as hosts:
        found = Site(hosts, folder, **options)
        try:
            yield found
        except BaseException as error:
            for command in filter(None, [found.store, *found.workers]):
                error.add_note(f"{command.host.name}: {' '.join(command.words)}")
                error.add_note(command.said()[-3000:])
            told = [str(r)[:300] for r in found.records() if isinstance(r, TOLD)]
            error.add_note("\n".join(told))
            raise
        finally:
            found.close()


def run_here(*words: str) -> str:
    """What a command of ours prints, in this process, which has everything imported already."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = main(list(words))
    assert code == 0, out.getvalue()
    return out.getvalue()


def killed(host: Host, name: str) -> None:
    """Kill a process of a host, of the name that `ps` shows; it is gone afterwards."""

    def there() -> int | None:
        names = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in host.processes()}
        return names.get(name)

    pid = until(there, f"{name} runs on {host.name}")
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in host.processes(), f"{name} is gone")


# ---------------------------------------------------------------- records


def sent(records: Sequence[Any]) -> Iterator[Any]:
    """Contributions that have come to the store, in time or not."""
    for record in records:
        if isinstance(record, Updated):
            yield from record.parts
        elif isinstance(record, Admitted):
            yield record
        elif isinstance(record, Dropped):
            yield record.part


def of(records: Sequence[Any], kind: type, worker: int) -> list[Any]:
    """What is said of one worker."""
    return [r for r in records if isinstance(r, kind) and r.worker == worker]


def joins(records: Sequence[Any], worker: int) -> list[int]:
    return [record.incarnation for record in of(records, Joined, worker)]


def lost(records: Sequence[Any], worker: int) -> list[Any]:
    return of(records, Lost, worker)
