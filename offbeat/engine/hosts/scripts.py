"""A script on several hosts: one plays it up to its loop and becomes the store, others work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offbeat.config.run_config import Hosts, RunConfig
from offbeat.engine.hosts.admission import Entrance
from offbeat.engine.hosts.listener import Security
from offbeat.engine.hosts.sketch import sketch_of
from offbeat.engine.hosts.store import serve, settings_for_workers
from offbeat.engine.hosts.supervisor import Place
from offbeat.engine.hosts.worker import Entering, HostParticipant, ask_terms
from offbeat.engine.script import Participant
from offbeat.engine.script_hosts import Finished
from offbeat.errors import ConfigError
from offbeat.log.log import Listener
from offbeat.transport.dial import Dialer
from offbeat.transport.handshake import Terms


@dataclass
class StoreHost:
    """`offbeat store`: a run's store, whose workers come over the network.

    `asked` are the options that the command line names, and win over the script's. `listening` is
    a socket that listens already; `ready` is told when workers may come.
    """

    workers: int
    begin: int | None
    asked: Mapping[str, Any]
    listening: Any
    security: Security
    script: Path
    listeners: Sequence[Listener] = ()
    ready: Callable[[], None] = lambda: None
    rank: int = 0

    def settle(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        mine = {"workers": self.workers, "engine": Hosts(begin=self.begin)}
        mine["listeners"] = (*self.listeners, *given.get("listeners", ()))
        return {**given, **self.asked, **mine}

    def participant(self, config: RunConfig) -> Participant:
        asked, sketch = dict(self.asked), sketch_of(config, self.script)

        def entrance(threads: int) -> Entrance:
            self.ready()
            settings = settings_for_workers(config, asked) | {"threads": threads}
            return Entrance(self.listening, self.security, settings, sketch)

        raise Finished(serve(config, entrance))

    def ended(self, error: BaseException | None) -> bool:
        """The script is through, or has failed; a store never comes so far."""
        return False


@dataclass
class WorkHost:
    """`offbeat work`: a worker's script, with a store on another host.

    `emulate` is the least that a step takes here, in seconds; `device` wins over the script's.
    """

    dialer: Dialer
    script: Path
    emulate: float | None = None
    place: Place = field(default_factory=Place)
    device: str | None = None
    workers: int = 0
    rank: int = 0
    terms: Terms | None = None
    entered: HostParticipant | None = field(default=None, repr=False)

    def settle(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        self.terms = ask_terms(self.dialer)
        settings = dict(self.terms.settings)
        del settings["model_bytes"]  # for whoever only asks
        self.workers = settings["workers"]
        torch.set_num_threads(settings["threads"])
        emulate = {} if self.emulate is None else {"emulate": [self.emulate] * self.workers}
        # A folder, and whoever listens, is the store's.
        own = {name: value for name, value in given.items() if name not in ("out", "resume")}
        own["device"] = self.device or own.get("device")
        return {**own, "listeners": (), **emulate, **settings, "engine": Hosts()}

    def participant(self, config: RunConfig) -> Participant:
        if self.entered is not None:
            raise ConfigError("a script joins one run: use one ob.join() and one loop")
        assert self.terms is not None
        entering = self.entering(self.terms.sketch)
        self.entered = HostParticipant(config, entering, self.script, self.place.tell)
        self.rank = self.entered.rank
        self.place.tell(self.rank)
        return self.entered

    def entering(self, sketch: Mapping[str, object]) -> Entering:
        """Which worker it would like to be."""
        return Entering(self.dialer, sketch, self.place.number, self.place.instead)

    def ended(self, error: BaseException | None) -> bool:
        """The script is through, or has failed; whether it has taken part."""
        return self.entered is not None
