"""Who runs a script: nobody but Python, `offbeat run`, or torchrun."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.config.run_config import Alone, RunConfig, anywhere
from offbeat.engine.hosts.torchrun import HostsTorchrun
from offbeat.engine.local import scripts as local_script
from offbeat.engine.local import torchrun
from offbeat.engine.local.single import SingleParticipant
from offbeat.engine.result import Run
from offbeat.engine.script import Participant
from offbeat.errors import ConfigError
from offbeat.log.log import Listener


class SingleHost:
    """Nobody: the script runs under plain Python, with one worker."""

    rank, workers = 0, 1

    def settle(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        alone = {"workers": 1, "shares": None, "engine": Alone(torch.get_num_threads())}
        return anywhere(given) | alone

    def participant(self, config: RunConfig) -> Participant:
        return SingleParticipant(config)


@dataclass
class LaunchedHost:
    """`offbeat run` on this machine: one process until the first `batches`, then several.

    `asked` are the options that the command line names, and win over the script's.
    """

    workers: int
    asked: Mapping[str, Any]
    listeners: Sequence[Listener] = ()
    rank: int = 0
    worker: local_script.ForkedParticipant | None = None  # in a worker's process, once there is one

    def settle(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        # OpenMP's helpers are not forked: a main thread that has used them must not use them again.
        threads = None if torch.get_num_threads() == 1 else 1
        mine = {"workers": self.workers, "engine": "local", "threads": threads}
        mine["listeners"] = (*self.listeners, *given.get("listeners", ()))
        return {**given, **self.asked, **mine}

    def participant(self, config: RunConfig) -> Participant:
        if self.worker is not None:
            raise ConfigError("a script joins one run: use one ob.join() and one loop")
        found = local_script.start(config)
        if isinstance(found, Run):
            raise Finished(found)
        self.worker = found
        return found

    def ended(self, error: BaseException | None) -> bool:
        """The script is through or has failed; a worker's process goes no further than here."""
        if self.worker is not None:
            self.worker.ended(error)
        return False


@dataclass(frozen=True)
class TorchrunHost:
    """torchrun started every process, and its environment says who this one is."""

    rank: int
    workers: int
    run: str
    port: int

    def settle(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if given.get("layout") is not None:
            raise ConfigError(
                "torchrun starts a process for each worker, and a layout makes a worker of "
                f"several: write offbeat run -n {self.workers} --layout {given['layout']} "
                "instead of torchrun"
            )
        threads = torch.get_num_threads()
        return {**given, "workers": self.workers, "engine": "local", "threads": threads}

    def participant(self, config: RunConfig) -> Participant:
        return torchrun.enter(config, torchrun.Rank(self.rank, self.workers, self.run, self.port))


def torchrun_host() -> TorchrunHost | HostsTorchrun | None:
    """What torchrun's environment says, if there is more than one process."""
    words = os.environ
    if "TORCHELASTIC_RUN_ID" not in words or words.get("WORLD_SIZE", "1") == "1":
        return None
    rank, workers = int(words["RANK"]), int(words["WORLD_SIZE"])
    run, port = words["TORCHELASTIC_RUN_ID"], int(words["MASTER_PORT"])
    if int(words["LOCAL_WORLD_SIZE"]) < workers:
        return HostsTorchrun(rank, workers, run, words["MASTER_ADDR"], port)
    return TorchrunHost(rank, workers, run, port)


class Finished(SystemExit):
    """Takes the launcher out of the script; the workers went through it in their own processes."""

    def __init__(self, result: Run):
        super().__init__(0)
        self.result = result
