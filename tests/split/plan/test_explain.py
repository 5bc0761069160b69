"""What is predicted of a layout, from costs that are given or measured."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from offbeat.split.plan.costs import BlockCost, Machines, Profile
from offbeat.split.plan.explain import Explanation, check
from offbeat.split.plan.predict import by_time, predict
from tests.split.models import WIDTH, Opaque, Tied, codes

BLOCKS = 8


def chain(blocks: int = BLOCKS) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(blocks)))


def costs(*seconds: float, sizes: int = 100) -> Profile:
    """Blocks that take a third of `seconds` forward and two thirds backward."""
    blocks = [
        BlockCost(str(n), s / 3, 2 * s / 3, sizes, sizes, kept=20, input=10, output=10, returned=10)
        for n, s in enumerate(seconds)
    ]
    return Profile(tuple(blocks), samples=2)


EQUAL = costs(*[3.0] * BLOCKS)
UNEVEN = costs(9, 1, 1, 1, 1, 1, 1, 9)


def explained(layout: str, profile: Profile = EQUAL, **options: Any) -> Explanation:
    return ob.explain(layout, chain(len(profile)), profile, **options)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16), (8, 8)])
def test_equal_stages_idle_as_the_formula_says(schedule: str, p: int, m: int) -> None:
    found = explained(f"pp={p},schedule={schedule},microbatches={m}")
    assert found.idle_share == pytest.approx((p - 1) / (m + p - 1))
    assert found.alone == pytest.approx(m * 3 * BLOCKS)
    assert found.seconds == pytest.approx((m + p - 1) * 3 * BLOCKS / p)
    assert found.batch_size == 2 * m
    assert found.samples_per_second == pytest.approx(2 * m / found.seconds)


def test_memory_of_each_process() -> None:
    found = explained("pp=4,microbatches=8", optimizer=torch.optim.Adam)
    for number, process in enumerate(found.per_process):
        assert process.memory.parameters == process.memory.gradients == 200
        assert process.memory.state == 400
        assert process.memory.activations == (4 - number) * (10 + 40)
    most = explained("pp=4,microbatches=8,schedule=gpipe").per_process[3].memory
    assert (most.state, most.activations) == (0, 8 * (10 + 40))


def test_communication_of_each_process() -> None:
    found = explained("pp=4,microbatches=8")
    assert [process.sent for process in found.per_process] == [80, 160, 160, 80]
    assert [process.received for process in found.per_process] == [80, 160, 160, 80]
    assert [process.exchanged for process in found.per_process] == [200] * 4
    rounds = explained("pp=2,schedule=interleaved,microbatches=8").per_process
    # Three cuts, each crossed both ways by every microbatch.
    assert [process.sent for process in rounds] == [240, 240]
    assert sum(process.memory.parameters for process in rounds) == 100 * BLOCKS


def test_replicas_multiply_processes_and_speed() -> None:
    one, two = explained("pp=2"), explained("pp=2,replicas=3")
    assert (one.processes, two.processes) == (2, 6)
    assert two.samples_per_second == pytest.approx(3 * one.samples_per_second)
    assert two.seconds == one.seconds
    assert len(two.per_process) == 2


@pytest.mark.parametrize(
    ("split", "starts"),
    [
        ("time", ("1", "7")),
        ("count", ("3", "6")),
        ("parameters", ("3", "6")),
        ("2+5", ("2", "5")),
    ],
)
def test_where_it_cuts(split: str, starts: tuple[str, ...]) -> None:
    found = explained(f"pp=3,split={split}", UNEVEN)
    if split in ("count", "parameters"):
        assert sorted(stage.blocks for stage in found.stages) == [2, 3, 3]
    else:
        assert found.split == starts
    assert sum(stage.blocks for stage in found.stages) == BLOCKS
    if split == "time":
        assert found.better is None
        return
    assert found.better is not None
    assert found.better.split == ("1", "7")
    best = explained("pp=3", UNEVEN)
    assert found.better.seconds == pytest.approx(best.seconds)
    assert found.better.saved == pytest.approx(1 - best.seconds / found.seconds)


def test_parameters_are_shared_out_evenly() -> None:
    blocks = [BlockCost(str(n), 1, 1, parameters=size) for n, size in enumerate([90, 10, 20, 60])]
    found = explained("pp=2,split=parameters", Profile(tuple(blocks), 1))
    assert [process.memory.parameters for process in found.per_process] == [90, 90]


def test_a_split_that_is_as_good_is_not_called_better() -> None:
    assert explained("pp=2,split=count,microbatches=16").better is None
    # With few microbatches a first stage that is larger overlaps more, and the simulation sees it.
    few = explained("pp=2,microbatches=2")
    assert few.seconds == pytest.approx(36)
    assert few.better is not None
    assert few.better.seconds == pytest.approx(34)


def test_unequal_speeds_are_respected() -> None:
    found = explained("pp=2,microbatches=4", costs(*[1.0] * 6), speeds=[2, 1])
    assert [stage.blocks for stage in found.stages] == [4, 2]
    assert [stage.forward for stage in found.stages] == pytest.approx([2 / 3, 2 / 3])
    assert found.idle_share == pytest.approx(1 / 5)


def test_links_take_their_time() -> None:
    free, slow = explained("pp=2"), explained("pp=2", bandwidth=10.0)
    # Cut in the middle, one second each way for every microbatch; two of them are waited for.
    assert slow.seconds == pytest.approx(free.seconds + 2)
    assert slow.alone == free.alone


def test_a_costly_cut_is_avoided() -> None:
    blocks = list(EQUAL.blocks)
    wide = BlockCost("3", 1, 2, 100, 100, 20, 10, output=10**6, returned=10**6)
    blocks[3] = wide
    for bandwidth in (1e5, 5e4):
        found = explained("pp=2", Profile(tuple(blocks), 2), bandwidth=bandwidth)
        # A link of 10 seconds is no slower than the stages of 12, and yet all have to wait for it.
        split = found.split if bandwidth == 5e4 else found.better and found.better.split
        assert split in {("3",), ("5",)}


def test_memory_limits_move_cuts_or_are_refused() -> None:
    heavy = costs(*[1.0] * 6, 8.0)
    assert explained("pp=2", heavy).split == ("6",)
    # Six blocks take 6 × 200 and two microbatches in flight of 130.
    found = explained("pp=2", heavy, memory=1300)
    assert found.split == ("5",)
    assert found.per_process[0].memory.total <= 1300
    with pytest.raises(ob.ConfigError, match=r"no split into 2 stages .* the best needs"):
        explained("pp=2", heavy, memory=500)
    over = explained("pp=2,split=6", heavy, memory=1300)
    assert any("process 0 would need more than the memory allowed" in note for note in over.notes)
    assert explained("pp=2,split=6", heavy, memory=10).better is None


def test_a_better_split_stays_within_memory() -> None:
    # Five blocks in front would be faster, and would not fit.
    assert explained("pp=2,microbatches=2", memory=1220).better is not None
    assert explained("pp=2,microbatches=2", memory=1219).better is None


def test_the_stages_of_a_process_share_its_memory() -> None:
    profile = costs(1, 1, 1, 8, 1, 1, 1, 8)
    layout = "pp=2,schedule=interleaved,microbatches=2"
    assert [stage.blocks for stage in explained(layout, profile).stages] == [3, 1, 3, 1]
    found = explained(layout, profile, memory=1100)
    assert [stage.blocks for stage in found.stages] == [2, 2, 2, 2]
    assert all(process.memory.total <= 1100 for process in found.per_process)
    assert not found.notes


def test_small_savings_are_not_worth_a_word() -> None:
    profile = costs(10, 0.05, 10)
    one, two = (explained(f"pp=2,split={name},microbatches=16", profile) for name in "12")
    assert 0 < abs(one.seconds / two.seconds - 1) < 0.02
    assert one.better is two.better is None


def test_a_wrong_annotation_is_no_prediction() -> None:
    model = Opaque()
    model.layout_blocks = ["one", "two"]
    with pytest.raises(ob.ConfigError, match="do not give what the model gives"):
        ob.explain("pp=2", model, torch.ones(4, WIDTH))


def test_notes_on_ties_and_batch_norm() -> None:
    found = ob.explain("pp=2", Tied(), codes()[:4])
    assert any("token.weight and head.weight are one parameter" in note for note in found.notes)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = ob.explain("pp=2", model, torch.ones(8, 4))
    assert any("batch norm sees microbatches of 4" in note for note in found.notes)
    assert ob.explain("pp=1", Tied(), codes()).notes == ()


def test_measured_and_then_explained_again_without_measuring() -> None:
    model = Opaque()
    model.layout_blocks = ["two", "one"]
    found = ob.explain(ob.Layout(pp=2, precision="bf16"), model, torch.ones(8, WIDTH))
    assert found.profile.samples == 4
    assert found.seconds > 0
    again = ob.explain("pp=2,microbatches=2", model, found.profile)
    assert again.seconds == found.seconds
    with pytest.raises(ob.ConfigError, match="2 blocks that are not this model's 8"):
        ob.explain("pp=2", chain(), found.profile)
    assert found.layout == "pp=2,precision=bf16"


def test_an_unsplittable_model_can_stay_whole() -> None:
    found = ob.explain("pp=1,microbatches=2", Opaque(), torch.ones(4, WIDTH))
    assert found.idle_share == pytest.approx(0)
    assert [stage.first for stage in found.stages] == ["(whole model)"]
    assert found.split == ()


def test_the_simulated_stages_are_the_blocks_times() -> None:
    layout = ob.Layout(pp=2, schedule="gpipe", microbatches=1)
    found = predict(layout, UNEVEN, Machines((1.0, 0.5)), (0, 4))
    assert [stage.forward for stage in found.stages] == pytest.approx([4, 8])
    assert [stage.backward for stage in found.stages] == pytest.approx([8, 16])
    assert found.seconds == pytest.approx(12 + 24)
    assert by_time(layout, UNEVEN, Machines((1.0, 0.5))).cuts == ()


@pytest.mark.parametrize(
    ("layout", "options", "told"),
    [
        ("pp=9", {}, "8 blocks, too few for 9 stages: write pp=8 or less"),
        ("pp=4,schedule=interleaved:3", {}, "too few for pp=4 processes with 3 stages each"),
        ("pp=2,split=11", {}, "there is no block '11'"),
        ("pp=2,split=0", {}, "'0' is where the first stage begins"),
        ("pp=3,split=4+2", {}, "'2' comes too early"),
        ("pp=2,tp=2", {}, "tp=2 needs to know which modules"),
        ("pp=2", {"speeds": [1]}, "write 2,1 if the first is twice as fast"),
        ("pp=2", {"speeds": [1, -1]}, "a speed must be a number above zero, not -1"),
        ("pp=2", {"memory": 0}, "memory must be bytes above zero"),
        ("pp=2", {"bandwidth": "fast"}, "is no bandwidth"),
    ],
)
def test_mistakes(layout: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ob.ConfigError) as error:
        explained(layout, **options)
    assert told in str(error.value)


def test_mistakes_of_model_and_batch_are_found_before_anything_runs() -> None:
    class Untouched(nn.Module):
        def forward(self, value: Any) -> Any:
            raise AssertionError("the model ran")

    model = nn.Sequential(Untouched(), Untouched())
    assert len(check("pp=2", model, 4)) == 2
    with pytest.raises(ob.ConfigError, match="a batch of 5 does not divide"):
        check("pp=2", model, 5)
    with pytest.raises(ob.ConfigError, match="no block 'one'"):
        check("pp=2,split=one", model, 4)
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = Untouched()
    model = nn.Sequential(wrapped, Untouched())
    assert len(check("pp=2,schedule=1f1b", model, 4)) == 2
    with pytest.raises(ob.ConfigError, match="wrapped in DistributedDataParallel, which merges"):
        check("pp=2,schedule=zero-bubble", model, 4)
