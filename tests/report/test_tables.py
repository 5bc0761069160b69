"""Figures as words and tables: right numbers, 80 columns, nothing but text outside a terminal."""

import io

import pytest

import offbeat as ob
from offbeat.report import tables
from offbeat.report.tables import console, ledger_line, run_table, runs_table, seconds, size


def rendered(thing: object) -> str:
    file = io.StringIO()
    console(file).print(thing)
    return file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123, "0.0123"), (0.52, "0.52"), (71.94, "71.9"), (1240.4, "1,240")],
)
def test_seconds_keep_the_figures_that_matter(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (3_500_000, "3.5 MB"), (100_000, "100 kB"), (2e15, "2,000.0 TB")],
)
def test_sizes_use_decimal_units(value: float, text: str) -> None:
    assert size(value) == text


def test_the_ledger_names_what_was_not_applied_once() -> None:
    fine = {"applied": 10, "repeated": 0, "missing": 0, "dropped": 0, "skipped": 0}
    assert ledger_line([fine]) == "1 epoch: 10 samples applied once, none lost"
    worse = fine | {"applied": 6, "dropped": 4}
    assert ledger_line([fine, worse]) == "2 epochs: 16 samples applied once, 4 dropped"


def test_a_run_says_who_waited_and_how_long() -> None:
    text = rendered(run_table(ob.estimate("20ms,80ms", "bsp", steps=10, model_bytes=1000)))
    fast = next(line for line in text.splitlines() if line.startswith("0 "))
    slow = next(line for line in text.splitlines() if line.startswith("1 "))
    # Of every round of 80 ms the fast worker computes 20.
    assert "0.20 s" in fast
    assert "0.60 s" in fast
    assert "0.80 s" in slow
    assert " 0 s" in slow
    assert "virtual second" in text
    assert "2 epochs" not in text


def test_many_workers_are_shown_by_their_extremes() -> None:
    times = ",".join(f"{20 + number}ms" for number in range(30))
    text = rendered(run_table(ob.estimate(times, "bsp", steps=3)))
    first = [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]
    # The four fastest waited longest, the four slowest were waited for.
    assert first == ["0", "1", "2", "3", "26", "27", "28", "29"]
    assert "+22 (mean)" in text


@pytest.mark.parametrize("workers", [2, 40])
def test_everything_fits_80_columns_and_is_plain(workers: int) -> None:
    summary = ob.estimate(ob.Cluster.equal(workers), "asp", steps=2, model_bytes=10**12)
    side_by_side = runs_table([(summary, 0.5), (summary, None)], coming=["bsp", "local:8"])
    for text in (rendered(run_table(summary)), rendered(side_by_side)):
        assert max(map(len, text.splitlines())) <= tables.COLUMNS
        assert "\x1b" not in text
        assert "…" not in text


def test_side_by_side_names_every_run_and_the_time_to_the_target() -> None:
    one = ob.estimate("20ms,80ms", "bsp", steps=5)
    two = ob.estimate("20ms,80ms", "asp:weigh=inverse", steps=5)
    text = rendered(runs_table([(one, 1.25), (two, None)], target=0.8))
    assert "80 % after" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "1.25 s" in lines["bsp"]
    assert "never" in lines["asp:weigh=inverse"]


def test_outside_a_terminal_long_text_is_wrapped_at_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert max(map(len, rendered("word " * 60).splitlines())) <= tables.COLUMNS
