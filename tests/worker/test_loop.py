"""The worker's loop in real time, over a client that the test plays."""

import pytest

from offbeat.config.units import AS_FAST_AS_CAN_BE, LeastTime
from offbeat.data.lease import Lease
from offbeat.log.records import Part
from offbeat.protocol.cycle import Cycle
from offbeat.transport.link import RunOver
from offbeat.worker import loop as loop_module
from offbeat.worker.contribution import Contribution, Snapshot
from offbeat.worker.loop import Loop
from offbeat.worker.worker import Worker


class PlayedClient:
    """Hands out so many leases, notes every call, and then says that it is over."""

    def __init__(self, leases: int, steps: int = 1):
        self.left, self.steps = leases, steps
        self.calls: list[str] = []
        self.told: list[list[Lease]] = []
        self.pushed: list[Part] = []
        self.waited = self.before = 0.0
        self.version = 0
        self.ready: tuple[Part, bool] | None = None

    @property
    def came(self) -> float:
        return loop_module.time.perf_counter()

    def join(self) -> int:
        return 1

    def pull(self, computed: list[Lease]) -> Snapshot:
        self.calls.append("pull")
        self.told.append(list(computed))
        return Snapshot(self.version, self.steps, 0)

    def lease(self) -> Lease | None:
        self.calls.append("lease")
        if not self.left:
            return None
        self.left -= 1
        return Lease(0, 4 * self.left, 4 * self.left + 4)

    def put(self, contribution: Contribution, then_pull: bool) -> None:
        assert self.ready is None
        self.ready = contribution.part, then_pull

    def push(self) -> None:
        assert self.ready is not None
        (part, then_pull), self.ready = self.ready, None
        self.calls.append("push, pull" if then_pull else "push")
        self.pushed.append(part)
        self.version += 1

    def rest(self, wait: float, communication: float) -> None:
        self.calls.append("rest")
        raise RunOver


class Counting(Worker):
    """Computes nothing, and says what it was asked to contribute."""

    def contribution(self, sequence, timing, seed):
        self.catch_up()
        leases, self.done = self.done, []
        part = Part(0, 1, sequence, self.based_on, leases, 4 * len(leases))
        part.compute, part.wait = timing.compute, timing.wait
        part.communication = timing.communication
        return Contribution(part)


def looped(client, cycle=None, least=AS_FAST_AS_CAN_BE):
    loop = Loop(client, Counting(0, 1), cycle or Cycle(), 0, least)
    with pytest.raises(RunOver):
        loop.run()
    return loop


def test_every_step_is_sent_and_the_answer_serves_for_the_pull():
    client = PlayedClient(2)
    looped(client)
    step = ["lease", "push, pull", "pull"]
    assert client.calls == ["pull", *step, *step, "lease", "rest"]
    assert [part.sequence for part in client.pushed] == [0, 1]


def test_a_block_is_sent_whole_and_the_last_one_shorter():
    client = PlayedClient(5, steps=2)
    looped(client)
    assert [len(part.leases) for part in client.pushed] == [2, 2, 1]


def test_a_pull_within_a_block_tells_what_was_computed_since():
    client = PlayedClient(6, steps=3)
    looped(client, Cycle(fetch=2))
    assert [len(part.leases) for part in client.pushed] == [3, 3]
    assert [len(told) for told in client.told][:3] == [0, 2, 1]


def test_computing_on_while_a_contribution_is_under_way():
    client = PlayedClient(3)
    loop = looped(client, Cycle(ahead=True))
    assert client.calls[:6] == ["pull", "lease", "push, pull", "lease", "pull", "push, pull"]
    assert loop.flying >= loop.hidden > 0.0
    assert loop.steps == loop.unsent == 2  # the answers of this client come when they are asked for
    assert [len(part.leases) for part in client.pushed] == [1, 1, 1]


def test_a_step_takes_the_least_time_it_is_given(monkeypatch):
    """The clock is the test's own, and waiting moves it."""
    clock = [0.0]
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loop_module.time, "sleep", sleep)
    client = PlayedClient(3)
    looped(client, least=LeastTime(0.25))
    assert waits == [0.25] * 3
    assert [part.compute for part in client.pushed] == [0.25] * 3


def test_a_lease_of_another_size_takes_its_share_of_the_least_time(monkeypatch):
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loop_module.time, "sleep", sleep)
    client = PlayedClient(2)
    looped(client, least=LeastTime(0.25, 16))  # and its leases have 4
    assert [part.compute for part in client.pushed] == [0.0625] * 2


class Timed(PlayedClient):
    """Notes when everything is done by a clock that only the test moves."""

    def __init__(self, leases: int, clock: list[float]):
        super().__init__(leases)
        self.clock, self.at, self.answered = clock, [], 0.0

    @property
    def came(self) -> float:
        return self.answered

    def pull(self, computed):
        self.clock[0] += 1.0  # until the answer is there
        self.answered = self.clock[0]
        self.clock[0] += 0.5  # until it has been looked at
        return super().pull(computed)

    def put(self, contribution, then_pull):
        self.clock[0] += 0.25
        self.at.append(("put", self.clock[0]))
        super().put(contribution, then_pull)

    def push(self):
        self.at.append(("push", self.clock[0]))
        super().push()


@pytest.mark.parametrize("late", [0.0, 0.125])
def test_all_of_a_workers_own_work_is_in_its_least_time(monkeypatch, late):
    """A step begins when the answer comes; at its end nothing is left to do but the signal."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds + late

    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loop_module.time, "sleep", sleep)
    client = Timed(2, clock)
    looped(client, least=LeastTime(10.0))
    # The answers come at 1 and 12; between 1 and 11 the step takes its ten seconds.
    second = 12.0 + late
    assert client.at == [
        ("put", 1.75), ("push", 11.0 + late), ("put", second + 0.75), ("push", second + 10.0 + late)
    ]  # fmt: skip
    assert [part.compute for part in client.pushed] == [10.0, 10.0]
    # What the system wakes it too late is the machine's, and no part of the emulated device.
    assert [part.communication for part in client.pushed] == [1.0, 1.0 + late]


def test_a_step_begins_after_the_push_where_the_answer_came_before_it(monkeypatch):
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loop_module.time, "sleep", sleep)
    client = Timed(3, clock)
    looped(client, Cycle(ahead=True), least=LeastTime(10.0))
    assert [moment for what, moment in client.at if what == "push"] == [11.0, 21.0, 31.0]
    # Of a step's ten seconds, what it took to fetch the answer to the last push is not computing.
    assert [part.compute for part in client.pushed] == [10.0, 8.5, 8.5]


def test_waiting_for_others_and_talking_are_told_apart(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: clock[0])

    class Slow(PlayedClient):
        def pull(self, computed):
            clock[0] += 5.0
            self.waited = 3.0
            return super().pull(computed)

    client = Slow(2)
    looped(client)
    assert [(part.wait, part.communication) for part in client.pushed] == [(3.0, 2.0)] * 2


def test_an_emulated_step_goes_on_while_others_are_waited_for(monkeypatch):
    """Else a worker that computes on while its answer is on the way would seem to be faster."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loop_module.time, "sleep", sleep)

    class Held(Timed):
        def pull(self, computed):
            self.waited = 1.0
            return super().pull(computed)

    client = Held(3, clock)
    looped(client, Cycle(ahead=True), least=LeastTime(10.0))
    assert [part.compute for part in client.pushed] == [10.0, 9.5, 9.5]
    assert [part.wait for part in client.pushed] == [1.0, 0.0, 0.0]
