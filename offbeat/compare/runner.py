"""Run the cells of a plan that its folder does not hold yet, and put all of them side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.compare.place import ComparisonFolder
from offbeat.compare.plan import ComparisonPlan, Point
from offbeat.compare.results import write_results
from offbeat.compare.source import Given, Source
from offbeat.config.describe import describe_optimizer
from offbeat.config.task import Task, metrics_of
from offbeat.data.loader import in_order, unpacked
from offbeat.data.shares import as_shares
from offbeat.discipline.course import parse
from offbeat.errors import CheckpointError, ConfigError, OffbeatError
from offbeat.log.log import Listener
from offbeat.model.evaluation import Evaluator
from offbeat.model.shared_model import untouched
from offbeat.report.digest import digest
from offbeat.report.grid import Cell, Grid
from offbeat.report.score import ACCURACY, LOSS, Judged, read_target, scored_by
from offbeat.report.summary import Summary
from offbeat.split.plan.explain import check
from offbeat.train import train


class Watcher(Listener):
    """A listener of every run that also hears of cells; a progress display is one."""

    def planned(self, work: Mapping[Point, float], kept: int) -> None:
        """Cells to run, with their expected relative cost; `kept` others are there already."""

    def starts(self, point: Point) -> None:
        """A cell is run now."""

    def ends(self, point: Point, summary: Summary | None, failed: str = "") -> None:
        """What came of it: a summary, or why it failed."""


@dataclass(frozen=True)
class Comparison:
    """A grid that has been run, and where it is kept."""

    folder: Path
    plan: ComparisonPlan
    grid: Grid
    results: dict[str, Any]  # what is in results.json
    impossible: Mapping[Point, str]

    @property
    def failed(self) -> dict[Point, str]:
        """The cells that failed, and why."""
        cells = zip(self.plan.points(), self.grid.cells, strict=True)
        return {p: c.failed for p, c in cells if c.failed and p not in self.impossible}


def compare(
    task: Task | Callable[[int], Task] | Source,
    plan: ComparisonPlan,
    out: str | Path,
    listeners: Sequence[Listener] = (),
) -> Comparison:
    """Run what is missing in the folder `out`, and write results.json and results.csv there.

    `task` may be a function that makes one from a seed, for repeats that differ in their initial
    weights. A cell that fails does not stop the others. Listeners hear every run; one that is a
    `Watcher` also hears of cells.
    """
    source: Source = Given(task) if isinstance(task, Task) or _plain(task) else task  # type: ignore[arg-type,assignment]
    runner = _Runner(source, plan, ComparisonFolder(out), listeners)
    return runner.run()


def _plain(task: object) -> bool:
    return callable(task) and not hasattr(task, "make")


def _target(plan: ComparisonPlan, task: Task) -> float | None:
    """The target as a number of the score that the runs will have."""
    if plan.target is None:
        return None
    if task.test is None:
        raise ConfigError(
            f"the target {plan.target} is of a score on a test set, and the task has none: "
            "return offbeat.Task(..., test=...), or leave --target out"
        )
    for metric in metrics_of(task.metric)[:1]:
        return scored_by(Judged(**metric.described())).read(plan.target)
    try:
        with untouched(task.model):
            classes = Evaluator(task.test, task.loss).has_classes(task.model)
    except Exception:  # the first cell says what is wrong, and where
        return read_target(plan.target)[0]
    return (ACCURACY if classes else LOSS).read(plan.target)


class _Runner:
    def __init__(
        self,
        source: Source,
        plan: ComparisonPlan,
        place: ComparisonFolder,
        listeners: Sequence[Listener],
    ):
        self.source, self.place, self.listeners = source, place, listeners
        self.watchers = [one for one in listeners if isinstance(one, Watcher)]
        self.tasks: tuple[int, Task] | None = None
        first = self.task(plan.seed)
        said = {"batch_size": first.batch_size} | unpacked({"data": first.data})
        self.samples = len(in_order(first.data))
        self.plan = replace(
            plan.fitted(self.samples, said["batch_size"]), target=_target(plan, first)
        )
        if self.plan.layout is not None and self.plan.batch_size is not None:
            check(self.plan.layout, self.task(plan.seed).model, self.plan.batch_size)
        self.impossible = {p: why for p in plan.points() if (why := plan.impossible(p))}
        for name in plan.sync:  # now, to find what does not fit before anything is run
            self.plan.optimizer(self.task(plan.seed), name)

    def task(self, seed: int) -> Task:
        """The task of a seed; the last one is kept, because repeats come one after another."""
        if self.tasks is None or self.tasks[0] != seed:
            self.tasks = (seed, self.source.make(seed))
        return self.tasks[1]

    def run(self) -> Comparison:
        shared = self.source.mark() | self.plan.shared()
        self.place.check(shared)
        with self.place.held():
            possible = [p for p in self.plan.points() if p not in self.impossible]
            missing = [p for p in possible if not self.place.finished(p, self.wanted(p))]
            self.place.write_plan(shared, self.plan.axes())
            work = {p: self.work(p) for p in missing}
            for watcher in self.watchers:
                watcher.planned(work, len(possible) - len(missing))
            for point in missing:
                self.run_one(point)
            return self.gathered()

    def work(self, point: Point) -> float:
        """What a cell is expected to cost, beside others: its steps times what one takes."""
        assert self.plan.epochs is not None
        assert self.plan.batch_size is not None
        steps = self.samples * self.plan.epochs / self.plan.batch_size
        return steps * self.plan.on.work(point.discipline, point.devices)

    # ------------------------------------------------------------ one cell

    def seed(self, point: Point) -> int:
        return self.plan.seed + point.repeat

    def wanted(self, point: Point) -> dict[str, Any]:
        """What the run folder of a cell must say to be one of this plan."""
        task = self.task(self.plan.seed)
        return {
            "discipline": str(parse(point.discipline)),
            "workers": point.devices,
            "batch_size": self.plan.batch_size,
            "epochs": self.plan.epochs,
            "seed": self.seed(point),
            "samples": self.samples,
            "optimizer": describe_optimizer(self.plan.optimizer(task, point.discipline)),
            "metric": next((one.described() for one in metrics_of(task.metric)), None),
            "origin": self.source.origin(self.seed(point)),
            **self.plan.on.described(point.devices),
        }

    def run_one(self, point: Point) -> None:
        for watcher in self.watchers:
            watcher.starts(point)
        draft = self.place.begin(point)
        try:
            task = self.task(self.seed(point))
            whole = {"drop_last": True} if self.plan.drop_last else {}  # a loader may say it
            with untouched(task.model):  # for the next point
                run = train(
                    task.model,
                    task.data,
                    task.loss,
                    discipline=point.discipline,
                    optimizer=self.plan.optimizer(task, point.discipline),
                    batch_size=self.plan.batch_size or task.batch_size,
                    epochs=self.plan.epochs or 1,
                    test=task.test,
                    seed=self.seed(point),
                    out=draft,
                    evaluate_every=self.plan.evaluate_every or self.samples,
                    listeners=self.listeners,
                    metric=task.metric,
                    origin=self.source.origin(self.seed(point)),
                    layout=self.plan.layout,
                    shares=self.plan.shares,
                    **whole | self.plan.on.options(point.devices),
                )
        except Exception as error:
            reason = self._reason(error)
            self.place.fail(point, reason, error)
            for watcher in self.watchers:
                watcher.ends(point, None, reason)
            return
        self.place.finish(point)
        for watcher in self.watchers:
            watcher.ends(point, run.summary())

    def _reason(self, error: Exception) -> str:
        try:
            self.source.blame(error)
        except OffbeatError as told:
            return str(told)
        if isinstance(error, OffbeatError):
            return str(error)
        words = str(error).strip().splitlines()
        return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__

    # ------------------------------------------------------------ all of them

    def gathered(self) -> Comparison:
        """The grid from the logs of its cells alone, and its results in the folder."""
        points = self.plan.points()
        cells = [self.cell(point) for point in points]
        title = f"{self.source.name}: {', '.join(self.plan.sync)}"
        grid = Grid(title, cells, None, self.settings())
        if grid.score() is not None:  # there is none where every cell failed
            grid = grid.aimed(self.plan.target)
        folders = {p: self.place.folder(p).relative_to(self.place.path) for p in points}
        results = write_results(self.place.path, grid, self.plan, folders, self.impossible)
        return Comparison(self.place.path, self.plan, grid, results, self.impossible)

    def cell(self, point: Point) -> Cell:
        cell = Cell(point.discipline, point.devices, point.repeat)
        if point in self.impossible:
            cell.failed = f"not possible: {self.impossible[point]}"
        elif failure := self.place.failure(point):
            cell.failed = failure
        else:
            try:
                cell.digest = digest(self.place.folder(point))
            except (CheckpointError, ConfigError) as error:
                cell.failed = str(error)
        return cell

    def settings(self) -> dict[str, str]:
        """What the cells have in common, in words."""
        plan = self.plan
        rates = [f"{name or 'all'} {rate:g}" for name, rate in plan.rates.items()]
        task = self.task(plan.seed)
        own = getattr(task.optimizer, "keywords", {}).get("lr")
        usual = "the task's own" if own is None else f"the task's own, {own:g}"
        found = {
            "task": self.source.name,
            "samples": f"{self.samples:,}",
            "engine": str(plan.on),
            "devices": ", ".join(str(n) for n in plan.devices),
            "batch size": f"{plan.batch_size:,} a worker and step",
            "epochs": str(plan.epochs),
            "learning rate": ", ".join(rates) if rates else usual,
            "seed": str(plan.seed),
        }
        if plan.shares is not None:
            found["shares"] = str(as_shares(plan.shares))
        if plan.layout is not None:
            found["layout"] = f"{plan.layout} for the replica of every device"
        return found if plan.repeat == 1 else found | {"repeats": str(plan.repeat)}
