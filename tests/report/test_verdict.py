"""The verdict in words: it names the winner, the price, and the cases without a winner."""

from typing import Any

import pytest

from offbeat.report.grid import Cell, Grid
from offbeat.report.score import Judged
from offbeat.report.summary import Test as Found
from offbeat.report.verdict import verdict
from tests.report.common import cell, grid, run, whole


def text(made: Grid) -> str:
    found = verdict(made)
    return "\n".join([found.headline, *found.sentences])


def compared(*cells: Cell) -> Grid:
    return grid(*cells, target=0.9)


def test_the_first_wins_by_so_much_and_the_price_is_named() -> None:
    made = compared(
        cell("bsp", 4, reaches=8.0, accuracy=0.97),
        cell("ssp:3", 4, reaches=6.0),
        cell(
            "asp", 4, reaches=4.0, accuracy=0.94, staleness_mean=3.0,
            memory={"worker": 600_000_000}, bytes_sent=8_000_000,
        ),
    )  # fmt: skip
    found = verdict(made)
    assert found.winner == "asp"
    assert found.headline == (
        "asp reached 90 % accuracy first on 4 devices, but ended clearly worse than bsp."
    )
    words = text(made)
    assert "4.00 s, 1.50 times as fast as the next, ssp:3 (6.00 s)" in words
    assert "2.0 times as fast as synchronous training, bsp (8.00 s)" in words
    assert "3.0 points of final accuracy (94.0 % against 97.0 %)" in words
    assert "2.0 times the memory per worker (600 MB against 300 MB)" in words
    assert "2.0 times the bytes sent (8.0 MB against 4.0 MB)" in words
    assert "3.0 updates old on average, not 0.0" in words
    assert "Where final accuracy matters more than time, synchronous is the better choice" in words


def test_when_synchronous_is_first_it_says_so() -> None:
    found = verdict(compared(cell("bsp", 4, reaches=3.0), cell("asp", 4, reaches=5.0)))
    assert found.headline.startswith("Synchronous is the better choice here: bsp")
    assert found.winner == "bsp"


def test_nothing_given_up_is_said_too() -> None:
    made = compared(cell("bsp", 4, reaches=8.0), cell("local:16", 4, reaches=4.0, accuracy=0.96))
    words = text(made)
    assert "local:16 gave up nothing measured. Its final accuracy is higher" in words


def test_somebody_else_with_a_higher_accuracy_is_named() -> None:
    made = compared(
        cell("bsp", 4, reaches=8.0),
        cell("ssp:3", 4, reaches=6.0, accuracy=0.99),
        cell("asp", 4, reaches=4.0),
    )
    assert "The highest final accuracy was that of ssp:3: 99.0 % against 95.0 %" in text(made)


def test_within_the_spread_of_repeats_there_is_no_winner() -> None:
    made = compared(
        cell("bsp", 4, 0, reaches=9.0),
        cell("bsp", 4, 1, reaches=9.1),
        cell("ssp:3", 4, 0, reaches=5.0),
        cell("ssp:3", 4, 1, reaches=7.0),
        cell("asp", 4, 0, reaches=4.0),
        cell("asp", 4, 1, reaches=6.0),
    )
    found = verdict(made)
    assert found.winner is None
    assert "No clear winner" in found.headline
    assert "asp and ssp:3" in found.headline
    assert "bsp" not in found.headline
    assert "within the spread of the repeats" in text(made)
    assert "as fast as synchronous training, bsp" in text(made)


def test_a_tie_with_synchronous_speaks_for_synchronous() -> None:
    made = compared(cell("bsp", 4, reaches=5.1), cell("asp", 4, reaches=5.0))
    words = text(made)
    assert verdict(made).winner is None
    assert "Synchronous training, bsp, is among them and then the better choice" in words
    assert "each ran once" in words


def test_nobody_reached_the_target() -> None:
    made = grid(cell("bsp", 4), cell("asp", 4, accuracy=0.93), target=0.99)
    found = verdict(made)
    assert found.headline == "No discipline reached 99 % accuracy on 4 devices."
    assert found.winner is None
    assert "The highest that was kept was 95.0 %, by bsp" in text(made)


def test_one_alone_reached_it() -> None:
    made = compared(cell("bsp", 4, accuracy=0.5), cell("asp", 4))
    assert "asp alone reached 90 % accuracy" in verdict(made).headline
    assert "Not reached by bsp (at best 50.0 %)." in text(made)


def test_some_repeats_that_missed_it_leave_a_discipline_unranked() -> None:
    made = compared(
        cell("bsp", 4, 0, reaches=8.0),
        cell("bsp", 4, 1, reaches=8.0),
        cell("asp", 4, 0, reaches=2.0),
        cell("asp", 4, 1, accuracy=0.5),
    )
    assert verdict(made).winner == "bsp"
    assert "asp reached it in 1 of 2 runs, and so is not ranked" in text(made)


def test_other_numbers_of_devices_are_told() -> None:
    words = text(whole())
    assert "on 4 devices" in words
    assert "First with other numbers of devices: asp on 1 (4.05 s) and asp on 2 (2.05 s)." in words
    assert "Speeds were emulated" in words


def test_one_discipline_on_different_devices_is_compared_by_devices() -> None:
    made = compared(cell("asp", 2, reaches=8.0), cell("asp", 8, reaches=2.0))
    assert verdict(made).headline == "asp on 8 devices reached 90 % accuracy first."


def test_one_run_is_described() -> None:
    made = compared(cell("asp", 4, engine="sim", staleness_mean=2.96))
    words = text(made)
    assert verdict(made).headline == "asp on 4 devices: 95.0 % accuracy."
    assert "reached and kept 90 % after 6.00 s" in words
    assert "3.0 updates old on average" in words
    assert "seconds are virtual" in words
    assert verdict(made).winner is None


def test_a_run_under_way_is_described_so_far() -> None:
    made = grid(cell("asp", 4, finished=False, accuracy=None))
    assert verdict(made).headline == "asp on 4 devices: a training loss of 0.1500 so far."


def test_without_tests_only_speed_is_compared_and_nobody_wins() -> None:
    made = grid(
        cell("bsp", 4, accuracy=None, samples_per_second=100.0),
        cell("asp", 4, accuracy=None, samples_per_second=150.0),
    )
    assert verdict(made).headline == "asp processed the most samples per second on 4 devices."
    assert verdict(made).winner is None
    assert "nothing about how well they learnt, and there is no winner" in text(made)
    equal = grid(cell("bsp", 4, accuracy=None), cell("asp", 4, accuracy=None))
    assert verdict(equal).winner is None


def test_virtual_and_real_seconds_are_not_compared() -> None:
    made = compared(cell("bsp", 4), cell("asp", 4, engine="sim", reaches=1.0))
    assert verdict(made).winner is None
    assert "Simulated and real" in verdict(made).headline


@pytest.mark.parametrize("cells", [[], [Cell("asp", 4)], [Cell("asp", 4, failed="broken")]])
def test_nothing_is_nothing(cells: list[Cell]) -> None:
    assert verdict(grid(*cells)).headline == "Nothing to compare yet."


def test_backups_are_synchronous_too() -> None:
    made = compared(
        Cell("bsp:backup=1", 4, 0, run("bsp:backup=1", 4, reaches=2.0)),
        cell("asp", 4, reaches=5.0),
    )
    assert "Synchronous is the better choice" in verdict(made).headline


# ---------------------------------------------------------------- other scores


def tried(*values: float, metric: bool = False) -> list[Found]:
    """Tests without classes, one after the other."""
    return [
        Found(float(n), n, n, value, None, value if metric else None)
        for n, value in enumerate(values, 1)
    ]


def regression(name: str, *losses: float, **more: Any) -> Cell:
    return cell(name, 4, accuracy=None, loss=losses[-1], tests=tried(*losses), **more)


def test_without_classes_the_test_loss_decides_and_not_the_speed() -> None:
    made = grid(
        regression("bsp", 4.0, 1.0, 0.40, 0.38, samples_per_second=50.0),
        regression("asp", 4.0, 3.0, 2.00, 0.39, samples_per_second=500.0),
        target=0.45,
    )
    found = verdict(made)
    assert found.winner == "bsp"
    assert "bsp reached a test loss of 0.45 on 4 devices after 3.00 s" in text(made)


def test_a_metric_of_ones_own_decides_in_its_own_direction() -> None:
    def judged(name: str, *values: float) -> Cell:
        tests, error = tried(*values, metric=True), Judged("word error", higher=False)
        digest = run(name, 4, tests=tests, metric=error)
        digest.summary.metric = values[-1]
        return Cell(name, 4, 0, digest)

    made = grid(judged("bsp", 0.9, 0.5, 0.2, 0.2), judged("asp", 0.9, 0.2, 0.2, 0.2), target=0.3)
    found = verdict(made)
    assert found.winner == "asp"
    assert found.headline == "asp reached word error 0.3 first on 4 devices."


def test_a_spike_is_not_a_target_reached() -> None:
    made = grid(
        regression("bsp", 4.0, 1.0, 0.4, 0.4, 0.4),
        regression("asp", 4.0, 0.3, 4.0, 4.0, 4.0),
        target=0.45,
    )
    assert verdict(made).winner == "bsp"
    assert "Not reached by asp (at best 2.767)." in text(made)


def test_a_winner_that_ended_clearly_worse_is_told_as_such() -> None:
    made = grid(
        regression("bsp", 4.0, 3.0, 0.4, 0.2, 0.1),
        regression("asp", 4.0, 0.4, 0.4, 0.4, 0.4),
        target=0.45,
    )
    found = verdict(made)
    assert found.headline == (
        "asp reached a test loss of 0.45 first on 4 devices, but ended clearly worse than bsp."
    )
    words = text(made)
    assert "asp gave up some of the final test loss (0.4 against 0.1)" in words
    assert "Where final test loss matters more than time, synchronous is the better" in words
    assert "The lowest final test loss was that of bsp: 0.1 against 0.4." in words
