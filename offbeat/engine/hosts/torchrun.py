"""torchrun over several hosts: rank 0 has the store beside it, and every rank dials there."""

import datetime
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat.config.run_config import Hosts, RunConfig
from offbeat.engine.bring_up import bring_up
from offbeat.engine.hosts.admission import Entrance
from offbeat.engine.hosts.listener import Security, listen
from offbeat.engine.hosts.sketch import sketch_of
from offbeat.engine.hosts.store import HostsLauncher, HostsRoles
from offbeat.engine.hosts.token import token_at
from offbeat.engine.hosts.worker import Entering, HostParticipant, ask_terms
from offbeat.engine.local.launcher import run_local
from offbeat.engine.local.process import Child, fork
from offbeat.engine.local.shared_memory import Counts
from offbeat.engine.script import Participant, script_job
from offbeat.engine.signals import heard, keep_children
from offbeat.errors import ConfigError, RunError
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.tls import store_context

WAIT = datetime.timedelta(minutes=5)  # that ranks wait for rank 0 to come to its loop


class Rank(HostParticipant):
    """One of torchrun's processes; rank 0 waits at the end for the launcher that it has forked."""

    def __init__(self, config: RunConfig, entering: Entering, script: Path, store: "Store | None"):
        self.beside = store
        self.open = ExitStack()
        # A terminal or a scheduler signals every process, and torchrun sends on what it has got.
        self.open.enter_context(heard(self._ask, once=False))
        super().__init__(config, entering, script)

    def _ask(self, number: int) -> None:
        """The store sees it with the next message, saves, and stops all ranks."""
        if self.beside is not None:
            self.beside.roles.shared.counts[Counts.STOPPING] = number

    def left(self, error: BaseException | None) -> None:
        super().left(error)
        self.open.close()
        if self.beside is not None and (error is None or isinstance(error, KeyboardInterrupt)):
            self.beside.wait()


class Store:
    """The launcher beside rank 0, in a process of its own."""

    def __init__(self, config: RunConfig, entrance: Entrance):
        keep_children()  # for good: rank 0 waits for the launcher when its script is through
        # Listeners are objects of the ranks' scripts, and the launcher is neither of them.
        run = bring_up(replace(config, listeners=()), script_job(config))
        self.roles = run.roles(partial(HostsRoles, entrance))

        def serve() -> None:
            with run.kept:
                run_local(self.roles, run.kept, run.tally, (), HostsLauncher)

        with run.kept.passed_on():
            self.child: Child = fork("offbeat host", serve)

    def wait(self) -> None:
        """Until it has written what the run came to."""
        words = self.child.reap()
        self.roles.shared.arena.close()
        if words is not None:
            raise RunError(words.message)
        if not self.child.well:
            raise RunError(
                "the launcher was killed before it had written what the run came to: start the "
                "script again, with ob.join(out=..., resume=True)"
            )


@dataclass(frozen=True)
class HostsTorchrun:
    """torchrun has started every process on several hosts; its environment says who this one is."""

    rank: int
    workers: int
    run: str
    master: str
    port: int

    def settle(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if given.get("token") is None:
            raise ConfigError(
                "torchrun has started processes on several hosts, and these prove to each other "
                "that they belong together: write ob.join(token='offbeat.token') with a file that "
                "offbeat token makes and every host has, or token='$NAME' for a variable"
            )
        threads = torch.get_num_threads()
        return {**given, "workers": self.workers, "engine": Hosts(), "threads": threads}

    def participant(self, config: RunConfig) -> Participant:
        assert config.token is not None
        token, script = token_at(config.token), Path(sys.argv[0])
        sketch = sketch_of(config, script)
        # Where the store listens is told through the one that torchrun has for its processes.
        # That proves nothing, and need not: whoever listens there has to know the token.
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        told: Any = TCPStore(self.master, self.port, is_master=False, timeout=WAIT)
        key = f"offbeat/{self.run}/{again}/address"
        store = None
        if self.rank == 0:
            listening = listen(Address(self.master, 0))
            address = Address(self.master, listening.getsockname()[1])
            security = Security(token)
            if not address.stays_here:
                security = Security(token, *store_context(None))
            settings = {"workers": self.workers}
            with listening:
                store = Store(config, Entrance(listening, security, settings, sketch))
            told.set(key, str(address))
        dialer = Dialer(Address.read(told.get(key).decode()), token)
        entering = Entering(dialer, ask_terms(dialer).sketch, self.rank, insists=True)
        return Rank(config, entering, script, store)
