"""Where each tensor lies: alignment, placement, policies and hashes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.errors import CheckpointError, ConfigError
from offbeat.model import table as table_module
from offbeat.model.table import (
    ByCount,
    BySize,
    ByWeight,
    Entry,
    Flat,
    Placement,
    Table,
    buffer_entries,
    check_tensors,
    dealt,
    fill,
    fingerprint,
    parameter_entries,
    place,
    under,
)
from offbeat.store.digest import ParameterDigest, hexadecimal

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
entries_of_any_kind = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), max_size=3).map(tuple),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=8,
).map(lambda found: [Entry(f"t{i}", s, d, "shared") for i, (s, d) in enumerate(found)])


def sized(*sizes: int) -> list[Entry]:
    return [Entry(f"t{i}", (size,), torch.float32, "shared") for i, size in enumerate(sizes)]


def names(tables: list[Table]) -> list[list[str]]:
    return [[entry.name for entry in table] for table in tables]


@given(entries_of_any_kind)
def test_every_view_lies_on_a_64_byte_boundary(entries: list[Entry]) -> None:
    flat = Flat(Table.of(entries))
    for shared in (flat, flat.clone()):
        start = shared.buffer.data_ptr()
        assert start % 64 == 0
        for entry in shared.table:
            view = shared.views[entry.name]
            assert view.shape == entry.shape
            assert view.dtype is entry.dtype
            if view.numel():
                assert view.data_ptr() % 64 == 0
                assert view.data_ptr() - start == entry.offset
    assert flat.table.payload_bytes == sum(entry.nbytes for entry in entries)
    assert flat.table.nbytes == flat.buffer.numel()


@given(entries_of_any_kind)
def test_no_two_tensors_overlap(entries: list[Entry]) -> None:
    flat = Flat(Table.of(entries))
    for number, entry in enumerate(entries):
        flat.views[entry.name].fill_(number + 1)
    for number, entry in enumerate(entries):
        assert (flat.views[entry.name] == number + 1).all()


def test_a_table_finds_its_entries_by_name() -> None:
    table = Table.of(sized(3, 20))
    assert len(table) == 2
    assert (table["t1"].shape, table["t1"].offset) == ((20,), 64)


def test_arithmetic_reaches_every_tensor_of_every_dtype() -> None:
    kinds = {"a": ((3,), torch.float32), "b": ((2, 2), torch.float64), "c": ((), torch.float32)}
    entries = [Entry(name, shape, dtype, "shared") for name, (shape, dtype) in kinds.items()]
    table = Table.of(entries)
    one, other = Flat(table), Flat(table)
    for view in one.views.values():
        view.fill_(3.0)
    for view in other.views.values():
        view.fill_(2.0)
    assert all((v == 1).all() for v in Flat(table).subtract(one, other).views.values())
    assert all((v == 4).all() for v in one.clone().add_(other, 0.5).views.values())
    assert all((v == 9).all() for v in one.clone().scale_(3.0).views.values())
    assert all((v == 2).all() for v in one.clone().copy_(other).views.values())
    assert all((v == 0).all() for v in one.clone().zero_().views.values())
    assert one.finite()
    one.views["b"][1, 1] = torch.inf
    assert not one.finite()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [[0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.1, 0.9]], ids=str)
def test_a_sum_has_the_same_bits_wherever_it_is_made(
    dtype: torch.dtype, shares: list[float]
) -> None:
    table = Table.of([Entry("a", (1024,), dtype, "shared")])
    generator = torch.Generator().manual_seed(0)
    flats = [Flat(table) for _ in shares]
    for flat in flats:
        flat.views["a"].copy_(torch.randn(1024, generator=generator) * 1e-3)
        flat.views["a"][:3] = torch.tensor([-0.0, 1e-41, 3e38]).to(dtype)
    flats[0].views["a"][3] = torch.inf
    before = [flat.clone().views["a"] for flat in flats]
    got = Flat(table).combine(flats, shares).views["a"]
    wide = torch.promote_types(dtype, torch.float32)  # numbers of few bits are rounded once
    total = before[0].to(wide) * shares[0]
    for tensor, share in zip(before[1:], shares[1:], strict=True):
        total.add_(tensor.to(wide), alpha=share)
    wanted = total.to(dtype)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    # As workers have it who add up among themselves, each a chunk of it.
    chunk = torch.zeros(139, dtype=dtype)
    table_module.combine(chunk, [tensor[256:395] for tensor in before], shares)
    assert torch.equal(chunk.view(torch.uint8), wanted[256:395].view(torch.uint8))
    for flat, tensor in zip(flats, before, strict=True):
        assert torch.equal(flat.views["a"], tensor)


@pytest.mark.parametrize("shares", [[0.25] * 4, [0.1, 0.2, 0.3, 0.4]], ids=str)
def test_a_sum_is_the_mean_by_shares(shares: list[float]) -> None:
    table = Table.of([Entry("a", (50,), torch.float32, "shared")])
    flats = [Flat(table) for _ in shares]
    for number, flat in enumerate(flats):
        flat.views["a"].fill_(10.0**number)
    mean = sum(share * 10.0**number for number, share in enumerate(shares))
    assert Flat(table).combine(flats, shares).views["a"].tolist() == pytest.approx([mean] * 50)


def test_a_mean_in_half_precision_is_no_larger_than_what_it_is_of() -> None:
    large = torch.full((8,), 60_000.0, dtype=torch.float16)  # of at most 65,504
    mean = torch.zeros(8, dtype=torch.float16)
    table_module.combine(mean, [large, large], [0.5, 0.5])
    assert torch.equal(mean, large)


def test_a_clone_is_a_copy() -> None:
    flat = Flat(Table.of(sized(4)))
    copy = flat.clone()
    copy.views["t0"].fill_(1)
    assert flat.views["t0"].sum() == 0


# ---------------------------------------------------------------- placement


def test_by_size_balances_bytes() -> None:
    tables = place(sized(8, 1, 1, 6, 2), BySize(2))
    assert names(tables) == [["t0", "t1"], ["t2", "t3", "t4"]]
    assert [table.payload_bytes for table in tables] == [36, 36]


def test_by_count_keeps_neighbours_together() -> None:
    assert names(place(sized(9, 1, 1, 1, 1), ByCount(2))) == [["t0", "t1", "t2"], ["t3", "t4"]]


def test_by_weight_gives_the_larger_device_more() -> None:
    tables = place(sized(*[1] * 12), ByWeight((1.0, 3.0)))
    assert [len(table) for table in tables] == [3, 9]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_every_tensor_is_placed_once_and_no_shard_is_empty(
    sizes: list[int], data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, len(sizes)))
    weights = data.draw(st.lists(st.floats(0.1, 9), min_size=shards, max_size=shards))
    entries = sized(*sizes)
    for placement in (BySize(shards), ByCount(shards), ByWeight(tuple(weights))):
        tables = place(entries, placement)
        assert len(tables) == shards
        assert all(len(table) for table in tables)
        placed = [entry.name for table in tables for entry in table]
        assert sorted(placed) == sorted(entry.name for entry in entries)
        assert names(place(entries, placement)) == names(tables)


@pytest.mark.parametrize("placement", [BySize(3), ByCount(3), ByWeight((1, 1, 1)), BySize(0)])
def test_as_many_shards_as_tensors_at_most(placement: Placement) -> None:
    with pytest.raises(ConfigError, match="shards for 2 tensors: use between 1 and 2 shards"):
        place(sized(1, 1), placement)


@pytest.mark.parametrize("weights", [(), (1.0, 0.0), (1.0, -2.0)])
def test_weights_of_devices_are_positive(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="device weights must be positive"):
        place(sized(1, 1), ByWeight(weights))


# ---------------------------------------------------------------- hashes


def filled(placement: Placement) -> list[Flat]:
    mixed = [*sized(5, 3, 9), Entry("h", (3,), torch.float64, "shared")]
    flats = [Flat(table) for table in place(mixed, placement)]
    for flat in flats:
        for name, view in flat.views.items():
            seed = sum(name.encode())
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)))
    return flats


def test_the_digest_does_not_depend_on_sharding() -> None:
    hashes = {
        ParameterDigest(filled(placement))()
        for placement in (BySize(1), BySize(2), BySize(4), ByCount(3), ByWeight((1, 5)))
    }
    assert len(hashes) == 1
    assert len(hashes.pop()) == 32


def test_one_bit_changes_the_digest_and_padding_does_not() -> None:
    flats = filled(BySize(1))
    before = ParameterDigest(flats)()
    flats[0].buffer[flats[0].table["t0"].nbytes] = 255  # behind t0, before t1
    assert ParameterDigest(flats)() == before
    flats[0].buffer[0] ^= 1
    assert ParameterDigest(flats)() != before


# ---------------------------------------------------------------- from a model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight


def test_tied_weights_are_one_tensor() -> None:
    assert [e.name for e in parameter_entries(Tied())] == ["inner.weight", "outer.bias"]


def test_frozen_parameters_stay_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert [e.name for e in parameter_entries(model)] == ["1.weight", "1.bias"]


def test_a_model_with_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match=r"no trainable parameter: set requires_grad_\(True\)"):
        parameter_entries(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ConfigError, match="no trainable parameter"):
        parameter_entries(nn.ReLU())


def test_complex_parameters_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"parameter 'weight' has dtype torch\.complex64"):
        parameter_entries(nn.Linear(2, 2, dtype=torch.complex64))


def test_buffers_are_averaged_unless_told_otherwise() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    policies = {e.name: e.policy for e in buffer_entries(model, {})}
    assert set(policies.values()) == {"averaged"}
    chosen = {e.name: e.policy for e in buffer_entries(model, {"0.*": "local"})}
    assert chosen["0.running_mean"] == "local"
    assert chosen["1.running_mean"] == "averaged"


def test_the_last_policy_that_fits_wins() -> None:
    entries = buffer_entries(nn.BatchNorm1d(2), {"*": "local", "running_var": "averaged"})
    policies = {e.name: e.policy for e in entries}
    assert policies == {
        "running_mean": "local", "running_var": "averaged", "num_batches_tracked": "local",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("policies", "says"),
    [({"*": "mine"}, "policy 'mine' of '.' must be one of averaged, local"),
     ({"running_maen": "local"}, "policy for 'running_maen': the model has no tensor"),
     ({"weight": "local"}, "'weight' is a parameter and always shared; only buffers can be local")],
)  # fmt: skip
def test_policies_that_fit_nothing(policies: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("'.'", "'.'")):
        buffer_entries(nn.BatchNorm1d(2), policies)  # type: ignore[arg-type]


def test_a_fingerprint_has_a_line_for_every_tensor() -> None:
    assert fingerprint(nn.Linear(2, 3)) == [
        "weight (3, 2) torch.float32",
        "bias (3,) torch.float32",
    ]


def test_two_models_differ_first_in_this_tensor() -> None:
    here = {"a": torch.zeros(2), "b": torch.zeros(3)}
    check_tensors(here, here, "it")
    with pytest.raises(CheckpointError, match="it is of another model: it has no tensor 'b'"):
        check_tensors({"a": torch.zeros(2)}, here, "it")
    with pytest.raises(CheckpointError, match=r"'b' is \(4,\) float32 there and \(3,\) float32 he"):
        check_tensors({"a": torch.zeros(2), "b": torch.zeros(4)}, here, "it")
    with pytest.raises(CheckpointError, match=r"'a' is \(2,\) float64 there"):
        check_tensors({"a": torch.zeros(2).double(), "b": torch.zeros(3)}, here, "it")
    with pytest.raises(CheckpointError, match="'c' is not in this one"):
        check_tensors({**here, "c": torch.zeros(1)}, here, "it")


def test_names_under_a_prefix() -> None:
    found = {"a/x": torch.zeros(1), "a/y/z": torch.zeros(1), "ab/x": torch.zeros(1)}
    assert sorted(under("a/", found)) == ["x", "y/z"]


@given(st.data())
def test_tables_are_dealt_to_processes_once_and_about_evenly(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=9))
    processes = data.draw(st.integers(1, len(sizes)))
    tables = [
        Table.of([Entry(f"t{i}", (n,), torch.float32, "shared")]) for i, n in enumerate(sizes)
    ]
    found = dealt(tables, processes)
    assert len(found) == processes
    assert all(found)
    assert sorted(number for numbers in found for number in numbers) == list(range(len(sizes)))
    assert found[0][0] == 0
    loads = [sum(tables[number].nbytes for number in numbers) for numbers in found]
    assert max(loads) - min(loads) <= max(table.nbytes for table in tables)


def test_as_many_processes_as_tables_are_one_each() -> None:
    tables = [Table.of([Entry(f"t{n}", (n,), torch.float32, "shared")]) for n in (3, 90, 40)]
    assert dealt(tables, 3) == [[0], [1], [2]]


def test_the_shares_of_a_hash_add_up_to_it() -> None:
    entries = [Entry(f"t{i}", (5,), torch.float32, "shared") for i in range(4)]
    whole = Flat(Table.of(entries))
    whole.spans[0].copy_(torch.arange(float(len(whole.spans[0]))))
    parts = [Flat(Table.of([entry])) for entry in entries]
    fill(parts, whole.views)
    total = sum(ParameterDigest([part]).sum() for part in parts)
    assert hexadecimal(total) == ParameterDigest([whole])()
    swapped = [Flat(Table.of([entry])) for entry in entries]
    fill(swapped, whole.views | {"t0": whole.views["t1"], "t1": whole.views["t0"]})
    assert ParameterDigest(swapped)() != ParameterDigest([whole])()
