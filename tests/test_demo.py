"""The demo: what its figures must show, and that its words follow from them."""

import copy
import json
import sys
from functools import partial

import pytest
import torch

import offbeat as ob
from offbeat import demo
from offbeat.cli import main
from offbeat.demo import Result

FREE = ("soft:2", "asp", "asp:weigh=inverse")


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return demo.run()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, results: list[Result]) -> None:
    """The command without the training."""

    def run(seen: object) -> list[Result]:
        assert callable(seen)
        for count in range(1, len(results) + 1):
            seen(results[:count])
        return results

    monkeypatch.setattr(demo, "run", run)


def named(results: list[Result], sync: str) -> Result:
    return next(result for result in results if result.sync == sync)


def changed(result: Result, reached: float | None = None, **figures: object) -> Result:
    summary = copy.deepcopy(result.summary)
    for key, value in figures.items():
        setattr(summary, key, value)
    return Result(result.sync, result.lr, reached, summary)


# ---------------------------------------------------------------- figures


def test_every_contender_learns_and_only_the_free_ones_never_wait(results: list[Result]) -> None:
    assert [result.sync for result in results] == [c.sync for c in demo.CONTENDERS]
    for result in results:
        assert result.reached is not None
        assert result.summary.accuracy is not None
        assert result.summary.accuracy > 0.93
        assert (result.summary.wait_share == 0) == (result.sync in FREE)
        assert (
            result.summary.ledger
            == [{"applied": 1438, "repeated": 0, "missing": 0, "dropped": 0, "skipped": 0}]
            * demo.EPOCHS
        )


def test_free_running_is_sooner_and_staler_than_lock_step(results: list[Result]) -> None:
    lock, free = named(results, "bsp"), named(results, "asp")
    assert lock.reached is not None
    assert free.reached is not None
    assert free.reached < lock.reached / 2
    assert lock.summary.staleness_mean == 0
    assert 2.5 < free.summary.staleness_mean < 3


def test_the_figures_are_the_same_every_time(results: list[Result]) -> None:
    task = ob.recipes.digits(seed=demo.SEED)
    again = ob.train(
        task.model,
        task.data,
        task.loss,
        discipline="asp",
        optimizer=partial(torch.optim.SGD, lr=named(results, "asp").lr),
        cluster=demo.cluster(),
        epochs=demo.EPOCHS,
        seed=demo.SEED,
    )
    assert again.parameter_hash == named(results, "asp").summary.parameter_hash


# ---------------------------------------------------------------- words


def test_the_reading_follows_the_figures(results: list[Result]) -> None:
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
    assert demo.reading(shown)[0].startswith("Lock-step (bsp) did not reach")


@pytest.mark.usefixtures("quick")
def test_the_command_prints_a_table_its_reading_and_what_to_try(
    capsys: pytest.CaptureFixture[str], results: list[Result]
) -> None:
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    for contender in demo.CONTENDERS:
        assert contender.sync in out
    joined = " ".join(out.split())
    for sentence in demo.reading(results):
        assert sentence in joined
    assert "offbeat simulate --sync ssp:3" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out + err
    assert "…" not in out
    assert len(err.splitlines()) == len(results)


@pytest.mark.usefixtures("quick")
def test_the_command_as_json(capsys: pytest.CaptureFixture[str], results: list[Result]) -> None:
    assert main(["demo", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["discipline"] for run in told["runs"]] == [result.sync for result in results]
    assert told["runs"][0]["seconds_to_target"] == results[0].reached
    assert told["reading"] == demo.reading(results)


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
