"""Members of a group add up to the store's bits over proven links, or fail cleanly."""

import secrets
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.engine.hosts.members import Members
from offbeat.model.table import combine
from offbeat.protocol.messages import GroupFailed, StartRound
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.handshake import NUMBER, AskTerms, Meet, Refused, ask, packet, read
from offbeat.transport.pieces import scaled
from offbeat.transport.tcp_group import HEADER, WAITING, Arrivals, TcpGroup, proof
from tests.contract.common import problem, run

HOST = "127.0.0.1"
TOKEN = b"a token of these tests"
SECRET = b"what members of this group are told"
PATIENCE = 60.0  # nobody waits for so long
LONG = 20.0


class Circle:
    """Workers of one process that can meet; what their groups tell is kept."""

    def __init__(self) -> None:
        self.members: list[Members] = []
        self.groups: list[TcpGroup] = []
        self.failures: SimpleQueue[GroupFailed] = SimpleQueue()

    def worker(self, token: bytes = TOKEN, tls: bool = False, patience: float = PATIENCE) -> str:
        """Another one; where the others reach it."""
        self.members.append(Members(token, tls, patience))
        return self.members[-1].place(HOST)

    def begin(self, places: list[str], *who: int, number: int = 1, secret: bytes = SECRET) -> None:
        """Workers `who` are told of a group in which all are."""
        for worker in who:
            start = StartRound(1, number, [(r, 1) for r in range(len(places))], secret, places)
            self.groups.append(self.members[worker].group(start, worker))
            self.groups[-1].start(self.failures.put)

    def add(self, gives: list[Tensor], shares: list[float], **how: Any) -> list[Tensor]:
        """What each of the groups gets."""
        gets = [torch.full_like(give, 7.0) for give in gives]
        done = [threading.Event() for _ in gives]
        for group, give, get, one in zip(self.groups, gives, gets, done, strict=True):
            group.add(give, get, shares, **how)
            group.then(one.set)
        for one in done:
            assert one.wait(LONG), "they wait for each other"
        return gets

    def failed(self) -> GroupFailed:
        return self.failures.get(timeout=LONG)

    def close(self) -> None:
        for group in self.groups:
            group.end()
            group.thread.join(LONG)
            assert not group.thread.is_alive()
            assert not group.ways or all(way.wire is None for way in group.ways.values())
        for member in self.members:
            member.close()


@pytest.fixture
def circle() -> Iterator[Circle]:
    made = Circle()
    yield made
    made.close()


def meet(place: str, me: int, other: int, secret: bytes = SECRET, group: int = 1) -> Any:
    """A worker's connection to another, as a member's, and what is expected in return."""
    number = secrets.token_bytes(NUMBER)
    wire, _ = Dialer(Address.read(place), TOKEN, False).connect(LONG)
    wire.sendall(packet(Meet(group, me, number, proof(secret, b"dials", group, me, other, number))))
    return wire, proof(secret, b"takes", group, me, other, number)


def false_member(circle: Circle) -> socket.socket:
    """A group of two, of which one knows everything and is about to misbehave."""
    place = circle.worker()
    circle.begin([place, "nowhere"], 0)
    wire, expected = meet(place, 1, 0)
    wire.sendall(HEADER.pack(1, 0))
    assert read(wire, HEADER.size + NUMBER) == HEADER.pack(1, NUMBER) + expected
    return wire


# ---------------------------------------------------------------- sums


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [(1000, torch.float32), (2, torch.float64)])
def test_three_members_add_up_in_their_order(circle, tls, size, dtype):
    places = [circle.worker(tls=tls) for _ in range(3)]
    circle.begin(places, 0, 1, 2)
    torch.manual_seed(1)
    gives, shares = [torch.randn(size, dtype=dtype) for _ in range(3)], [0.5, 0.3, 0.2]
    expected = torch.empty_like(gives[0])
    combine(expected, gives, shares)
    for got in circle.add(gives, shares):
        assert torch.equal(got, expected)
    mean = sum(give * share for give, share in zip(gives, shares, strict=True))
    for got in circle.add(gives, shares, how=scaled):
        assert torch.equal(got, mean)


def test_numbers_of_few_bits_are_rounded_once(circle):
    circle.begin([circle.worker() for _ in range(3)], 0, 1, 2)
    gives = [torch.randn(101).bfloat16() for _ in range(3)]
    expected = torch.empty_like(gives[0])
    combine(expected, gives, [0.25, 0.25, 0.5])
    for got in circle.add(gives, [0.25, 0.25, 0.5]):
        assert torch.equal(got, expected)


def test_who_has_no_share_is_left_out_and_nobody_is_nothing(circle):
    circle.begin([circle.worker() for _ in range(2)], 0, 1)
    gives = [torch.ones(5), torch.full((5,), float("nan"))]
    for got in circle.add(gives, [1.0, 0.0]):
        assert torch.equal(got, gives[0])
    for got in circle.add(gives, [0.0, 0.0]):
        assert torch.equal(got, torch.zeros(5))


def test_all_may_send_more_than_sockets_hold_at_the_same_time(circle):
    circle.begin([circle.worker() for _ in range(3)], 0, 1, 2)
    gives = [torch.full((6 << 20,), float(r)) for r in range(3)]
    for got in circle.add(gives, [1.0, 1.0, 1.0]):
        assert torch.equal(got, torch.full((6 << 20,), 3.0))


def test_one_may_be_told_of_a_group_before_the_others(circle):
    places = [circle.worker() for _ in range(2)]
    circle.begin(places, 1, number=7)
    arrivals = circle.members[0].meeting.arrivals
    with arrivals.changed:
        assert arrivals.changed.wait_for(lambda: bool(arrivals.waiting), LONG)
    circle.begin(places, 0, number=7)
    circle.groups.reverse()
    for got in circle.add([torch.ones(3), torch.ones(3)], [0.5, 0.5]):
        assert torch.equal(got, torch.ones(3))


# ---------------------------------------------------------------- who is let in


def test_one_without_the_token_is_no_member(circle):
    places = [circle.worker(patience=0.2), circle.worker(b"another token altogether")]
    circle.begin(places, 0)
    with pytest.raises(Refused, match="does not know the token"):
        Dialer(Address.read(places[0]), b"another token altogether", False).connect(LONG)
    failed = circle.failed()
    assert "workers [1] have not come" in failed.reason
    assert circle.members[0].listener is not None
    circle.members[0].close()
    assert not circle.groups[0].ways


def test_a_token_that_others_do_not_have_is_told(circle):
    places = [circle.worker(), circle.worker(b"another token altogether", patience=0.2)]
    circle.begin(places, 1)
    failed = circle.failed()
    assert failed.unreached == 0
    assert "worker 1 cannot reach worker 0" in failed.reason
    assert "token" in failed.reason


@pytest.mark.parametrize(
    "wrong", [{"secret": b"of an earlier group"}, {"me": 0}, {"me": 5}, {"other": 1}]
)
def test_one_that_was_not_told_of_the_group_is_no_member(circle, wrong):
    """It knows the token; the real one comes later, and is let in."""
    places = [circle.worker() for _ in range(2)]
    circle.begin(places, 0)
    stranger, _ = meet(places[0], **({"me": 1, "other": 0} | wrong))
    with stranger:
        assert stranger.recv(1) == b""
    circle.begin(places, 1)
    for got in circle.add([torch.ones(3), torch.ones(3)], [0.5, 0.5]):
        assert torch.equal(got, torch.ones(3))


def test_one_that_answers_for_another_is_found_out(circle):
    """It listens, knows the token, and has not been told of the group."""
    places = [circle.worker() for _ in range(2)]
    circle.begin(places, 1)
    arrivals = circle.members[0].meeting.arrivals
    with arrivals.changed:
        assert arrivals.changed.wait_for(lambda: bool(arrivals.waiting), LONG)
        ((_, wire),) = arrivals.take(1)
    with wire:
        wire.setblocking(True)
        wire.sendall(HEADER.pack(1, NUMBER) + bytes(NUMBER))
        assert "what answered for worker 0 is another" in circle.failed().reason


def test_a_worker_is_no_store(circle):
    wire, _ = Dialer(Address.read(circle.worker()), TOKEN, False).connect(LONG)
    with wire, pytest.raises(Refused, match="a worker listens here, and no store"):
        ask(wire, AskTerms())


def test_a_worker_listens_where_it_reaches_the_store_and_nowhere_else(circle):
    place = circle.worker()
    listening = circle.members[0].listening
    assert listening.getsockname()[0] == HOST
    assert circle.members[0].place(HOST) == place  # and goes on to
    assert Address.read(circle.members[0].place("127.0.0.2")).host == "127.0.0.2"
    assert listening.fileno() == -1


def test_no_more_connections_wait_than_may():
    arrivals, ends = Arrivals(), []
    for group in range(WAITING + 1):
        mine, other = socket.socketpair()
        ends.append(other)
        arrivals.put(Meet(group, 0, b"", b""), mine)
    assert len(arrivals.waiting) == WAITING
    assert ends[0].recv(1) == b""
    with arrivals.changed:
        ((found, wire),) = arrivals.take(WAITING)
    assert found.group == WAITING
    assert not arrivals.waiting  # whoever waits for an earlier group is late
    wire.close()
    for end in ends:
        end.close()


def test_a_run_opens_no_store_of_keys_to_everybody(monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("anybody who reaches it could write there")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    done = run("hosts", problem(samples=12), "bsp", workers=2, epochs=1, via="allreduce")
    assert done.summary().updates > 0


# ---------------------------------------------------------------- what goes wrong


def test_a_member_that_vanishes_in_the_middle_fails_the_others(circle):
    circle.begin([circle.worker() for _ in range(3)], 0, 1, 2)
    circle.add([torch.ones(3)] * 3, [1.0, 0.0, 0.0])
    for group in circle.groups[:2]:
        group.add(torch.ones(3), torch.zeros(3), [1.0, 1.0, 1.0])
    circle.groups[2].end()
    failures = [circle.failed() for _ in range(2)]
    assert all("the connection to worker" in failed.reason for failed in failures)
    assert any("to worker 2 has broken" in failed.reason for failed in failures)


@pytest.mark.parametrize(
    "said",
    [
        HEADER.pack(2, 1 << 62),
        HEADER.pack(3, 12),
        HEADER.pack(2, 11),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["2^62 bytes", "another exchange", "a byte less", "garbage"],
)
def test_what_is_not_expected_is_refused_before_anything_is_taken(circle, said):
    with false_member(circle) as wire:
        get = torch.zeros(6)
        circle.groups[0].add(torch.ones(6), get, [0.5, 0.5])
        wire.sendall(said + bytes(64))
        assert "Misbehaved" in circle.failed().reason
        assert torch.equal(get, torch.zeros(6))


def test_a_member_that_breaks_off_in_the_middle_of_a_chunk(circle):
    with false_member(circle) as wire:
        circle.groups[0].add(torch.ones(6), torch.zeros(6), [0.5, 0.5])
        wire.sendall(HEADER.pack(2, 12) + b"half")
    assert "the connection to worker 1 has broken" in circle.failed().reason


def test_one_that_cannot_be_reached_is_named(circle):
    circle.worker()
    circle.worker(patience=0.2)
    with socket.create_server((HOST, 0)) as taken:
        nowhere = f"{HOST}:{taken.getsockname()[1]}"
    circle.begin([nowhere, "unused:1"], 1)
    failed = circle.failed()
    assert (failed.group, failed.unreached) == (1, 0)
    assert f"worker 1 cannot reach worker 0 at {nowhere}" in failed.reason
    assert "refused" in failed.reason


def test_a_member_leaves_while_it_waits_for_others(circle):
    """Nobody comes, and nothing is told."""
    places = [circle.worker() for _ in range(2)]
    circle.begin(places, 0)
    circle.begin([places[0], places[1], places[0]], 1)  # has dialled, and waits for an answer
    for group in circle.groups:
        group.end()
        group.thread.join(LONG)  # one that was dialling ends by itself
        assert not group.thread.is_alive()
    assert circle.failures.empty()


def test_a_member_leaves_in_the_middle_of_a_sum(circle):
    with false_member(circle) as wire:
        circle.groups[0].add(torch.ones(1 << 22), torch.zeros(1 << 22), [0.5, 0.5])
        read(wire, HEADER.size)
        circle.groups[0].end()
        assert not circle.groups[0].thread.is_alive()
        assert circle.failures.empty()
