"""What is compared with what: the cells of a comparison, and the settings that they share."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.compare.speeds import RealSpeeds, Simulated, Speeds
from offbeat.compare.spell import read_disciplines
from offbeat.config.checks import at_least
from offbeat.config.task import OptimizerFactory, Task
from offbeat.data.shares import as_shares
from offbeat.discipline.course import as_course
from offbeat.errors import ConfigError
from offbeat.report.score import read_target
from offbeat.report.words import counted
from offbeat.split.layout import as_layout

STEPS = 500  # that one device makes, unless epochs are given
TESTS = 10  # of a run at the least
_LONGEST = 120  # letters of a name; file systems allow about twice as many


@dataclass(frozen=True)
class Point:
    """One cell: a discipline on so many devices, for the first time or again."""

    discipline: str
    devices: int
    repeat: int = 0

    @property
    def name(self) -> str:
        """Of its folder: no two cells have the same, and no shell minds."""
        text = self.discipline.translate(str.maketrans(":,()", "_+~~"))
        if len(text) > _LONGEST or not re.fullmatch(r"[A-Za-z0-9_+~=.-]+", text):
            short = re.sub(r"[^A-Za-z0-9_+~=.-]", "_", text)[:_LONGEST]
            text = f"{short}.{hashlib.sha256(self.discipline.encode()).hexdigest()[:8]}"
        again = f"-again{self.repeat}" if self.repeat else ""
        return f"{text}-on{self.devices}{again}"

    def __str__(self) -> str:
        again = f", repeat {self.repeat}" if self.repeat else ""
        return f"{self.discipline} on {counted(self.devices, 'device')}{again}"


@dataclass(frozen=True)
class ComparisonPlan:
    """The grid and its settings; those left out are chosen when the task is known.

    `rates` are learning rates by discipline (`ssp:3`, or `ssp` for every ssp), with "" for all.
    Repeat r uses the seed `seed + r`.
    """

    sync: Sequence[str] = ("bsp", "ssp:3", "asp", "local:16", "asup")
    devices: Sequence[int] = (1, 2, 4)
    on: Speeds = field(default_factory=RealSpeeds)
    layout: str | None = None  # of every replica; a device is then one replica
    batch_size: int | None = None  # of one worker; None takes the task's own
    drop_last: bool = False
    shares: str | None = None  # of a round's samples; None is equal ones
    epochs: int | None = None  # enough for 500 steps of one device
    evaluate_every: int | None = None  # samples; once an epoch, and ten times a run at the least
    repeat: int = 1
    seed: int = 0
    rates: Mapping[str, float] = field(default_factory=dict)
    target: float | str | None = None  # of the score, 90% or 0.35; None takes one all can reach

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync", read_disciplines(self.sync))
        for count in self.devices:
            at_least("devices", count, 1)
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ConfigError("devices must be different numbers: write for example 1,2,4,8")
        object.__setattr__(self, "devices", tuple(sorted(self.devices)))
        at_least("repeat", self.repeat, 1)
        at_least("seed", self.seed, 0)
        for name in ("batch_size", "epochs", "evaluate_every"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1)
        if self.target is not None:
            read_target(self.target)
        self.on.check(self.devices[-1])
        if self.layout is not None and as_layout(self.layout).replicas > 1:
            raise ConfigError(
                f"the layout has replicas={as_layout(self.layout).replicas}, and devices say how "
                "many there are: leave replicas out"
            )
        self._check_rates()
        for name in self.sync:
            reasons = [self.impossible(Point(name, devices)) for devices in self.devices]
            if all(reasons):
                raise ConfigError(f"--sync {name}: {reasons[-1]}")

    def _check_rates(self) -> None:
        for name, rate in self.rates.items():
            if not rate > 0:
                raise ConfigError(f"a learning rate must be above 0, not {rate:g}")
            meant = [one for one in self.sync if name in (one, _kind(one))]
            if name and not meant:
                raise ConfigError(
                    f"--lr {name}={rate:g} is for a discipline that is not compared: "
                    f"write one of {', '.join(self.sync)}"
                )
            for one in meant:
                if as_course(one).first.brings_rule:
                    raise ConfigError(
                        f"{one} brings its own rule, so --lr {name}={rate:g} has nothing to set: "
                        f"write the rate into it, as in --sync '{_kind(one)}:lr={rate:g}'"
                    )

    # ------------------------------------------------------------ cells

    def points(self) -> list[Point]:
        """Every cell in the order in which they are run: all of a first repeat, then a second."""
        return [
            Point(name, devices, repeat)
            for repeat in range(self.repeat)
            for name in self.sync
            for devices in self.devices
        ]

    def impossible(self, point: Point) -> str:
        """Why the cell cannot be run at all, or nothing."""
        try:
            course = as_course(point.discipline)
            course.for_workers(point.devices)
            if isinstance(self.on, Simulated):
                course.first.check_order()
            for one in course.stages:
                as_shares(self.shares).check(one, point.devices)
        except ConfigError as error:
            return str(error)
        return ""

    def rate(self, name: str) -> float | None:
        """The learning rate of a discipline, or None for the task's own."""
        for known in (name, _kind(name), ""):
            if known in self.rates:
                return self.rates[known]
        return None

    def optimizer(self, task: Task, name: str) -> OptimizerFactory | None:
        """The task's optimiser at the plan's rate; None where the discipline brings its rule."""
        if as_course(name).first.brings_rule:
            return None
        return task.optimizer_at(self.rate(name))

    # ------------------------------------------------------------ with a task

    def fitted(self, samples: int, usual: int) -> "ComparisonPlan":
        """The same plan with every number chosen, for a dataset of so many samples.

        `usual` is the task's own batch size, made smaller where the data cannot feed it.
        """
        most = self.devices[-1]
        batch = self.batch_size or max(1, min(usual, samples // most))
        if self.layout is not None and self.batch_size is None:
            pieces = as_layout(self.layout).pieces  # a batch divides into microbatches
            batch = max(pieces, batch // pieces * pieces)
        if batch * most > samples:
            fits = samples // most
            smaller = f"use a batch size of {fits} or less, or " if fits else ""
            raise ConfigError(
                f"{counted(most, 'device')} with {batch} samples a step need {batch * most:,} "
                f"samples, and there are {samples:,}: {smaller}use fewer devices"
            )
        epochs = self.epochs or max(1, round(STEPS * batch / samples))
        every = self.evaluate_every or max(1, samples * epochs // max(TESTS, epochs))
        return replace(self, batch_size=batch, epochs=epochs, evaluate_every=every)

    def shared(self) -> dict[str, Any]:
        """The settings of every cell that must be the same for cells to stand side by side."""
        return {
            "engine": "sim" if isinstance(self.on, Simulated) else "local",
            "straggler": self.on.straggler,
            "layout": self.layout,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "evaluate_every": self.evaluate_every,
            "seed": self.seed,
            **({"drop_last": True} if self.drop_last else {}),
            **({} if self.shares is None else {"shares": str(as_shares(self.shares))}),
        }

    def axes(self) -> dict[str, Any]:
        """The part that may grow or shrink from one invocation to the next."""
        return {
            "sync": list(self.sync),
            "devices": list(self.devices),
            "repeat": self.repeat,
            "rates": dict(self.rates),
            "target": self.target,
        }


def _kind(name: str) -> str:
    return name.partition(":")[0]
