"""Turns simulated runs into what the pictures of the documentation show: bars, marks, curves."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import offbeat as ob
from offbeat.engine.sim.cluster import Machine
from offbeat.engine.sim.compute_times import distribution
from offbeat.log.records import Admitted, Dropped, Pulled, Updated

BATCH = 32
UNEVEN = ("20ms", "23ms", "58ms")  # one worker is slow, always


@dataclass(frozen=True)
class Panel:
    """One simulated run to be drawn as a timeline."""

    title: str
    sync: str
    times: tuple[str, ...] = UNEVEN
    exchange: float = 0.0  # seconds of a pull, and of a push
    until: float = 0.4
    seed: int = 3


@dataclass(frozen=True)
class Line:
    """One simulated training to be drawn as a curve; `optimizer` names one of torch's."""

    name: str
    sync: str
    optimizer: str = "SGD"
    settings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """Curves of several trainings: accuracy against `across`, epochs or megabytes sent."""

    title: str
    across: str
    lines: tuple[Line, ...]
    workers: int
    epochs: int


@dataclass(frozen=True)
class Bar:
    """What one worker did for a while; `blocker` is whom it waited for."""

    worker: int
    kind: str  # "compute", "exchange" or "wait"
    since: float
    until: float
    blocker: int | None = None
    steps: int = 1


@dataclass(frozen=True)
class Mark:
    """An update of the store: who contributed, and with which weight; or what was dropped."""

    time: float
    parts: tuple[tuple[int, float], ...]
    staleness: int
    dropped: bool = False


class Recorder(ob.Listener):
    """Keeps the records of a run."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def see(self, record: Any) -> None:
        self.records.append(record)


def records(panel: Panel) -> list[Any]:
    """What happened in the run of `panel`, somewhat beyond what is drawn of it."""
    machines = tuple(Machine(distribution(t), latency=panel.exchange) for t in panel.times)
    recorder = Recorder()
    ob.estimate(
        ob.Cluster(machines), panel.sync, steps=60, seed=panel.seed, listeners=[recorder]
    )  # fmt: skip
    return recorder.records


def timeline(panel: Panel) -> tuple[list[Bar], list[Mark]]:
    """The bars of each worker and the marks of the store, as far as they are drawn."""
    happened = records(panel)
    bars = [bar for bar in _bars(happened, panel.exchange) if bar.since < panel.until]
    return bars, [mark for mark in _marks(happened) if mark.time <= panel.until]


def _bars(happened: Iterable[Any], exchange: float) -> Iterable[Bar]:
    free: dict[int, float] = {}  # when each worker was done with its last exchange
    after_push: dict[int, bool] = {}
    counted: dict[int, int] = {}  # steps since the last push that are drawn already
    arrived: set[tuple[int, int]] = set()
    last = 0  # the worker whose push let the others go

    def gap(worker: int, until: float, steps: int) -> Iterable[Bar]:
        since = free.get(worker, until)
        if until - since > 1e-9:
            waits = after_push.get(worker, False) and not steps
            kind, blocker = ("wait", last) if waits else ("compute", None)
            yield Bar(worker, kind, since, until, blocker, max(1, steps))

    for record in happened:
        if isinstance(record, Pulled):
            worker, start, leases = record.worker, record.time, record.leases
            steps = len(leases) - counted.get(worker, 0) if leases else 0
            counted[worker] = len(leases)
            pushes = [(worker, start, steps, False)]
        elif isinstance(record, Admitted):
            arrived.add((record.worker, record.sequence))
            pushes = [(record.worker, record.time - exchange, len(record.leases), True)]
        elif isinstance(record, Updated | Dropped):
            parts = record.parts if isinstance(record, Updated) else [record.part]
            pushes = [
                (part.worker, record.time - exchange, len(part.leases), True)
                for part in parts
                if (part.worker, part.sequence) not in arrived
            ]
        else:
            continue
        for worker, start, steps, is_push in pushes:
            if is_push:
                steps -= counted.pop(worker, 0)
            yield from gap(worker, start, steps)
            if exchange:
                yield Bar(worker, "exchange", start, start + exchange)
            free[worker], after_push[worker] = start + exchange, is_push
            if is_push:
                last = worker


def _marks(happened: Iterable[Any]) -> Iterable[Mark]:
    for record in happened:
        if isinstance(record, Updated):
            parts = tuple((part.worker, part.weight) for part in record.parts)
            yield Mark(record.time, parts, max(part.staleness for part in record.parts))
        elif isinstance(record, Dropped):
            yield Mark(record.time, ((record.part.worker, 1.0),), 0, dropped=True)


def curve(line: Line, chart: Chart) -> list[tuple[float, float]]:
    """Accuracy in percent at each test of a training, against what the chart has across."""
    import torch

    from offbeat.recipes import digits

    task = digits()
    recorder = Recorder()
    run = ob.train(
        task.model, task.data, task.loss, test=task.test, discipline=line.sync,
        optimizer=partial(getattr(torch.optim, line.optimizer), **line.settings),
        engine="sim", workers=chart.workers, batch_size=BATCH, epochs=chart.epochs,
        listeners=[recorder],
    )  # fmt: skip
    sent = {
        record.version: sum(part.bytes for part in record.parts)
        for record in recorder.records
        if isinstance(record, Updated)
    }
    points = []
    for test in run.history.tests:
        megabytes = sum(size for version, size in sent.items() if version <= test.version) / 1e6
        across = test.samples / len(task.data) if chart.across == "epochs" else megabytes
        points.append((round(across, 3), round(100 * (test.accuracy or 0.0), 1)))
    return points
