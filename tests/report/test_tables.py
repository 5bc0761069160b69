"""Figures as words and tables: right numbers, 80 columns, nothing but text outside a terminal."""

import io

import msgspec
import pytest

import offbeat as ob
from offbeat.report import tables
from offbeat.report.summary import LayoutFigures, ProcessFigures, Summary, TurnFigures
from offbeat.report.tables import (
    Beside,
    TargetOutcome,
    beside_table,
    console,
    figures,
    ledger_line,
    overlap_line,
    run_table,
    runs_table,
    seconds,
    size,
    steps_line,
)
from tests.report import common


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


def test_the_turns_of_a_course_have_a_row_each() -> None:
    summary = common.run("switch:bsp,asp,at=25%").summary
    assert "turn" not in dict(figures(summary))
    turn = TurnFigures(0.75, 12, "asp", 0.25, "25 % of the work is done")
    summary.turns = [turn]
    assert dict(figures(summary))["turn"] == (
        "to asp at 0.75 s, version 12, rate × 0.25: 25 % of the work is done"
    )
    summary.turns = [msgspec.structs.replace(turn, version=v) for v in range(50)]
    rows = [text for name, text in figures(summary) if name == "turn"]
    assert len(rows) == 8
    assert rows[6] == "43 more"
    assert "version 49" in rows[7]
    summary.turns = [msgspec.structs.replace(turn, why="\x1b[2J")]
    assert "\x1b" not in dict(figures(summary))["turn"]


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


def test_a_run_with_uneven_shares_says_how_many_samples_each_worker_had_in_a_step() -> None:
    text = rendered(run_table(ob.estimate("40ms,10ms", "bsp", steps=10, shares="1,4")))
    assert dict(figures(ob.estimate("40ms,10ms", "bsp", shares="1,4")))["shares"] == "1,4"
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("worker")).split()[-1] == "batch"
    assert next(line for line in lines if line.startswith("0 ")).split()[-1] == "13.0"
    usual = rendered(run_table(ob.estimate("40ms,10ms", "bsp", steps=10)))
    assert "batch" not in usual
    assert "shares" not in usual
    many = rendered(run_table(ob.estimate("40ms," * 30 + "10ms", "bsp", shares="speed")))
    assert all(len(line) <= 80 for line in many.splitlines())


def real(summary: Summary, emulated: list[float] | None = None) -> Summary:
    """The summary as the local engine would give it."""
    summary.engine = "local"
    summary.emulated = emulated or []
    summary.memory = {"store": 40_000, "worker": 80_000, "worker_peak": 313_000_000}
    return summary


def test_a_real_run_names_its_engine_and_whether_speeds_were_emulated() -> None:
    summary = ob.estimate("20ms,80ms", "bsp", steps=10)
    assert not {"engine", "emulated", "overlap"} & dict(figures(summary)).keys()
    told = dict(figures(real(summary)))
    assert "real time" in told["engine"]
    assert "emulated" not in told
    assert told["speed"].startswith("800 samples/s: 640 samples in 0.80 s")
    assert "313 MB for all of the largest worker process" in told["memory"]
    text = rendered(run_table(real(summary, [0.02, 0.08])))
    assert "virtual" not in text
    assert "20 ms, 80 ms for a step at the least" in text


@pytest.mark.parametrize(
    ("steps", "text"),
    [([0.02] * 3 + [0.08], "3 × 20 ms, 80 ms"), ([1.5, 0.0005], "1.5 s, 0.5 ms"), ([2.0], "2 s")],
)
def test_equal_steps_are_counted(steps: list[float], text: str) -> None:
    assert steps_line(steps) == text


@pytest.mark.parametrize(
    ("overlap", "text"),
    [
        ({"input_queue": 1.84}, "1.8 batches ready on average"),
        ({"exchange_hidden": 0.5}, "50 % of exchange hidden behind computing"),
        (
            {"input_queue": 2, "reading_hidden": 0.97, "output_queue": 0.3, "exchange_hidden": 0.5},
            "2.0 batches ready on average, 0.3 contributions under way, 97 % of reading hidden, "
            "50 % of exchange hidden behind computing",
        ),
    ],
)
def test_overlap_is_told_where_stages_overlapped(overlap: dict[str, float], text: str) -> None:
    assert overlap_line(overlap) == text
    summary = ob.estimate("20ms", "bsp", steps=1)
    summary.overlap = overlap
    assert dict(figures(summary))["overlap"] == text


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
    summary.overlap = {"input_queue": 2.0, "reading_hidden": 1.0, "exchange_hidden": 1.0}
    both = run_table(real(summary, [0.001 * number for number in range(workers)]))
    for text in (rendered(both), rendered(side_by_side)):
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


def test_measured_and_predicted_stand_beside_each_other_in_80_columns() -> None:
    names = ["bsp", "asp:weigh=inverse"]
    rows = []
    for name in names:
        one, two = (ob.estimate("20ms,80ms", name, steps=5) for _ in range(2))
        one.samples_per_second, two.samples_per_second = 5_123.0, 4_987.0
        rows.append(Beside(0.15, TargetOutcome(one, None), TargetOutcome(two, 12.5)))
    rows[0] = rows[0]._replace(lr=None)
    text = rendered(beside_table(rows, target=0.8, coming=["diloco:8", "asup"], done=0.37))
    assert "s to 80 %" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    for name, lr in zip(names, ("-", "0.15"), strict=True):
        assert lines[name].split()[1] == lr
        assert "5,123 / 4,987" in lines[name]
        assert "never / 12.5" in lines[name]
    assert lines["diloco:8"].split()[1:] == ["37", "%"]
    assert lines["asup"].split()[1:] == ["..."]
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_outside_a_terminal_long_text_is_wrapped_at_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert max(map(len, rendered("word " * 60).splitlines())) <= tables.COLUMNS


def split() -> LayoutFigures:
    found = LayoutFigures(
        "pp=2,microbatches=8",
        4,
        predicted_seconds=0.018,
        predicted_idle_share=0.1,
        per_process=[
            ProcessFigures(100, 1.0, 2.0, 5_000_000),
            ProcessFigures(100, 1.5, 1.9, 3_000_000),
        ],
    )
    found.measure()
    return found


def test_the_slowest_process_ends_a_step() -> None:
    found = split()
    assert found.seconds == pytest.approx(0.02)
    assert [p.idle_share for p in found.per_process] == pytest.approx([0.5, 0.25])
    assert found.idle_share == pytest.approx(0.375)


def test_a_split_run_says_what_its_processes_did() -> None:
    shown = rendered(run_table(common.figures("asp", 2, layout=split())))
    assert "pp=2,microbatches=8 · 4 processes" in shown
    assert "20.0 ms a step, 38 % of it idle; predicted 18.0 ms a step, 10 % idle" in shown
    assert "15.0 ms a step   25 %   3.0 MB" in shown
    simulated = rendered(run_table(common.figures("asp", 2, layout=LayoutFigures("pp=2", 4))))
    assert "pp=2 · 4 processes" in simulated
    assert "idle" not in simulated


# ---------------------------------------------------------------- links


def test_who_is_in_its_link_is_told_from_who_waits() -> None:
    summary = common.figures("bsp", 3, per_worker=common.afar(), engine="hosts")
    summary.wire_bytes = 6_000_000
    told = dict(figures(summary))
    assert told["network"] == (
        "6.0 MB over the wire to 2 hosts, round trip 0.3 to 21 ms; 29 % of the workers' time went "
        "into the link"
    )
    assert told["slow link"].startswith("worker 1 on far away spent 86 % of its time in its link: ")
    lines = [line.split() for line in rendered(run_table(summary)).splitlines()]
    assert [
        "1",
        "far",
        "away",
        "21",
        "ms",
        "300",
        "kB/s",
        "250",
        "kB/s",
        "2.0",
        "MB",
        "86",
        "%",
    ] in lines
    assert ["2", "near", "0.4", "ms", "-", "-", "2.0", "MB", "0", "%"] in lines
    assert all(len(line) <= 80 for line in rendered(run_table(summary)).splitlines())


def test_what_the_store_took_is_not_put_down_to_a_link() -> None:
    (near, far, third) = common.afar()
    # Of half a second only 23 ms were on the way.
    assert near.in_link == pytest.approx(0.02 + 10 * 0.0003)
    assert far.in_link == pytest.approx(8.0 + 10 * 0.0213)
    # Behind a step an exchange takes nothing of a worker's time.
    far.communication = 0.1
    assert far.in_link == 0.1
    # A log of before measured nothing.
    assert third.link is not None
    third.link.sent = third.link.received = 0
    assert third.in_link == third.communication


def test_of_many_workers_those_are_shown_whose_links_took_most() -> None:
    far = common.afar()[1]
    summary = common.figures("asp", 30, per_worker=[common.afar()[0] for _ in range(30)])
    summary.engine, summary.per_worker[17] = "hosts", far
    told = dict(figures(summary))
    assert told["slow link"].startswith("worker 17 on far away ")
    summary.per_worker[21] = far
    assert "and 1 more worker like it" in dict(figures(summary))["slow link"]
    shown = rendered(run_table(summary)).split("round trip")[-1]
    assert len(shown.splitlines()) < 12
    assert shown.count("far away") == 2


def test_without_a_network_nothing_is_said_of_one() -> None:
    text = rendered(run_table(real(ob.estimate("20ms,80ms", "bsp", steps=10))))
    for word in ("network", "link", "wire", "round trip", "host"):
        assert word not in text
