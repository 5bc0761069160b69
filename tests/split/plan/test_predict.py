"""Asynchronous schedules as values, and what is predicted of them."""

import pytest

import offbeat as ob
from offbeat.split.plan.costs import BlockCost, Machines, Profile
from offbeat.split.plan.predict import predict


@pytest.mark.parametrize(
    ("text", "pieces", "under_way"),
    [
        ("pp=2,schedule=stash", 1, 2),
        ("pp=4,schedule=stash", 1, 4),
        ("pp=4,schedule=stash,microbatches=2", 2, 3),
        ("pp=4,schedule=stash,microbatches=3", 3, 2),
        ("pp=2,schedule=2bw", 2, 2),
        ("pp=4,schedule=2bw", 4, 2),
        ("pp=4,schedule=2bw,microbatches=16", 16, 2),
        ("pp=4", 4, 1),
        ("pp=1", 1, 1),
    ],
)
def test_as_many_batches_are_under_way_as_keep_the_stages_in_use(
    text: str, pieces: int, under_way: int
) -> None:
    layout = ob.Layout.parse(text)
    assert str(layout) == text
    assert layout.pieces == pieces
    assert layout.under_way == under_way
    assert layout.asynchronous == (under_way > 1)
    assert layout.stages == layout.pp


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("schedule=stash", "write pp=2, or leave the schedule out"),
        ("schedule=2bw", "write pp=2, or leave the schedule out"),
        ("pp=3,schedule=2bw,microbatches=2", "write microbatches=3, or schedule=stash"),
        ("pp=2,schedule=stash:2", "schedule=stash takes no number; write schedule=stash"),
        ("pp=2,schedule=stsh", "(did you mean 'stash'?)"),
    ],
)
def test_what_is_refused(text: str, told: str) -> None:
    with pytest.raises(ob.ConfigError) as caught:
        ob.Layout.parse(text)
    assert told in str(caught.value)


def profile(times: list[tuple[float, float]]) -> Profile:
    costs = [
        BlockCost(
            str(number), forward, backward,
            parameters=400, trained=400, kept=80, input=40, output=40, returned=40,
        )
        for number, (forward, backward) in enumerate(times)
    ]  # fmt: skip
    return Profile(tuple(costs), 4)


@pytest.mark.parametrize("schedule", ["stash", "2bw"])
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("pieces", [4, 8])
def test_equal_stages_are_never_idle_once_they_are_full(
    schedule: str, pp: int, pieces: int
) -> None:
    layout = ob.Layout(pp=pp, schedule=schedule, microbatches=pieces)
    found = predict(layout, profile([(1.0, 2.0)] * pp), Machines((1.0,) * pp), range(pp))
    assert found.seconds == pytest.approx(pieces * (1.0 + 2.0))
    assert found.idle_share == pytest.approx(0.0)
    synchronous = ob.Layout(pp=pp, microbatches=pieces)
    other = predict(synchronous, profile([(1.0, 2.0)] * pp), Machines((1.0,) * pp), range(pp))
    assert other.seconds == pytest.approx((pieces + pp - 1) * 3.0)


def test_the_slowest_stage_sets_the_pace() -> None:
    layout = ob.Layout(pp=3, schedule="2bw", microbatches=4)
    times = [(1.0, 2.0), (2.0, 4.0), (1.0, 1.0)]
    found = predict(layout, profile(times), Machines((1.0,) * 3), (0, 1, 2))
    assert found.seconds == pytest.approx(4 * 6.0)
    assert [p.idle_share for p in found.processes] == pytest.approx([1 / 2, 0.0, 2 / 3])


def test_parameters_are_held_once_for_each_batch_under_way() -> None:
    held = {}
    for text in ("pp=4", "pp=4,schedule=2bw", "pp=4,schedule=stash"):
        layout = ob.Layout.parse(text)
        found = predict(layout, profile([(1.0, 2.0)] * 4), Machines((1.0,) * 4), range(4))
        assert {p.memory.parameters for p in found.processes} == {400 * layout.under_way}
        held[text] = layout.under_way
    assert list(held.values()) == [1, 2, 4]
