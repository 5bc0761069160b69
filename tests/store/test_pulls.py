"""Packed pulls: both ends come to the same numbers, and what a codec leaves out comes later."""

import pytest
import torch

from offbeat.codec import parse
from offbeat.model.table import Entry, Flat, Table
from offbeat.store.pulls import PackedPulls, WholePulls

TABLES = [
    Table.of([Entry("a", (40,), torch.float32, "shared"), Entry("b", (3, 5), torch.float64, "s")]),
    Table.of([Entry("c", (7,), torch.float32, "shared")]),
]


def flats(seed: int) -> list[Flat]:
    draw = torch.Generator().manual_seed(seed)
    found = [Flat(table) for table in TABLES]
    for view in (view for flat in found for view in flat.views.values()):
        view.normal_(generator=draw)
    return found


def same(one: list[Flat], other: list[Flat]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.views[n], b.views[n]) for a, b in pairs for n in a.views)


@pytest.mark.parametrize("codec", ["int8", "bf16", "fp16", "topk:0.2", "1bit"])
def test_what_travels_makes_the_same_at_the_other_end(codec: str) -> None:
    pulls, store = PackedPulls(parse(codec), seed=3), flats(0)
    pulls.take(1, 0, store)
    assert pulls.packed(1) is None
    assert pulls.bytes_of(1, 1000) == 1000
    assert same(pulls.of(1, store), store)
    mine = [flat.clone() for flat in store]
    for version in range(1, 5):
        for flat, change in zip(store, flats(version), strict=True):
            for name, view in flat.views.items():
                view.add_(change.views[name], alpha=0.1)
        pulls.take(1, version, store)
        packed = pulls.packed(1)
        assert packed is not None
        for flat in mine:
            for name, view in flat.views.items():
                view.add_(packed[name].codec.decode(packed[name]))
        assert same(mine, pulls.of(1, store))
        assert pulls.bytes_of(1, 1000) == sum(one.nbytes for one in packed.values())


def test_what_is_left_out_comes_later() -> None:
    pulls, store = PackedPulls(parse("topk:0.2"), seed=0), flats(1)
    pulls.take(0, 0, store)
    store[0].views["a"].add_(torch.arange(1.0, 41.0))
    off = []
    for version in range(1, 6):  # nothing changes at the store meanwhile
        pulls.take(0, version, store)
        off.append(float((pulls.of(0, store)[0].views["a"] - store[0].views["a"]).abs().max()))
    assert off == sorted(off, reverse=True)
    assert off[0] > 30
    assert off[-1] < 1e-5


def test_a_draw_depends_on_neither_shards_nor_other_workers() -> None:
    one, other, store = PackedPulls(parse("int8"), 5), PackedPulls(parse("int8"), 5), flats(2)
    one.take(0, 0, store)
    other.take(1, 0, store)
    other.take(0, 0, store)
    moved = flats(9)
    one.take(0, 4, moved)
    other.take(1, 4, moved)
    other.take(0, 4, moved[::1])
    assert same(one.of(0, moved), other.of(0, moved))
    assert not same(other.of(1, moved), other.of(0, moved))


def test_whoever_comes_anew_pulls_all() -> None:
    pulls, store = PackedPulls(parse("bf16"), 0), flats(0)
    pulls.take(0, 0, store)
    pulls.take(0, 1, flats(1))
    assert pulls.nbytes == sum(flat.table.nbytes for flat in store)
    pulls.forget(0)
    assert pulls.nbytes == 0
    pulls.take(0, 1, flats(1))
    assert pulls.packed(0) is None
    assert same(pulls.of(0, store), flats(1))


def test_the_state_goes_into_tensors_and_back() -> None:
    pulls, store = PackedPulls(parse("int8"), 1), flats(0)
    for worker in (0, 12):
        pulls.take(worker, 0, store)
        pulls.take(worker, 1, flats(1))
    again = PackedPulls(parse("int8"), 1)
    again.load({name: tensor.clone() for name, tensor in pulls.state().items()}, store)
    for both in (pulls, again):
        both.take(12, 2, flats(2))
        both.take(0, 2, flats(2))
    for worker in (0, 12):
        assert same(again.of(worker, store), pulls.of(worker, store))


def test_whole_pulls_are_the_parameters_themselves() -> None:
    store = flats(0)
    assert WholePulls().of(3, store) is store
    assert WholePulls().packed(3) is None
    assert WholePulls().bytes_of(3, 77) == 77
