"""The store's host: a launcher whose workers come over the network, and are not its to start."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from offbeat.config.run_config import Hosts, RunConfig
from offbeat.engine.bring_up import ReadyRun, bring_up
from offbeat.engine.hosts.admission import Entrance, NetworkAcceptor, plain, threads_of_links
from offbeat.engine.hosts.listener import Security, listen
from offbeat.engine.hosts.worker import Entering, HostWorker, packing_of
from offbeat.engine.local.backup_process import BackupWire
from offbeat.engine.local.cpu import CpuPolicy
from offbeat.engine.local.launcher import Launcher, run_local
from offbeat.engine.local.roles import Roles
from offbeat.engine.local.server_process import LogRelay, ServerParts
from offbeat.engine.local.sharded_parameters import ShardedParameters
from offbeat.engine.result import Run
from offbeat.engine.script import script_job
from offbeat.engine.spawn import TESTER
from offbeat.model.table import total_bytes
from offbeat.protocol.round import Copies
from offbeat.protocol.server import ServerSettings
from offbeat.store.parameters import Parameters
from offbeat.store.store import Store
from offbeat.store.worker_held import DistantCopies, DistantParameters, WorkerCopy
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.link import StoreGone
from offbeat.transport.tcp_link import DialedStore
from offbeat.transport.tcp_port import TcpPort

# What is said to a store and holds for all its workers.
FOR_ALL = (
    *("discipline", "codec", "pull_codec", "seed", "layout", "shards", "shares"),
    *("overlap", "prefetch", "nonfinite", "via"),
)


class HostsRoles(Roles):
    """The parts of a run whose workers are on other hosts."""

    held_by_workers = DistantParameters

    def __init__(self, entrance: Entrance, *what: Any):
        super().__init__(*what)
        self.entrance = entrance

    def _server_parts(
        self,
        store: Store,
        sharded: ShardedParameters | None,
        wire: BackupWire | None,
        relay: LogRelay,
    ) -> ServerParts:
        patience = self.local.patience
        final = [*self.shared.tested, self.shared.averages]
        packing = packing_of(self.job, self.meets)
        port = TcpPort(self.shared.slots, store.parameters, final, packing, patience, store.cells)
        return replace(
            super()._server_parts(store, sharded, wire, relay),
            port=port,
            cpu=CpuPolicy(),
            listen=partial(threads_of_links, patience),
            acceptor=NetworkAcceptor(self.entrance, port, store.log, patience),
        )

    def _copies(self, parameters: Parameters, copies: list[WorkerCopy]) -> Copies:
        assert isinstance(parameters, DistantParameters)
        return DistantCopies(parameters, copies, self.shared.plan.updater)

    def _settings(self) -> ServerSettings:
        assert isinstance(self.local, Hosts)
        return replace(super()._settings(), begin=self.local.begin)


class HostsLauncher(Launcher):
    """A launcher whose workers come by themselves, from wherever they are."""

    scripted = True

    def _start_one(self, number: int) -> None:
        if number == TESTER:
            super()._start_one(number)

    def _left_alone(self) -> bool:
        return False  # nobody here is its child


class DialingLauncher(Launcher):
    """Starts workers that dial."""

    def __init__(self, *what: Any):
        super().__init__(*what)
        self.started: set[int] = set()  # workers, since the server was

    def _start(self, *what: Any) -> None:
        self.started.clear()
        super()._start(*what)

    def _start_one(self, number: int) -> None:
        if number == TESTER:
            super()._start_one(number)
            return
        instead = number in self.started
        self.started.add(number)
        self._dial(number, instead)

    def _dial(self, number: int, instead: bool) -> None:
        """Start a worker, the first of this number or one instead of another that is gone."""
        raise NotImplementedError


class LoopbackRoles(HostsRoles):
    """The same with workers on this machine, which talk to the store over TCP all the same."""

    def dial(self, number: int, instead: bool) -> None:
        """As a worker: come, and train."""
        assert isinstance(self.local, Hosts)
        entrance = self.entrance
        host, port = entrance.listening.getsockname()[:2]
        encrypts = entrance.security.context is not None
        dialer = Dialer(Address(host, port), entrance.security.token, encrypts)
        request = Entering(dialer, plain(entrance.sketch), number, instead, True).request()
        maker = DialedStore(dialer, request, self.local.patience)
        try:
            HostWorker(self.job, self.local, maker, None).run()
        except StoreGone:
            return  # the launcher knows, and starts everybody anew


class LoopbackLauncher(DialingLauncher):
    """Starts them by forking."""

    roles: LoopbackRoles

    def _dial(self, number: int, instead: bool) -> None:
        def main() -> None:
            self._forget_my_ends()
            self.roles.dial(number, instead)

        self._fork(number, main)


def run_on_loopback(run: ReadyRun) -> Run:
    """Train with processes of this machine that talk over TCP."""
    listening = listen(Address("127.0.0.1", 0))
    with listening:
        entrance = Entrance(listening, Security(secrets.token_bytes(32)), {}, {})
        roles = run.roles(partial(LoopbackRoles, entrance))
        return run_local(roles, run.kept, run.tally, run.config.listeners, LoopbackLauncher)


def settings_for_workers(config: RunConfig, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the workers' scripts are to go by, beside what they say themselves."""
    engine = config.engine
    assert isinstance(engine, Hosts)
    told = {name: asked[name] for name in FOR_ALL if asked.get(name) is not None}
    told = {name: v if isinstance(v, int | bool) else str(v) for name, v in told.items()}
    nbytes = total_bytes(config.model.parameters())
    return told | {
        "workers": config.workers,
        "patience": engine.patience,
        "model_bytes": nbytes,
    }


def serve(config: RunConfig, entrance: Callable[[int], Entrance]) -> Run:
    """Be the store of a run until its end; `entrance` is told with how many threads to compute."""
    assert isinstance(config.engine, Hosts)
    job = script_job(config)
    with bring_up(config, job) as run:
        roles = run.roles(partial(HostsRoles, entrance(config.engine.threads_for(job))))
        return run_local(roles, run.kept, run.tally, config.listeners, HostsLauncher)
