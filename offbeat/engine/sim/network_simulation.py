"""A simulation whose workers are on hosts: pushes and pulls are flows over links they share."""

import heapq
import math
from typing import Any

import msgspec

from offbeat.config.job import AnyJob
from offbeat.engine.sim.cluster import Cluster
from offbeat.engine.sim.hosts import Host
from offbeat.engine.sim.network import Bounds, Trunk
from offbeat.engine.sim.simulation import EventKind, SimEvent, Simulation
from offbeat.protocol.messages import Welcome
from offbeat.store.store import Store
from offbeat.worker.contribution import Snapshot

UP, DOWN = 0, 1  # pushes and pulls
_WAYS = {EventKind.ARRIVED: UP, EventKind.BEGIN: DOWN}
_NOWHERE = -1  # the branch of workers on the store's own host: they use no link


class Transfer(msgspec.Struct):
    """What is under way from a worker or to it."""

    kind: EventKind  # of the event that it ends with
    left: float  # bytes, as it last began or went on
    since: float  # when that was
    moving: bool = False  # it stands still while its worker is paused


def simulation(job: AnyJob, cluster: Cluster, store: Store) -> Simulation:
    """What simulates a cluster: links are the workers' own, or shared."""
    return (NetworkSimulation if cluster.network else Simulation)(job, cluster, store)


class NetworkSimulation(Simulation):
    """Transfers take what the network gives them; hosts are cut off, and fail."""

    def __init__(self, job: AnyJob, cluster: Cluster, store: Store):
        super().__init__(job, cluster, store)
        self.network = network = cluster.network
        self.hosts = [host for host in network.hosts if host.name != network.store.host]
        place = {host.name: number for number, host in enumerate(self.hosts)}
        place[network.store.host] = _NOWHERE
        self.latency = [0.0] * len(cluster)
        self.branch = [_NOWHERE] * len(cluster)
        self.there: list[list[int]] = [[] for _ in self.hosts]  # the workers on each host
        own: list[Bounds] = []  # of workers that are on no host
        for number, machine in enumerate(cluster.machines):
            if machine.host:
                self.branch[number] = branch = place[machine.host]
                if branch != _NOWHERE:
                    self.latency[number] = self.hosts[branch].latency
                    self.there[branch].append(number)
            else:
                self.branch[number] = len(self.hosts) + len(own)
                self.latency[number] = machine.latency
                own.append(Bounds(machine.bandwidth))
        self.trunks = self._trunks(own)
        # Where nothing limits a transfer it takes its latency, as over a link of one's own.
        self.free = [
            [
                branch == _NOWHERE
                or (trunk.endless and math.isinf(min(trunk.branches[branch].bounds)))
                for branch in self.branch
            ]
            for trunk in self.trunks
        ]
        self.failures = [network.failures(host) for host in self.hosts]
        self.cut_since: dict[int, float] = {}  # hosts that nothing gets through to
        self.cut_until = [0.0] * (len(self.hosts) + len(own) + 1)  # and -1 never is
        self.transfers: dict[int, Transfer] = {}  # of each worker, which has one at a time
        self.forgotten: set[int] = set()  # given up while they were cut off, and not told yet
        self._handlers |= {
            EventKind.BEGIN: self._landed,
            EventKind.ARRIVED: self._landed,
            EventKind.CUT: self._cut,
            EventKind.HEAL: self._heal,
            EventKind.HOST_FAIL: self._host_fails,
            EventKind.SHARE: self._share,
        }

    def _trunks(self, own: list[Bounds]) -> tuple[Trunk, Trunk]:
        network = self.network
        near = network.named.get(network.store.host)
        inward, outward = network.store.inward, network.store.outward
        if near is not None:
            inward, outward = min(inward, near.down), min(outward, near.up)
        ups = [Bounds(host.up * network.goodput, host.most) for host in self.hosts]
        downs = [Bounds(host.down * network.goodput, host.most) for host in self.hosts]
        return (
            Trunk(inward * network.goodput, ups + own),
            Trunk(outward * network.goodput, downs + own),
        )

    # ------------------------------------------------------------ the loop

    def start(self) -> None:
        super().start()
        for number, host in enumerate(self.hosts):
            for at, until in self.network.outages(host):
                self._plan_host(EventKind.CUT, number, at, until)
            for at, until in self.failures[number]:
                self._plan_host(EventKind.HOST_FAIL, number, at, until)
            self._plan_trace(number, host)

    def _plan_trace(self, number: int, host: Host) -> None:
        for step in host.trace:
            if step.share:  # none at all is an outage
                self._plan_host(EventKind.SHARE, number, step.at, step.share)

    def _plan_host(self, kind: EventKind, host: int, at: float, extra: float) -> None:
        heapq.heappush(self.heap, SimEvent(at, self.planned, kind, host, 0, extra))
        self.planned += 1

    def step(self) -> bool:
        at = min(trunk.next() for trunk in self.trunks)
        due = self.heap[0].time if self.heap else math.inf
        if at > due or math.isinf(at) or self.store.finished:
            return super().step()
        self.now = at
        number = next(trunk for trunk in self.trunks if trunk.next() <= at).over()
        transfer = self.transfers.pop(number)
        self.agents[number].timing.communication += at - transfer.since
        self._takes(transfer.kind, number, self.latency[number])
        self._deliver()
        return True

    # ------------------------------------------------------------ transfers

    def _push(self, number: int) -> None:
        if number in self.forgotten:
            self._join(number)
        else:
            self._transfer(EventKind.ARRIVED, number, self.push_bytes)

    def _bring(self, number: int, snapshot: Snapshot) -> None:
        nbytes = self.full_pull_bytes if snapshot.updater else self.pull_bytes
        self._transfer(EventKind.BEGIN, number, nbytes)

    def _transfer(self, kind: EventKind, number: int, nbytes: int) -> None:
        if self.free[_WAYS[kind]][number] and self._reaches(number):
            self._takes(kind, number, self.latency[number])
            return
        self.transfers[number] = Transfer(kind, float(nbytes), self.now)
        if self.agents[number].silent_until <= self.now:
            self._go_on(number)

    def _go_on(self, number: int) -> None:
        """A transfer begins, or goes on after a pause."""
        transfer = self.transfers[number]
        transfer.moving, transfer.since = True, self.now
        trunk = self.trunks[_WAYS[transfer.kind]]
        trunk.begin(number, self.branch[number], transfer.left, self.now)

    def _stop(self, number: int) -> None:
        """A transfer stands still."""
        transfer = self.transfers[number]
        if transfer.moving:
            trunk = self.trunks[_WAYS[transfer.kind]]
            transfer.left = trunk.end(number, self.branch[number], self.now)
            transfer.moving = False
            self.agents[number].timing.communication += self.now - transfer.since

    def _break_off(self, number: int) -> bool:
        """What was under way is lost; False if nothing was."""
        if number not in self.transfers:
            return False
        self._stop(number)
        del self.transfers[number]
        return True

    def _takes(self, kind: EventKind, number: int, seconds: float) -> None:
        """What is under way is there so many seconds from now, if its worker is not paused."""
        agent = self.agents[number]
        agent.timing.communication += seconds
        if seconds or agent.silent_until > self.now:
            self._plan_own(kind, number, seconds)
        else:
            self._come(kind, number)

    def _come(self, kind: EventKind, number: int) -> None:
        if kind is EventKind.ARRIVED:
            self._arrived(number)
        else:
            self._advance(number)

    def _landed(self, event: SimEvent) -> None:
        """The last bytes of a transfer would be there, if something gets through."""
        number = event.worker
        if not self._reaches(number):
            self._wait_for_link(event.kind, number)
        elif number in self.forgotten:
            self._join(number)
        else:
            self._come(event.kind, number)

    # ------------------------------------------------------------ cut off

    def _reaches(self, number: int) -> bool:
        """Whether something gets through between a worker and the store."""
        return self.cut_until[self.branch[number]] <= self.now

    def _wait_for_link(self, kind: EventKind, number: int) -> None:
        until = self.cut_until[self.branch[number]]
        self.agents[number].timing.communication += until - self.now
        self._plan(kind, number, until)

    def _pull(self, number: int) -> None:
        if self._reaches(number):
            super()._pull(number)
        else:
            self._wait_for_link(EventKind.BEGIN, number)

    def _rest(self, number: int) -> None:
        if self._reaches(number):
            super()._rest(number)
        else:
            self._wait_for_link(EventKind.BEGIN, number)

    def _lease(self, number: int) -> bool:
        """Leases have come with the last answer, so they are there while the link is not."""
        if self._reaches(number):
            return super()._lease(number)
        if self.store.lost(number):
            self._wait_for_link(EventKind.BEGIN, number)
            return False
        lease = self.store.lease(number)
        self._leased(number, [] if lease is None else [lease])
        return True

    def _join(self, number: int) -> None:
        branch, agent = self.branch[number], self.agents[number]
        until = self.cut_until[branch]
        if 0 <= branch < len(self.hosts):
            until = max([until, *(end for at, end in self.failures[branch] if at <= self.now)])
        if until <= self.now:
            super()._join(number)
        elif not agent.alive and math.isfinite(until):
            self._plan(EventKind.JOIN, number, until)
        # One that is alive joins when it hears that it was given up.

    def _serve(self, number: int) -> None:
        super()._serve(number)
        since = self.cut_since.get(self.branch[number])
        if since is not None:  # what the store has had lying there is no sign of life
            self.server.silent_since(number, since)

    def _cut(self, event: SimEvent) -> None:
        host, until = event.worker, event.extra
        self.cut_since[host], self.cut_until[host] = self.now, until
        self._change(host)
        for number in self.there[host]:
            agent = self.agents[number]
            if agent.alive and agent.silent_until <= self.now:
                self.server.silent_since(number, self.now)
                agent.silent_until = self.now
            if until - self.now > self.cluster.patience:
                self._plan(EventKind.GIVE_UP, number, self.now + self.cluster.patience)
        self._plan_host(EventKind.HEAL, host, until, 0.0)

    def _heal(self, event: SimEvent) -> None:
        """Within patience all goes on where it was; whoever was given up has to join again."""
        host = event.worker
        del self.cut_since[host]
        self._change(host)
        for number in self.there[host]:
            agent = self.agents[number]
            if not agent.alive:
                continue
            if not self.store.lost(number):
                if agent.silent_until <= self.now:
                    self.server.restored(number, self.now)
            elif self._break_off(number) or not any(self._own(e, number) for e in self.heap):
                if agent.silent_until <= self.now:  # else at the end of its pause
                    self._join(number)
            else:  # it computes, and finds out when it has something to send
                self.forgotten.add(number)

    def _change(self, host: int) -> None:
        for trunk in self.trunks:
            share = trunk.branches[host].share
            trunk.change(host, self.now, share=share, cut=host in self.cut_since)

    def _spoken(self, number: int) -> bool:
        return super()._spoken(number) and self._reaches(number)

    def _share(self, event: SimEvent) -> None:
        host = event.worker
        for trunk in self.trunks:
            trunk.change(host, self.now, share=event.extra, cut=host in self.cut_since)

    # ------------------------------------------------------------ faults

    def _pause(self, event: SimEvent) -> None:
        if event.worker in self.transfers and self.agents[event.worker].alive:
            self._stop(event.worker)
        super()._pause(event)

    def _wake(self, event: SimEvent) -> None:
        number = event.worker
        transfer = self.transfers.get(number)
        if transfer is None:
            super()._wake(event)
        elif not transfer.moving and self.agents[number].silent_until <= self.now:
            self._go_on(number)

    def _host_fails(self, event: SimEvent) -> None:
        extra = event.extra - self.now if math.isfinite(event.extra) else -1.0
        for number in self.there[event.worker]:
            self._fail(event._replace(worker=number, extra=extra))

    def _fail(self, event: SimEvent) -> None:
        self._break_off(event.worker)
        super()._fail(event)

    def _leave(self, number: int) -> None:
        self._break_off(number)
        super()._leave(number)

    def _welcomed(self, number: int, message: Welcome, snapshot: None) -> None:
        self._break_off(number)
        self.forgotten.discard(number)
        super()._welcomed(number, message, snapshot)

    # ------------------------------------------------------------ state

    def meta(self) -> dict[str, Any]:
        return super().meta() | {
            "network": {
                "trunks": [trunk.meta() for trunk in self.trunks],
                "transfers": {str(k): v for k, v in self.transfers.items()},
                "cut": [[k, v, self.cut_until[k]] for k, v in self.cut_since.items()],
                "forgotten": sorted(self.forgotten),
                "deadlines": {str(k): v for k, v in self.server.deadline.items()},
            }
        }

    def load_meta(self, meta: dict[str, Any]) -> None:
        super().load_meta(meta)
        saved = meta["network"]
        for trunk, state in zip(self.trunks, saved["trunks"], strict=True):
            trunk.load_meta(state)
        transfers = msgspec.convert(saved["transfers"], dict[str, Transfer])
        self.transfers = {int(k): v for k, v in transfers.items()}
        for host, since, until in saved["cut"]:
            self.cut_since[host], self.cut_until[host] = since, until
        self.forgotten = set(saved["forgotten"])
        self.server.deadline = {int(k): v for k, v in saved["deadlines"].items()}
