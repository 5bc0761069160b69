"""Digests made by hand for the tests of the report: small, exact, and as odd as a test wants."""

from typing import Any

import msgspec

from offbeat.report.digest import RunDigest, RunEvent, Speed
from offbeat.report.grid import Cell, Grid
from offbeat.report.summary import LinkFigures, Step, Summary, Test, WorkerFigures
from offbeat.report.timeline import Segment

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def figures(discipline: str, workers: int, **changes: Any) -> Summary:
    """A summary whose numbers fit together."""
    each = WorkerFigures(
        steps=10,
        contributions=10,
        samples=320,
        compute=8.0,
        wait=1.0,
        communication=0.5,
        bytes_sent=1_000_000,
        bytes_received=1_000_000,
    )
    plain = Summary(
        discipline=discipline,
        engine="local",
        workers=workers,
        seconds=10.0,
        updates=10 * workers,
        samples=320 * workers,
        samples_per_second=32.0 * workers,
        loss=0.2,
        accuracy=0.95,
        train_loss=0.15,
        staleness_mean=0.0,
        staleness_max=0,
        staleness_counts={0: 10 * workers},
        wait_share=0.1,
        dropped=0,
        refused=0,
        lost=0,
        skipped=0,
        bytes_sent=1_000_000 * workers,
        bytes_received=1_000_000 * workers,
        memory={"store": 1_000_000, "worker": 2_000_000, "worker_peak": 300_000_000},
        overlap={},
        per_worker=[each] * workers,
        ledger=[{"applied": 320 * workers}],
        parameter_hash="0123",
    )
    return msgspec.structs.replace(plain, **changes)


def run(
    discipline: str = "bsp", workers: int = 2, *, reaches: float = 6.0, **changes: Any
) -> RunDigest:
    """A run that is at 90 % after `reaches` seconds; `changes` are of the digest or its summary."""
    own = {k: changes.pop(k) for k in list(changes) if k in RunDigest.__struct_fields__}
    summary = figures(discipline, workers, **changes)
    final = summary.accuracy
    tests = []
    if final is not None:
        accuracies = [0.5, min(0.9, final), final]
        times = [reaches / 2, reaches, 2 * reaches]
        tests = [
            Test(time, 5 * n, 100 * n, 1 - accuracy, accuracy)
            for n, (time, accuracy) in enumerate(zip(times, accuracies, strict=True), 1)
        ]
    fields: dict[str, Any] = {
        "name": f"{discipline}-{workers}",
        "summary": summary,
        "finished": True,
        "batch_size": 32,
        "virtual": summary.engine == "sim",
        "ideal": 40.0 * workers,
        "tests": tests,
        "losses": [Step(float(n), n, 32 * n, 2.0 / n) for n in range(1, 11)],
        "speeds": [Speed(float(n), 30.0 + n % 3) for n in range(1, 11)],
        "segments": stretches(workers),
        "window": (0.0, 3.0),
        "events": [RunEvent(0.0, "joined", n) for n in range(workers)],
    }
    return RunDigest(**(fields | own))


def afar() -> list[WorkerFigures]:
    """Three workers of two hosts: one computes, one is in its link, one waits for the second."""
    times = [(8.0, 1.0, 0.5), (1.0, 0.2, 8.3), (1.0, 8.0, 0.5)]
    links = [
        LinkFigures("near", 0.0003, 900_000, 1_100_000, 2e8, 3e8, 0.02),
        LinkFigures("far away", 0.0213, 900_000, 1_100_000, 3e5, 2.5e5, 8.0),
        LinkFigures("near", 0.0004, 900_000, 1_100_000, 0.0, 0.0, 0.0),
    ]
    return [
        WorkerFigures(10, 10, 320, *time, 800_000, 1_000_000, link=link)
        for time, link in zip(times, links, strict=True)
    ]


def hosts(discipline: str = "bsp", **changes: Any) -> Cell:
    """A run of theirs."""
    own = {"per_worker": afar(), "engine": "hosts", "wire_bytes": 6_000_000, **changes}
    return cell(discipline, 3, **own)


def stretches(workers: int, rounds: int = 3) -> list[Segment]:
    """Lock-step in which everybody waits for worker 0."""
    found = []
    for at in range(rounds):
        for worker in range(workers):
            middle = at + 0.8 - 0.1 * min(worker, 4)
            found += [
                Segment(worker, "compute", at, middle),
                Segment(worker, "exchange", middle, middle + 0.1),
                Segment(worker, "wait", middle + 0.1, at + 1.0, 0 if worker else None),
            ]
    return found


def grid(*cells: Cell, **more: Any) -> Grid:
    return Grid(more.pop("title", "A comparison"), list(cells), **more)


def cell(discipline: str = "bsp", devices: int = 2, repeat: int = 0, **changes: Any) -> Cell:
    return Cell(discipline, devices, repeat, run(discipline, devices, **changes))


def whole() -> Grid:
    """Three disciplines on 1, 2 and 4 devices, twice each, in emulated speeds; one cell failed."""
    cells = []
    for name, factor, stale, accuracy in (
        ("bsp", 1.0, 0, 0.96),
        ("ssp:3", 0.7, 1, 0.95),
        ("asp", 0.5, 3, 0.94),
    ):
        for devices in (1, 2, 4):
            for repeat in (0, 1):
                old = stale if devices > 1 else 0
                cells.append(
                    cell(
                        name,
                        devices,
                        repeat,
                        reaches=8 * factor / devices + 0.1 * repeat,
                        accuracy=accuracy - 0.002 * repeat,
                        samples_per_second=40.0 * devices**0.8 / factor**0.3 + repeat,
                        staleness_mean=float(old),
                        staleness_max=2 * old,
                        staleness_counts={0: 5, old: 20, 2 * old: 5},
                        emulated=[0.02] * devices,
                    )
                )
    cells.append(Cell("hogwild", 4, 0, None, "RunError: worker 2 ended with code 9"))
    return grid(*cells, target=0.9, settings={"recipe": "digits", "batch size": "32"})
