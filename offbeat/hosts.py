"""Who runs a script: nobody but Python, `offbeat run`, or torchrun."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offbeat.engine import local_script, torchrun
from offbeat.engine.alone import AloneSeat
from offbeat.errors import ConfigError
from offbeat.log import Listener
from offbeat.run import Run
from offbeat.script import Seat, Settings, Wanted


class Alone:
    """Nobody: the script runs under plain Python, with one worker."""

    rank, workers = 0, 1

    def settle(self, defaults: Settings) -> Settings:
        return defaults

    def seat(self, wanted: Wanted) -> Seat:
        return AloneSeat(wanted)


@dataclass
class Launched:
    """`offbeat run` on this machine: one process until the first `batches`, then several.

    `asked` are the settings that the command line names; `emulate` are the least seconds of each
    worker's step.
    """

    workers: int
    asked: Mapping[str, Any]
    emulate: tuple[float, ...] | None = None
    listeners: Sequence[Listener] = ()
    rank: int = 0
    worker: local_script.ForkedSeat | None = None  # in a worker's process, once there is one

    def settle(self, defaults: Settings) -> Settings:
        return replace(defaults, **self.asked)

    def seat(self, wanted: Wanted) -> Seat:
        if self.worker is not None:
            raise ConfigError("a script joins one run: use one ob.join() and one loop")
        found = local_script.start(wanted, self.emulate, self.listeners)
        if isinstance(found, Run):
            raise Finished(found)
        self.worker = found
        return found

    def ended(self, error: BaseException | None) -> None:
        """The script is through or has failed; a worker's process goes no further than here."""
        if self.worker is not None:
            self.worker.ended(error)


@dataclass(frozen=True)
class Torchrun:
    """torchrun started every process, and its environment says who this one is."""

    rank: int
    workers: int
    local_rank: int
    local_workers: int
    run: str
    port: int

    def settle(self, defaults: Settings) -> Settings:
        return defaults

    def seat(self, wanted: Wanted) -> Seat:
        if wanted.settings.layout is not None:
            raise ConfigError(
                "torchrun starts a process for each worker, and a layout makes a worker of "
                f"several: write offbeat run -n {self.workers} --layout "
                f"{wanted.settings.layout} instead of torchrun"
            )
        local_script.refuse_several_machines(self.workers, self.local_workers)
        return torchrun.enter(wanted, torchrun.Rank(self.rank, self.workers, self.run, self.port))


def torchrun_host() -> Torchrun | None:
    """What torchrun's environment says, if there is more than one process."""
    words = os.environ
    if "TORCHELASTIC_RUN_ID" not in words or words.get("WORLD_SIZE", "1") == "1":
        return None
    return Torchrun(
        int(words["RANK"]),
        int(words["WORLD_SIZE"]),
        int(words["LOCAL_RANK"]),
        int(words["LOCAL_WORLD_SIZE"]),
        words["TORCHELASTIC_RUN_ID"],
        int(words["MASTER_PORT"]),
    )


class Finished(SystemExit):
    """Takes the launcher out of the script; the workers went through it in their own processes."""

    def __init__(self, result: Run):
        super().__init__(0)
        self.result = result
