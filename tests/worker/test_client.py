"""A worker's side of the protocol: what it asks, what it makes of answers, how it hears ends."""

from collections import deque

import pytest

from offbeat.data.lease import Lease
from offbeat.log.records import Part
from offbeat.protocol.messages import (
    Accepted,
    AskLeases,
    EndRun,
    Go,
    Goodbye,
    Join,
    Leased,
    Leave,
    Pull,
    Push,
    Rejoin,
    Rest,
    Stop,
    Wake,
    Welcome,
)
from offbeat.transport.link import GivenUp, RunOver, RunStopped, StoreGone
from offbeat.worker.client import StoreClient
from offbeat.worker.contribution import Contribution, Snapshot

A, B, C = Lease(0, 0, 4), Lease(0, 4, 8), Lease(0, 8, 12)


class PlayedLink:
    """Gives the answers that the test has written, and keeps what was said."""

    def __init__(self):
        self.came = 0.0
        self.answers = deque()
        self.heard = []
        self.prepared = None
        self.ended = False

    def will_say(self, *messages):
        self.answers.extend(messages)

    def prepare(self, push, contribution):
        self.prepared = push, contribution

    def push(self):
        self.send(self.prepared[0])

    def send(self, message):
        if self.ended:
            raise StoreGone
        self.heard.append(message)

    def receive(self):
        self.came += 1.0
        if not self.answers:
            assert self.ended, "it would wait for ever"
            raise StoreGone
        return self.answers.popleft()

    def snapshot(self, go):
        return Snapshot(go.version, go.steps, go.epoch)


@pytest.fixture
def link():
    return PlayedLink()


@pytest.fixture
def client(link):
    return StoreClient(link)


def go(*leases, version=3):
    return Go(version, 2, 1, list(leases), 0.5)


def contribution(absent=()):
    return Contribution(Part(0, 1, 0, 3, [A], 4), absent=frozenset(absent))


def push(client, then_pull, sent=None):
    client.put(sent or contribution(), then_pull)
    client.push()


def test_joining_skips_what_was_meant_for_an_earlier_incarnation(link, client):
    link.will_say(go(A), Accepted([B]), Rejoin(), Wake(), Welcome(4))
    assert client.join() == 4
    assert link.heard == [Join()]
    link.will_say(Leased([C]))
    assert client.lease() == C  # A and B are others' by now


def test_joining_again_forgets_what_was_leased_and_promised(link, client):
    link.will_say(go(A))
    client.pull([])
    push(client, then_pull=True)
    link.will_say(Welcome(2), Leased([B]), go())
    client.join()
    assert client.lease() == B
    client.pull([])
    assert link.heard[-1] == Pull([])


def test_a_pull_brings_parameters_and_leases(link, client):
    link.will_say(go(A, B))
    snapshot = client.pull([C])
    assert link.heard == [Pull([C], True)]
    assert (snapshot.version, snapshot.steps, snapshot.epoch) == (3, 2, 1)
    assert client.waited == 0.5
    assert client.came == link.came == 1.0
    assert [client.lease(), client.lease()] == [A, B]
    assert len(link.heard) == 1


def test_a_pull_of_a_centre_does_not_wait_for_others(link):
    link.will_say(go())
    StoreClient(link, centre=True).pull([])
    assert link.heard == [Pull([], False)]


def test_leases_are_asked_for_when_there_are_none(link, client):
    link.will_say(Leased([A]))
    assert client.lease() == A
    assert link.heard == [AskLeases()]
    link.will_say(Leased([]))
    assert client.lease() is None


def test_none_are_asked_for_while_an_answer_is_due_that_brings_some(link, client):
    push(client, then_pull=True)
    assert client.lease() is None
    assert len(link.heard) == 1


def test_every_lease_is_announced_when_it_comes(link):
    told = []
    client = StoreClient(link, announce=told.append)
    link.will_say(go(A, B), Accepted([C]))
    client.pull([])
    assert told == [A, B]
    push(client, then_pull=False)
    assert told == [A, B, C]


def test_the_answer_to_a_push_serves_for_the_pull(link, client):
    push(client, then_pull=True, sent=contribution(absent=["b", "a"]))
    (heard,) = link.heard
    assert isinstance(heard, Push)
    assert (heard.pull, heard.ahead, heard.part.leases, heard.absent) == (True, [], [A], ["a", "b"])
    link.will_say(go(B))
    client.pull([])
    assert link.heard == [heard]  # without another word


def test_what_is_put_is_not_sent_before_it_is_pushed(link, client):
    sent = contribution()
    client.put(sent, then_pull=True)
    assert link.heard == []
    assert link.prepared[1] is sent


def test_a_push_without_a_pull_waits_until_its_buffers_are_free(link, client):
    link.will_say(Accepted([B]))
    push(client, then_pull=False)
    assert client.lease() == B


def test_one_that_computes_ahead_says_what_it_computes_meanwhile(link):
    client = StoreClient(link, ahead=True)
    link.will_say(go(B))
    client.pull([])
    push(client, then_pull=True)
    assert link.heard[-1].ahead == [B]


def test_a_pipeline_says_all_that_it_has_begun(link):
    client = StoreClient(link, pipelined=True)
    client.begun = [B, C]
    push(client, then_pull=True)
    assert link.heard[-1].ahead == [B, C]


def test_resting_ends_when_leases_have_come_back(link, client):
    link.will_say(Wake())
    client.rest(1.0, 2.0)
    assert link.heard == [Rest(1.0, 2.0)]


CALLS = {
    "pull": lambda client: client.pull([]),
    "lease": lambda client: client.lease(),
    "push": lambda client: push(client, then_pull=False),
    "rest": lambda client: client.rest(0.0, 0.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_one_that_was_given_up_hears_of_it_whatever_it_asks(link, client, call):
    link.will_say(Rejoin())
    with pytest.raises(GivenUp):
        CALLS[call](client)


@pytest.mark.parametrize("call", [*CALLS, "join", "end"])
@pytest.mark.parametrize("how", ["stop", "gone"])
def test_the_end_is_heard_whatever_it_asks(link, client, call, how):
    if how == "stop":
        link.will_say(Stop(True))
    else:
        link.ended = True
    ask = CALLS.get(call) or (lambda client: getattr(client, call)())
    with pytest.raises(RunOver):
        ask(client)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("finished", [True, False])
def test_one_that_slept_through_the_end_hears_how_it_was(link, client, call, finished):
    """It speaks to nobody, but what was said to it last is still there to be read."""
    link.will_say(Leased([A]), Stop(finished))
    link.ended = True
    with pytest.raises(RunOver) as end:
        CALLS[call](client)
    assert type(end.value) is (RunOver if finished else RunStopped)


def test_one_that_ends_the_run_hears_when_it_is_over(link, client):
    link.will_say(go(A), Stop(True))
    with pytest.raises(RunOver):
        client.end()
    assert link.heard == [EndRun()]


def test_last_words_need_nobody_to_hear_them(link, client):
    client.leave()
    client.bye({"peak": 1.0})
    assert link.heard == [Leave(), Goodbye({"peak": 1.0})]
    link.ended = True
    client.leave()
    client.bye({"peak": 1.0})
