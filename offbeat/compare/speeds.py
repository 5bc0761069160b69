"""Whose speed a comparison measures: real processes, real ones slowed down, or simulated ones."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.config.units import duration, real, show
from offbeat.discipline.course import as_course
from offbeat.engine.sim.cluster import Cluster, Machine
from offbeat.errors import ConfigError


def _check_straggler(value: float) -> None:
    if not 1 <= real("straggler", value, "write for example 4") < math.inf:
        raise ConfigError(
            f"a straggler is at least 1 times slower, not {value!r}: write --straggler 4"
        )


@dataclass(frozen=True)
class RealSpeeds:
    """Processes on this machine; `emulate` are the least seconds of each worker's step.

    One value serves for all workers; otherwise d devices use the first d. The last worker of two
    or more is `straggler` times slower.
    """

    emulate: str | Sequence[float | str] | None = None
    straggler: float = 1.0

    def __post_init__(self) -> None:
        _check_straggler(self.straggler)
        if self.emulate is None:
            if self.straggler != 1:
                raise ConfigError(
                    "--straggler slows an emulated worker down: add --emulate 20ms, "
                    "or use --engine sim"
                )
            return
        words = self.emulate.split(",") if isinstance(self.emulate, str) else self.emulate
        object.__setattr__(self, "emulate", tuple(duration(word) for word in words))

    def check(self, most: int) -> None:
        """Refuse speeds that do not fit `most` devices."""
        if self.emulate is not None and len(self.emulate) not in (1, most):
            raise ConfigError(
                f"--emulate has {len(self.emulate)} times and the most devices are {most}: "
                f"write one time for all, or {most}"
            )

    def steps(self, devices: int) -> list[float] | None:
        """Least seconds of each worker's step, or None where speeds are what they are."""
        if self.emulate is None:
            return None
        every = [float(step) for step in self.emulate]
        steps = every * devices if len(every) == 1 else every[:devices]
        return [*steps[:-1], steps[-1] * self.straggler] if devices > 1 else steps

    def options(self, devices: int) -> dict[str, Any]:
        """What `train` takes."""
        return {"engine": "local", "workers": devices, "emulate": self.steps(devices)}

    def described(self, devices: int) -> dict[str, Any]:
        """What a run folder says of such workers."""
        return {"engine": "local", "emulate": self.steps(devices)}

    def work(self, discipline: str, devices: int) -> float:
        """Expected real seconds for a step's worth of samples, up to a factor."""
        steps = self.steps(devices)
        if steps is None:
            return 1 / min(devices, len(os.sched_getaffinity(0)))
        last = as_course(discipline).stages[-1]
        if last.wait is not None:  # in the end all go at the pace of the slowest
            return max(steps) / devices
        return 1 / sum(1 / max(step, 1e-9) for step in steps)

    def __str__(self) -> str:
        words = "processes on this machine"
        if self.emulate is not None:
            each = dict.fromkeys(show(float(step)) for step in self.emulate)
            words += f", emulated: {', '.join(each)} a step"
        return words + _straggling(self.straggler)


@dataclass(frozen=True)
class Simulated:
    """Workers in virtual time; d devices are the first d of `cluster`, or all like its only one.

    The last worker of two or more is `straggler` times slower.
    """

    cluster: Cluster | str | None = None
    straggler: float = 1.0

    def __post_init__(self) -> None:
        _check_straggler(self.straggler)
        if isinstance(self.cluster, str):
            object.__setattr__(self, "cluster", Cluster.read(self.cluster))
        elif self.cluster is None:
            object.__setattr__(self, "cluster", Cluster.equal(1))

    def check(self, most: int) -> None:
        """Refuse speeds that do not fit `most` devices."""
        assert isinstance(self.cluster, Cluster)
        if len(self.cluster) not in (1, most):
            raise ConfigError(
                f"--cluster describes {len(self.cluster)} workers and the most devices are "
                f"{most}: describe one for all, or {most}"
            )

    def of(self, devices: int) -> Cluster:
        """The cluster of so many devices."""
        assert isinstance(self.cluster, Cluster)
        machines = self.cluster.machines
        machines = machines * devices if len(machines) == 1 else machines[:devices]
        if devices > 1 and self.straggler != 1:
            last = machines[-1]
            slow = Machine(**vars(last) | {"compute": last.compute.slowed(self.straggler)})
            machines = (*machines[:-1], slow)
        return self.cluster.with_machines(machines)

    def options(self, devices: int) -> dict[str, Any]:
        """What `train` takes."""
        return {"engine": "sim", "cluster": self.of(devices)}

    def described(self, devices: int) -> dict[str, Any]:
        """What a run folder says of such workers."""
        return {"engine": "sim", "cluster": self.of(devices).to_toml()}

    def work(self, discipline: str, devices: int) -> float:
        """Expected real seconds, up to a factor: one process computes every gradient."""
        return 1.0

    def __str__(self) -> str:
        return f"simulated workers, virtual time{_straggling(self.straggler)}"


def _straggling(slower: float) -> str:
    return "" if slower == 1 else f"; the last of two or more is {slower:g} times slower"


Speeds = RealSpeeds | Simulated
