"""The demo: what its figures must show, and that its words follow from them."""

import copy
import io
import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat import cli
from offbeat.cli import main
from offbeat.data.lease import Lease
from offbeat.log.records import Part, Updated
from offbeat.recipes import recipe
from offbeat.studies import demo
from offbeat.studies.demo import DemoResult, Seen, Setting

FREE = ("soft:2", "asp", "asp:weigh=inverse")
READ = ("bsp", "ssp:3", "asp", "local:8")  # those that the reading speaks of
SMALL = Setting(tuple(c for c in demo.CONTENDERS if c.sync in READ), epochs=1, step=0.001)
EXCHANGE = 0.002


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def results() -> list[DemoResult]:
    return demo.simulate()


@pytest.fixture(scope="module")
def real() -> list[DemoResult]:
    """A few contenders with real processes, shortly."""
    return demo.run(SMALL, exchange=EXCHANGE)


@pytest.fixture
def quick(
    monkeypatch: pytest.MonkeyPatch, results: list[DemoResult], real: list[DemoResult]
) -> None:
    """The command without the training."""

    def play(results: list[DemoResult], seen: Seen) -> list[DemoResult]:
        for count in range(1, len(results) + 1):
            seen(results[:count])
        return results

    monkeypatch.setattr(cli.demo, "USUAL", SMALL)
    monkeypatch.setattr(demo, "simulate", lambda setting, seen: play(results, seen))
    monkeypatch.setattr(demo, "run", lambda setting, seen, *rest: play(real, seen))
    monkeypatch.setattr(demo, "measure_exchange", lambda: EXCHANGE)


def named(results: list[DemoResult], sync: str) -> DemoResult:
    return next(result for result in results if result.sync == sync)


def changed(result: DemoResult, reached: float | None = None, **figures: object) -> DemoResult:
    summary = copy.deepcopy(result.summary)
    for key, value in figures.items():
        setattr(summary, key, value)
    return DemoResult(result.sync, result.lr, reached, summary, copy.deepcopy(result.predicted))


# ---------------------------------------------------------------- figures


def test_every_contender_learns_and_only_the_free_ones_never_wait(
    results: list[DemoResult],
) -> None:
    assert [result.sync for result in results] == [c.sync for c in demo.CONTENDERS]
    for result in results:
        assert result.reached is not None
        assert result.summary.accuracy is not None
        assert result.summary.accuracy > 0.93
        assert (result.summary.wait_share == 0) == (result.sync in FREE)
        assert (
            result.summary.ledger
            == [{"applied": 1438, "repeated": 0, "missing": 0, "dropped": 0, "skipped": 0}]
            * demo.USUAL.epochs
        )


def test_free_running_is_sooner_and_staler_than_lock_step(results: list[DemoResult]) -> None:
    lock, free = named(results, "bsp"), named(results, "asp")
    assert lock.reached is not None
    assert free.reached is not None
    assert free.reached < lock.reached / 2
    assert lock.summary.staleness_mean == 0
    assert 2.5 < free.summary.staleness_mean < 3


def test_the_figures_are_the_same_every_time(results: list[DemoResult]) -> None:
    task = recipe("digits", seed=demo.SEED)
    again = ob.train(
        task.model,
        task.data,
        task.loss,
        discipline="asp",
        optimizer=partial(torch.optim.SGD, lr=named(results, "asp").lr),
        cluster="20ms,20ms,20ms,80ms",
        epochs=demo.USUAL.epochs,
        seed=demo.SEED,
    )
    assert again.parameter_hash == named(results, "asp").summary.parameter_hash


# ---------------------------------------------------------------- real workers


def test_real_workers_do_what_the_simulator_does_but_for_time(real: list[DemoResult]) -> None:
    assert [result.sync for result in real] == list(READ)
    for result in real:
        summary, predicted = result.summary, result.predicted
        assert predicted is not None
        assert (summary.engine, predicted.engine) == ("local", "sim")
        assert summary.ledger == predicted.ledger
        assert result.measured_rate == summary.samples_per_second
        assert result.predicted_rate == predicted.samples_per_second
        assert result.error == predicted.samples_per_second / summary.samples_per_second - 1


def test_the_prediction_knows_emulated_times_and_what_an_exchange_costs(
    real: list[DemoResult],
) -> None:
    predicted = named(real, "asp").predicted
    assert predicted is not None
    for worker, step in zip(predicted.per_worker, SMALL.steps, strict=True):
        # The last lease of an epoch is a little smaller, and one push may be on its way.
        assert worker.compute == pytest.approx(worker.steps * step, rel=0.1)
        assert worker.communication == pytest.approx(worker.steps * EXCHANGE, rel=0.1)


def test_what_a_step_takes_beyond_its_emulated_time_is_the_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    def train(*task: object, listeners: list[ob.Listener], **how: object) -> None:
        given.update(how)
        for number, extra in enumerate((0.5, 0.2, 0.1, 0.002, 0.004)):
            part = Part(0, 1, number, 0, [Lease(0, 0, 1)], 1, compute=0.021, wait=9.0)
            part.communication = extra - 0.001
            listeners[0].see(Updated(0.0, number, [part]))

    monkeypatch.setattr(demo, "train", train)
    assert demo.measure_exchange() == pytest.approx(0.003)
    assert given["engine"] == "local"
    assert given["emulate"] == [0.02] * 4


def test_a_simulation_has_no_prediction(results: list[DemoResult]) -> None:
    assert results[0].predicted_rate is None
    assert results[0].error is None
    assert not any("predicted" in sentence for sentence in demo.reading(results))


# ---------------------------------------------------------------- words


def test_the_reading_follows_the_figures(results: list[DemoResult]) -> None:
    lock, ssp, free, local = (named(results, name) for name in ("bsp", "ssp:3", "asp", "local:8"))
    shown = [
        changed(lock, 4.0, accuracy=0.9, wait_share=0.4, bytes_sent=300),
        changed(ssp, 3.0, wait_share=0.1),
        changed(free, 0.5, accuracy=0.92, staleness_mean=7.0),
        changed(local, 2.0, bytes_sent=100),
    ]
    speed, slack, price, sent = demo.reading(shown)
    assert speed.startswith("asp reached 90 % after 0.50 s, 8.0 times sooner")
    assert "40 %" in speed
    assert "brings the waiting down to 10 %" in slack
    assert "7.0 updates old" in price
    assert "2.0 points above lock-step's" in price
    assert "3.0 times fewer bytes" in sent

    shown[0] = changed(lock, 0.4, accuracy=0.92, wait_share=0.1, bytes_sent=300)
    speed, slack, price, _ = demo.reading(shown)
    assert speed.startswith("Nothing reached 90 % sooner than lock-step")
    assert "runs out: 10 %" in slack
    assert "the same as lock-step's" in price
    shown[0] = changed(lock, None)
    assert demo.reading(shown)[0].startswith("Lock-step (bsp) did not reach 90 % in 12 epochs")


def test_the_reading_says_how_far_the_prediction_was_off(real: list[DemoResult]) -> None:
    rates = {"bsp": 0.95, "ssp:3": 1.0, "asp": 1.25, "local:8": 1.02}  # measured to predicted
    shown = []
    for result in real:
        assert result.predicted_rate is not None
        measured = result.predicted_rate * rates[result.sync]
        shown.append(changed(result, 1.0, samples_per_second=measured))
    asp = named(shown, "asp")
    assert asp.predicted is not None
    for summary, communication in ((asp.summary, 0.012), (asp.predicted, 0.01)):
        first = summary.per_worker[0]
        first.steps, first.compute, first.communication = 10, 0.03, communication
    last = demo.reading(shown)[-1]
    assert "to within 20.0 %" in last
    assert "furthest off with asp: there a fast worker needed 4.2 ms" in last
    assert "4.0 ms were expected" in last


def test_the_introduction_says_that_speeds_are_emulated() -> None:
    text = demo.introduction(Setting(epochs=3, step=0.01), 0.0015)
    for words in ("emulated", "10 ms", "40 ms", "3 epochs", "1.5 ms", "simulator"):
        assert words in text


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("engine", ["local", "sim"])
def test_the_command_prints_a_table_its_reading_and_what_to_try(
    capsys: pytest.CaptureFixture[str],
    results: list[DemoResult],
    real: list[DemoResult],
    engine: str,
) -> None:
    shown = real if engine == "local" else results
    assert main(["demo", "--engine", engine]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    for result in shown:
        row = next(line for line in lines if line.startswith(f"{result.sync} "))
        assert f"{result.measured_rate:,.0f}" in row
        if result.predicted_rate is not None:
            assert f"{result.measured_rate:,.0f} / {result.predicted_rate:,.0f}" in row
    joined = " ".join(out.split())
    for sentence in demo.reading(shown):
        assert sentence in joined
    assert ("virtual" in out + err) == (engine == "sim")
    assert ("emulated" in out) == (engine == "local")
    assert "offbeat simulate --sync ssp:3" in out
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in out + err
    assert "…" not in out
    assert len(err.splitlines()) == len(shown)


@pytest.mark.usefixtures("quick")
def test_the_command_runs_on_real_workers_unless_told_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "local"


@pytest.mark.usefixtures("quick")
def test_a_simulation_as_json(
    capsys: pytest.CaptureFixture[str], results: list[DemoResult]
) -> None:
    assert main(["demo", "--engine", "sim", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["discipline"] for run in told["runs"]] == [result.sync for result in results]
    assert told["runs"][0]["seconds_to_target"] == results[0].reached
    assert "predicted" not in told["runs"][0]
    assert told["reading"] == demo.reading(results)


@pytest.mark.usefixtures("quick")
def test_real_workers_as_json(capsys: pytest.CaptureFixture[str], real: list[DemoResult]) -> None:
    assert main(["demo", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["emulated"] == [0.001, 0.001, 0.001, 0.004]
    assert told["exchange_seconds"] == EXCHANGE
    assert told["reading"] == demo.reading(real)
    for run, result in zip(told["runs"], real, strict=True):
        assert run["samples_per_second"] == result.measured_rate
        assert run["predicted"]["samples_per_second"] == result.predicted_rate
        assert run["parameter_hash"] == result.summary.parameter_hash


def test_in_a_terminal_the_table_grows_while_a_contender_runs(
    monkeypatch: pytest.MonkeyPatch, real: list[DemoResult]
) -> None:
    file = Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(cli.demo, "USUAL", SMALL)
    with cli.demo._growing() as growing:
        growing.finished(real[:1])
        assert "ssp:3" in file.getvalue()
        # The run that has been measured has shares of its own, and any of them may stand there.
        done = next(n for n in range(30, 70) if f"{n} %" not in file.getvalue())
        growing.begin(SimpleNamespace(applied=done), 100)
        growing.see(Updated(0.0, 1, []))
        assert f"{done} %" in file.getvalue()
    assert "\x1b[?25l" not in file.getvalue()


def test_the_commands_to_try_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for line in demo.next_steps():
        program, command, *words = line.split()
        assert program == "offbeat"
        if "--cost-only" in words:
            assert main([command, *words, "--steps", "2"]) == 0
        else:
            assert main([command, *words, "--help"]) == 0
    assert "error" not in capsys.readouterr().err


def test_without_scikit_learn_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    assert "pip install offbeat[recipes]" in capsys.readouterr().err
