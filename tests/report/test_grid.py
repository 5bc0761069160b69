"""Runs side by side: repeats, spread, the target that all can be held to, figures per worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.report import grid as figures_of
from offbeat.report import summary as told
from offbeat.report.grid import Aim, Cell, Spread, marks, remembered, side_by_side, thinned
from offbeat.report.score import ACCURACY, LOSS, Judged
from offbeat.report.summary import History, Step
from tests.report.common import cell, figures, grid, run, whole


def test_repeats_are_one_group_with_mean_and_spread() -> None:
    made = grid(
        cell("asp", 4, 0, samples_per_second=10.0),
        cell("bsp", 4),
        cell("asp", 4, 1, samples_per_second=30.0),
        cell("asp", 2, 0),
    )
    assert [(g.discipline, g.devices) for g in made.groups()] == [
        ("asp", 2),
        ("asp", 4),
        ("bsp", 4),
    ]
    assert made.groups()[1].span(figures_of.speed) == Spread(20.0, 10.0, 30.0, 2)
    assert made.devices() == [2, 4]


def test_failed_cells_keep_their_place_but_are_no_group() -> None:
    made = grid(Cell("soft:2", 4, failed="no"), cell("asp", 4))
    assert made.disciplines() == ["soft:2", "asp"]
    assert [g.discipline for g in made.groups()] == ["asp"]


def test_a_group_reaches_the_target_only_if_every_repeat_does() -> None:
    made = grid(cell(repeat=0, reaches=4.0), cell(repeat=1, reaches=6.0), target=0.9)
    (group,) = made.groups()
    goal = Aim(ACCURACY, 0.9)
    assert group.time_to(goal) == Spread(5.0, 4.0, 6.0, 2)
    (group,) = grid(cell(repeat=0), cell(repeat=1, accuracy=0.7)).groups()
    assert group.time_to(goal) is None
    assert group.reached(goal) == 1


def test_detail_is_shown_of_the_most_devices_that_two_share() -> None:
    made = grid(cell("bsp", 2), cell("asp", 2), cell("asp", 8))
    assert {g.devices for g in made.on_most()} == {2}
    alone = grid(cell("asp", 2), cell("asp", 8))
    assert [g.devices for g in alone.on_most()] == [2, 8]


# ---------------------------------------------------------------- the target


def test_the_target_is_what_the_weakest_reached_in_whole_per_cent() -> None:
    assert grid(cell("bsp", accuracy=0.968), cell("asp", accuracy=0.953)).aim() == Aim(
        ACCURACY, 0.95
    )
    assert grid(cell("bsp"), target=0.3).aim() == Aim(ACCURACY, 0.3)


def test_a_run_that_came_nowhere_does_not_lower_the_target() -> None:
    assert grid(cell("bsp", accuracy=0.968), cell("asp", accuracy=0.11)).aim() == Aim(
        ACCURACY, 0.96
    )


def test_a_run_that_goes_on_does_not_lower_the_target() -> None:
    made = grid(cell("bsp", accuracy=0.968), cell("asp", accuracy=0.9, finished=False))
    assert made.aim() == Aim(ACCURACY, 0.96)
    assert grid(cell("asp", accuracy=0.9, finished=False)).aim() == Aim(ACCURACY, 0.9)


def test_without_tests_there_is_no_target() -> None:
    assert grid(cell(accuracy=None)).aim() is None
    assert grid().aim() is None


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6))
def test_every_comparable_run_reaches_the_chosen_target(accuracies: list[float]) -> None:
    made = grid(*(cell("asp", 2, n, accuracy=a) for n, a in enumerate(accuracies)))
    goal = made.aim()
    assert goal is not None
    best = [d.best() or 0 for d in made.digests()]
    comparable = [d for d, b in zip(made.digests(), best, strict=True) if b >= 0.8 * max(best)]
    assert all(goal.time(d) is not None for d in comparable)


@pytest.mark.parametrize("target", [0.0, -0.1, 90.0, "90", "120%"])
def test_a_target_of_accuracy_is_a_share(target: float | str) -> None:
    with pytest.raises(ConfigError, match=r"write 90% or 0\.9 for 90 %"):
        grid(cell()).aimed(target)


def test_a_target_is_of_the_score_that_the_runs_have() -> None:
    assert grid(cell()).aimed("90%").aim() == Aim(ACCURACY, 0.9)
    losses = [told.Test(1.0, 1, 1, 4.0, None), told.Test(2.0, 2, 2, 0.3, None)]
    regression = grid(cell(tests=losses, accuracy=None))
    assert regression.aimed("0.35").aim() == Aim(LOSS, 0.35)
    assert regression.aimed(2.5).aim() == Aim(LOSS, 2.5)
    with pytest.raises(ConfigError, match=r"a loss on the test set here, so 90% means nothing"):
        regression.aimed("90%")
    with pytest.raises(ConfigError, match="no run here was tested"):
        grid(cell(accuracy=None)).aimed("0.9")
    with pytest.raises(ConfigError, match="a number such as"):
        grid(cell()).aimed("most")


def test_runs_are_judged_by_their_metric_else_accuracy_else_test_loss() -> None:
    f1, error = Judged("f1"), Judged("error", higher=False)
    tests = [told.Test(1.0, 1, 1, 0.5, 0.8, 0.7)]
    judged = cell(tests=tests, metric=f1)
    score = grid(judged).score()
    assert score is not None
    assert (score.name, score.higher) == ("f1", True)
    assert grid(judged, cell("asp", tests=tests, metric=error)).score() == ACCURACY
    assert grid(judged, cell("asp")).score() == ACCURACY
    assert grid(cell(tests=[told.Test(1.0, 1, 1, 0.5, None)])).score() == LOSS
    assert grid(cell(accuracy=None)).score() is None


def test_the_target_of_a_loss_is_what_the_weakest_came_down_to_in_round_figures() -> None:
    def came_to(*losses: float) -> list[told.Test]:
        return [told.Test(float(n), n, n, loss, None) for n, loss in enumerate(losses)]

    made = grid(
        cell("bsp", tests=came_to(2.0, 0.312)),
        cell("asp", tests=came_to(2.0, 0.333)),
        cell("soft:2", tests=came_to(2.0, 1.9)),  # came nowhere near
    )
    assert made.aim() == Aim(LOSS, 0.34)


# ---------------------------------------------------------------- figures of one run


def test_figures_of_one_run() -> None:
    digest = run("asp", 2, samples_per_second=60.0)
    assert figures_of.efficiency(digest) == 60.0 / 80.0
    assert figures_of.communication(digest) == 0.5
    assert figures_of.memory(digest) == 300_000_000
    assert figures_of.memory(run(memory={"worker": 7})) == 7
    assert figures_of.memory(run(memory={})) is None
    assert figures_of.efficiency(run(ideal=None)) is None


def test_staleness_is_added_over_repeats() -> None:
    made = grid(
        cell(repeat=0, staleness_counts={0: 1, 2: 3}), cell(repeat=1, staleness_counts={2: 4})
    )
    assert made.groups()[0].staleness() == {0: 1, 2: 7}


def test_what_is_not_real_is_named() -> None:
    assert marks([run()]) == []
    assert marks([run(engine="sim")]) == ["simulated, virtual time"]
    assert marks([run(emulated=[0.1]), run(emulated=[0.2])]) == ["emulated speeds"]
    assert marks([run(), run(engine="sim")]) == ["some runs: simulated, virtual time"]


@given(st.integers(0, 50), st.integers(2, 12))
def test_thinning_keeps_the_ends(count: int, most: int) -> None:
    points = list(range(count))
    kept = thinned(points, most)
    assert len(kept) == min(count, most)
    assert kept == sorted(set(kept))
    assert kept[:1] == points[:1]
    assert kept[-1:] == points[-1:]


# ---------------------------------------------------------------- grids nobody planned


def test_runs_made_alike_are_repeats() -> None:
    made = side_by_side([run("asp", name="a"), run("asp", name="b"), run("bsp", name="c")])
    assert [(c.discipline, c.repeat) for c in made.cells] == [("asp", 0), ("asp", 1), ("bsp", 0)]
    assert made.settings["batch size"] == "32"
    assert "shares" not in made.settings
    assert side_by_side([run(shares="speed")]).settings["shares"] == "speed"


@pytest.mark.parametrize(
    "other",
    [
        {"batch_size": 64},
        {"emulated": [0.1, 0.1]},
        {"engine": "sim"},
        {"shares": "speed"},
    ],
)
def test_runs_made_differently_go_by_their_folders(other: dict[str, object]) -> None:
    made = side_by_side([run("asp", name="a"), run("asp", name="b", **other)])
    assert [c.discipline for c in made.cells] == ["asp (a)", "asp (b)"]


def test_folders_of_one_name_are_told_apart() -> None:
    made = side_by_side([run("asp", name="a"), run("asp", name="a", batch_size=64)])
    assert len(made.groups()) == 2


def test_one_run_gives_the_page_its_name() -> None:
    assert side_by_side([run(name="mine")]).title == "Run mine"
    assert side_by_side([run(), run("asp")]).title == "2 runs side by side"


def test_a_run_without_a_folder_is_remembered() -> None:
    steps = [Step(float(n), n, n, 1.0) for n in range(5000)]
    summary = figures("asp", 2)
    digest = remembered(History([told.Test(3.0, 1, 1, 0.1, 0.95)], steps), summary)
    assert digest.ideal == 80.0
    assert len(digest.losses) == 400
    assert digest.time_to(0.9) == 3.0
    assert not digest.segments


def test_the_whole_grid_of_these_tests_is_as_it_says() -> None:
    assert len(whole().groups()) == 9
