"""The wires between the processes of a replica: what travels, in which order, and who is dead."""

import socket
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.errors import RunError
from offbeat.split.channel import Channel, Mesh, Parted, Wires, alone

TAG = ("activation", 1, 0)


@pytest.fixture
def pair() -> Any:
    one, other = socket.socketpair()
    ends = Channel(one, 1), Channel(other, 0)
    yield ends
    one.close()
    other.close()


def same(one: Any, other: Any) -> bool:
    """Equal in kind, in bits, and in whether a gradient comes back."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.requires_grad == other.requires_grad
            and one.is_leaf
            and other.is_leaf
            and one.detach().contiguous().view(-1).view(torch.uint8).tolist()
            == other.detach().contiguous().view(-1).view(torch.uint8).tolist()
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
]


@st.composite
def drawn_tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = int(torch.tensor(shape, dtype=torch.int64).prod())
    tensor = torch.arange(count).to(dtype).reshape(shape)
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)  # not in one piece
    taught = dtype.is_floating_point and draw(st.booleans())
    return tensor.requires_grad_(taught)


plain = st.none() | st.booleans() | st.integers(-5, 1 << 40) | st.floats(allow_nan=False)
values = st.recursive(
    drawn_tensors() | plain | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(values)
def test_values_of_all_kinds_come_as_they_went(value: Any) -> None:
    one, other = socket.socketpair()
    with one, other:
        Channel(one, 1).send(TAG, value)
        assert same(Channel(other, 0).receive(TAG), value)


def test_a_tensor_of_a_graph_comes_as_the_start_of_another(pair: Any) -> None:
    weight = torch.ones(2, requires_grad=True)
    pair[0].send(TAG, weight * 2)
    came = pair[1].receive(TAG)
    assert came.requires_grad
    assert came.is_leaf


def test_what_comes_may_be_written(pair: Any) -> None:
    sent = torch.ones(3)
    pair[0].send(TAG, sent)
    pair[1].receive(TAG).add_(1)
    assert sent.tolist() == [1, 1, 1]


def test_each_tag_keeps_its_own_order(pair: Any) -> None:
    tags = [("activation", 1, 0), ("gradient", 0, 0), ("activation", 1, 1)]
    for number in range(4):
        for tag in tags:
            pair[0].send(tag, [tag[0], tag[2], number])
    for tag in (tags[2], tags[0], tags[1]):
        came = [pair[1].receive(tag) for _ in range(4)]
        assert came == [[tag[0], tag[2], number] for number in range(4)]


def test_large_tensors_both_ways_at_once_stand_in_nobodys_way(pair: Any) -> None:
    """Both have sent everything before either reads; a wire holds a fraction of one."""
    large = torch.arange(1 << 20, dtype=torch.float32)  # 4 MiB
    for number in range(3):
        for end in pair:
            end.send(("activation", 1, number), [number, large + number])
    for number in (0, 1, 2):
        for end in pair:
            told, came = end.receive(("activation", 1, number))
            assert told == number
            assert torch.equal(came, large + number)
    for end in pair:
        end.flush()


def test_what_is_small_does_not_overtake_what_is_large(pair: Any) -> None:
    pair[0].send(TAG, torch.zeros(1 << 20))
    pair[0].send(TAG, 7)
    assert pair[1].receive(TAG).shape == (1 << 20,)
    assert pair[1].receive(TAG) == 7


def test_what_is_sent_is_what_was_there_at_the_time(pair: Any) -> None:
    """Parameters that are written in place afterwards must not change what is on its way."""
    sent = torch.zeros(1 << 20)
    view = sent[::2]  # a copy is made of it
    pair[0].send(TAG, view)
    sent.add_(1)
    assert pair[1].receive(TAG).abs().max() == 0


def test_a_dead_peer_is_known_by_its_number(pair: Any) -> None:
    pair[0].send(TAG, torch.ones(2))
    pair[0].wire.close()
    assert pair[1].receive(TAG).tolist() == [1, 1]  # what it sent before still counts
    with pytest.raises(Parted) as caught:
        pair[1].receive(TAG)
    assert caught.value.process == 0


def test_a_peer_that_dies_in_the_middle_of_a_message(pair: Any) -> None:
    pair[0].wire.send((1000).to_bytes(4, "big") + b"half")
    pair[0].wire.close()
    with pytest.raises(Parted):
        pair[1].receive(TAG)


def test_sending_to_the_dead_is_no_error(pair: Any) -> None:
    """The death shows where something is read, so that there is one place to deal with it."""
    pair[1].wire.close()
    for _ in range(3):
        pair[0].send(TAG, torch.zeros(1 << 18))
    pair[0].flush()
    with pytest.raises(Parted):
        pair[0].receive(TAG)


def test_what_cannot_travel_is_named(pair: Any) -> None:
    with pytest.raises(RunError, match="a set cannot travel between stages: let blocks return"):
        pair[0].send(TAG, {"inside": [{1, 2}]})


def test_a_mesh_of_one_keeps_what_it_sends_to_itself() -> None:
    mesh = alone()
    sent = torch.ones(2)
    mesh.send(0, TAG, sent)
    mesh.send(0, TAG, None)
    assert mesh.receive(0, TAG) is sent
    assert mesh.receive(0, TAG) is None


def test_every_pair_of_processes_has_a_wire_of_its_own() -> None:
    """Threads stand for processes here, so nobody closes the ends of others."""
    count = 3
    wires = Wires(count)
    assert len(wires.ends) == count * (count - 1)
    meshes = [
        Mesh(me, {o: Channel(end, o) for (one, o), end in wires.ends.items() if one == me})
        for me in range(count)
    ]
    heard: dict[tuple[int, int], Any] = {}

    def talk(me: int) -> None:
        others = [other for other in range(count) if other != me]
        for other in others:
            meshes[me].send(other, ("activation", me, other), torch.full((1 << 16,), float(me)))
        for other in others:
            heard[me, other] = meshes[me].receive(other, ("activation", other, me))

    threads = [threading.Thread(target=talk, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key: float(value[-1]) for key, value in heard.items()} == {
        (me, other): float(other) for me in range(count) for other in range(count) if me != other
    }
    for end in wires.ends.values():
        end.close()


def test_a_process_closes_the_ends_of_others() -> None:
    wires = Wires(3)
    mine = wires.mesh(1)
    assert sorted(mine.channels) == [0, 2]
    closed = {key for key, end in wires.ends.items() if end.fileno() == -1}
    assert closed == {(0, 1), (0, 2), (2, 0), (2, 1)}
    with pytest.raises(Parted):  # nobody else has the other end
        mine.receive(0, TAG)
    for channel in mine.channels.values():
        channel.wire.close()


def test_what_a_mesh_waits_for_is_told_and_taken_back() -> None:
    wires = Wires(2)
    ends = [Mesh(me, {1 - me: Channel(wires.ends[me, 1 - me], 1 - me)}) for me in range(2)]
    told: list[Any] = []
    ends[0].subscribe(lambda other, tag: told.append((other, tag)))
    ends[1].send(0, TAG, 1)
    ends[0].receive(1, TAG)
    ends[0].send(0, TAG, 2)
    ends[0].receive(0, TAG)  # from itself nobody waits for anything
    assert told == [(1, TAG), (None, None)]
    for end in wires.ends.values():
        end.close()
