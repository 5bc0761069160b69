"""A worker's script in a thread of its own: it runs from one turn to the next, and then waits."""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from offbeat.config.run_config import RunConfig, anywhere
from offbeat.data.lease import Lease
from offbeat.data.random_state import RandomState
from offbeat.data.reader import Reader
from offbeat.engine.script import Script, host, reseed, show_version, stages_of
from offbeat.engine.sim.cluster import Cluster
from offbeat.errors import ConfigError
from offbeat.split.script_model import Stages
from offbeat.worker.worker import NumberWorker, ScriptStep, Worker


class TakenOut(BaseException):
    """Takes a thread out of its script when its worker is gone; users catch Exception at most."""


class ScriptThread:
    """A worker's script in a thread of its own; it is this worker's host and participant.

    The thread runs from `turn` until it hands back, and the one who called `turn` waits for that.
    """

    def __init__(self, script: Script, rank: int, cluster: Cluster, asked: Mapping[str, Any]):
        self.script, self.rank, self.cluster, self.asked = script, rank, cluster, asked
        self.workers = len(cluster)
        self.module = script.module()
        self.config: RunConfig | None = None
        self.reader: Reader | None = None
        self.worker: Worker | None = None
        self.made: ScriptStep | None = None  # the step that it has made at this turn
        self.lease: Lease | None = None  # what it is handed next
        self.ending = self.running = self.finished = False
        self.stopping = self.away = False  # the run's end; its loop was left
        self.error: BaseException | None = None
        self.chance = RandomState()  # where it was when it last handed back
        self.go, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._play, name=f"worker {rank}", daemon=True)
        self.thread.start()

    # ------------------------------------------------------------ from outside the thread

    def turn(self, lease: Lease | None = None) -> None:
        """Let the script run until it hands back or ends; raises what it raised."""
        self.lease = lease
        self.running = True
        self.go.release()
        self.back.acquire()
        self.running = False
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def end(self) -> None:
        """Take the thread out of its script, wherever that stands."""
        if self.running:  # Ctrl-C came while it computed
            self.back.acquire()
            self.running = False
        self.ending = True
        while not self.finished:
            self.go.release()
            self.back.acquire()
        self.thread.join()

    # ------------------------------------------------------------ in the thread

    def _play(self) -> None:
        self.go.acquire()
        try:
            if not self.ending:
                host.set(self)
                torch.set_num_threads(torch.get_num_threads())
                self.script.play(self.module)
        except TakenOut:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.finished = True
            self.back.release()

    def _hand_back(self) -> Lease | None:
        self.back.release()
        self.go.acquire()
        if self.ending:
            raise TakenOut
        return self.lease

    def settle(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        mine = {"workers": self.workers, "engine": "sim", "cluster": self.cluster}
        return anywhere(given) | {**self.asked, **mine}

    def participant(self, config: RunConfig) -> "ScriptThread":
        if self.config is not None:
            raise ConfigError("a script joins one run: use one ob.join() and one loop")
        self.config = config
        self.reader = config.reader()
        self.lease = self._hand_back()
        return self

    def next(self) -> Lease | None:
        return self.lease

    def batch(self, lease: Lease) -> Any:
        assert self.config is not None
        assert isinstance(self.worker, NumberWorker)
        reseed(self.config.seed, lease)
        return self.worker.sender.replica.read(lease)

    def done(self, lease: Lease, step: ScriptStep, last: bool) -> Lease | None:
        self.made, self.stopping = step, last
        return self._hand_back()

    def stop(self) -> None:
        self.stopping = True
        self._hand_back()

    def leave(self) -> None:
        if self.ending or self.worker is None:  # taken out of it, it has not left
            return
        assert isinstance(self.worker, NumberWorker)
        show_version(self.worker)
        self.away = True

    def left(self, error: BaseException | None) -> None:
        return

    @property
    def device(self) -> torch.device:
        assert isinstance(self.worker, NumberWorker)
        return self.worker.sender.replica.device.place

    @property
    def stages(self) -> Stages:
        assert isinstance(self.worker, NumberWorker)
        return stages_of(self.worker)

    @property
    def version(self) -> int:
        return 0 if self.worker is None else self.worker.base

    @property
    def epochs(self) -> int:
        return 0 if self.worker is None else self.worker.epochs

    @property
    def progress(self) -> int:
        return 0 if self.worker is None else self.worker.progress
