"""Leases of uneven sizes: a gather is still the large batch, and every sample is applied once."""

import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

import offbeat as ob
from offbeat.compare import ComparisonPlan, Simulated, compare
from offbeat.engine.script_hosts import SingleHost
from offbeat.engine.sim.compute_times import Constant
from offbeat.errors import CheckpointError, ConfigError
from offbeat.log.records import Joined, Lost, Updated
from tests.cli.common import answers
from tests.contract.common import (
    CODECS,
    MOMENTUM,
    SGD,
    Records,
    Stop,
    StopAfter,
    assert_close,
    assert_same_bits,
    both,
    check_run,
    clusters,
    covering,
    examples,
    named,
    optimizer_for,
    plain,
    problem,
    run,
    scratch,
    seeds,
)
from tests.contract.real import AtStep, Gate, level
from tests.contract.test_real_faults import KillServer
from tests.engine.local.test_scripts import SCRIPT, offbeat

answer = answers()
ADAM = partial(torch.optim.Adam, lr=0.01)
UNEQUAL = "40ms,20ms,10ms"
NAMES = [
    *("bsp", "bsp-backup", "soft", "ssp", "asp", "asp-dc", "downpour-rare-fetch", "asup"),
    *("average", "local", "bmuf-nesterov", "fedbuff"),
]
BATCH = 9


def sizes(seen: Records) -> list[dict[int, int]]:
    """Samples of each worker in each update."""
    return [{p.worker: p.samples for p in record.parts} for record in seen.of(Updated)]


# ---------------------------------------------------------------- the large batch


@pytest.mark.parametrize(
    ("engine", "shares", "optimizer"),
    [
        *covering(["1,2,4", [4, 1, 2], "speed", "speed:most=1.5,least=3"], [SGD, MOMENTUM, ADAM]),
        ("hosts", "speed", SGD),
    ],
)
def test_gathering_all_is_a_large_batch_whatever_the_shares(engine, shares, optimizer):
    """The last round of the epoch is short: it has 11 of 27 samples."""
    what, seen = problem(samples=3 * 27 + 11), Records()
    options = {"cluster": UNEQUAL, "optimizer": optimizer, "batch_size": BATCH, "epochs": 1}
    got = run(engine, what, "bsp", shares=shares, listeners=[seen], **options)
    assert [sum(mine.values()) for mine in sizes(seen)] == [27, 27, 27, 11]
    if engine == "sim" or shares == "1,2,4":
        assert len(set(sizes(seen)[2].values())) == 3
    assert_close(got.model, plain(what, optimizer, batch_size=27, epochs=1), 1e-10)


@examples(10)
@given(clusters(), seeds, st.sampled_from(["bsp", "average:1", "local:1"]))
def test_shares_by_any_speeds_are_a_large_batch(sim_only, cluster, seed, name):
    n = len(cluster)
    what = problem(samples=n * 6 * 4, seed=seed)
    options = {"cluster": cluster, "optimizer": SGD, "batch_size": 6, "seed": seed}
    got = run(sim_only, what, name, shares="speed", **options)
    assert_close(got.model, plain(what, SGD, batch_size=n * 6, seed=seed), 1e-10)


def test_a_batch_in_parts_is_a_large_batch_too(engine):
    seen, what = Records(), problem(samples=54)
    options = {"cluster": UNEQUAL, "optimizer": SGD, "batch_size": 3, "accumulate": 3}
    got = run(engine, what, "bsp", shares="1,2,4", listeners=[seen], **options)
    assert sizes(seen)[0] == {0: 3, 1: 9, 2: 15}  # of three parts each
    assert_close(got.model, plain(what, SGD, batch_size=27), 1e-10)


def test_split_replicas_have_shares_of_whole_microbatches(engine):
    seen, what = Records(), problem(samples=48)
    options = {"optimizer": SGD, "batch_size": 12, "workers": 2, "layout": "pp=2,microbatches=2"}
    got = run(engine, what, "bsp", shares="1,3", listeners=[seen], **options)
    assert sizes(seen)[0] == {0: 6, 1: 18}
    assert_close(got.model, plain(what, SGD, batch_size=24), 1e-10)


def test_workers_that_add_up_among_themselves_weigh_by_samples_too(real, tmp_path):
    what, out = problem(samples=81), tmp_path / "run"
    options = {"cluster": UNEQUAL, "optimizer": SGD, "batch_size": BATCH, "out": out}
    got = run(real, what, "bsp", shares="1,2,4", via="allreduce", **options)
    assert_close(got.model, plain(what, SGD, batch_size=27), 1e-10)
    check_run(out, what)


def test_with_drop_last_the_same_samples_are_left_out(sim_only):
    what = problem(samples=60)
    options = {"cluster": UNEQUAL, "optimizer": SGD, "batch_size": BATCH, "drop_last": True}
    got = run(sim_only, what, "bsp", shares="speed", epochs=1, **options)
    assert got.summary().ledger[0] | {"applied": 54, "left_out": 6} == got.summary().ledger[0]


# ---------------------------------------------------------------- exactly once, again and again


@pytest.mark.parametrize(("engine", "name"), both(NAMES, ["bsp", "ssp", "local", "bsp-backup"]))
@examples(3)
@given(
    cluster=clusters(faults=True),
    seed=seeds,
    codec=st.sampled_from(CODECS),
    shares=st.sampled_from(["speed", "speed:most=2,least=2", "given"]),
)
def test_every_sample_once_whatever_dies_and_a_replay_is_identical(
    engine, name, cluster, seed, codec, shares
):
    what, discipline = problem(samples=30), named(len(cluster))[name]
    if shares == "given":
        shares = [1 + worker for worker in range(len(cluster))]
    with scratch() as place:
        run(
            engine, what, discipline, cluster=cluster, seed=seed, codec=codec, shares=shares,
            out=place / "run",
        )  # fmt: skip
        check_run(place / "run", what)


@pytest.mark.parametrize(
    ("engine", "more"), [("local", {}), ("hosts", {}), ("local", {"layout": "pp=2"})]
)
def test_an_emulated_batch_takes_its_share_of_the_time(engine, more):
    """That of three times as many samples takes three times as long, at the least."""
    seen, options = Records(), {"emulate": [0.02, 0.02], "workers": 2, "epochs": 1}
    run(engine, problem(), "bsp", shares=[1, 3], listeners=[seen], **options, **more)
    parts = [part for record in seen.of(Updated) for part in record.parts]
    assert {part.samples for part in parts} == {2, 6}
    for part in parts:
        assert part.compute > 0.019 * part.samples / 4


def test_a_killed_servers_leases_go_out_again_whatever_their_size(local_only, tmp_path):
    """What had been handed out by then is known from the log alone: nothing was saved before.

    Workers wait in their seventh step until it is dead, so that it does not finish before.
    """
    gate, seen, out = Gate(), Records(), tmp_path / "run"
    what = problem(samples=90)
    acts = {(worker, 7): gate.wait for worker in range(2)}
    what = level(local_only, what._replace(loss=AtStep(what.loss, acts)), 2)
    run(
        local_only, what, "bsp", workers=2, shares=[1, 3], checkpoint_every=1000, out=out,
        listeners=[KillServer(3, gate), seen],
    )  # fmt: skip
    check_run(out, what)
    assert Counter(record.worker for record in seen.of(Joined)) == {0: 2, 1: 2}


def test_overlapped_steps_replay_too(local_only, tmp_path):
    what, out = problem(samples=54), tmp_path / "run"
    run(local_only, what, "bsp", cluster=UNEQUAL, shares="speed", overlap=True, out=out)
    check_run(out, what)


@pytest.mark.parametrize("name", ["bsp", "ssp", "local"])
@examples(3)
@given(cluster=clusters(faults=True), seed=seeds, every=st.integers(1, 5), after=st.integers(1, 70))
def test_stopped_and_resumed_it_arrives_at_the_same_bits(
    sim_only, name, cluster, seed, every, after
):
    """Where a store is resumed alone, as real ones are, workers show their speed anew."""
    what, discipline = problem(samples=30), named(len(cluster))[name]
    options = {
        "cluster": cluster, "seed": seed, "checkpoint_every": every, "shares": "speed",
        "optimizer": optimizer_for(discipline),
    }  # fmt: skip
    with scratch() as place:
        whole = run(sim_only, what, discipline, out=place / "whole", **options)
        out = place / "stopped"
        try:
            got = run(sim_only, what, discipline, out=out, listeners=[StopAfter(after)], **options)
        except Stop:
            got = run(sim_only, what, discipline, out=out, resume=True, **options)
        assert (out / "log.jsonl").read_bytes() == (place / "whole/log.jsonl").read_bytes()
        assert_same_bits(got.model, whole.model)


def test_real_workers_are_resumed_and_the_log_can_be_followed(local_only, tmp_path):
    what, out = problem(samples=60), tmp_path / "run"
    options = {"cluster": UNEQUAL, "shares": "speed", "out": out, "checkpoint_every": 2}
    with pytest.raises(Stop):
        run(local_only, what, "bsp", listeners=[StopAfter(25)], **options)
    run(local_only, what, "bsp", resume=True, **options)
    check_run(out, what)


def test_a_run_goes_on_with_the_shares_that_it_had(sim_only, tmp_path):
    what, out = problem(samples=60), tmp_path / "run"
    options = {"cluster": UNEQUAL, "out": out, "checkpoint_every": 2}
    with pytest.raises(Stop):
        run(sim_only, what, "bsp", shares="speed", listeners=[StopAfter(20)], **options)
    assert json.loads((out / "run.json").read_text())["shares"] == "speed"
    with pytest.raises(CheckpointError, match="shares is None here and speed in the run"):
        run(sim_only, what, "bsp", resume=True, **options)
    run(sim_only, what, "bsp", shares=ob.SpeedShares(), resume=True, **options)


def test_equal_shares_are_what_they_were(engine, tmp_path):
    """A folder of before says nothing of shares."""
    what = problem(samples=26)
    same = {"cluster": UNEQUAL, "optimizer": MOMENTUM}
    told: list[ob.Run] = []
    for shares in (None, "equal", ob.EqualShares()):
        out: Path = tmp_path / str(len(told))
        told.append(run(engine, what, "bsp", shares=shares, out=out, **same))
        assert json.loads((out / "run.json").read_text())["shares"] is None
    assert_same_bits(told[0].model, told[1].model)
    assert_same_bits(told[0].model, told[2].model)


# ---------------------------------------------------------------- what they are for


def lock_step(shares: str | None, samples: int = 28 * 90) -> tuple[float, ob.Run]:
    """Samples a second of the ideal, which is the sum of all speeds: virtual time alone tells."""
    what = problem(samples=samples)
    got = run("sim", what, "bsp", cluster=UNEQUAL, shares=shares, batch_size=28, epochs=1)
    return got.summary().samples_per_second / (28 / 0.04 + 28 / 0.02 + 28 / 0.01), got


def test_lock_step_on_unequal_machines_loses_next_to_nothing(sim_only):
    of_ideal, got = lock_step("speed")
    assert of_ideal > 0.95
    assert [round(w.samples / w.steps) for w in got.summary().per_worker] == [13, 24, 47]
    assert lock_step(None)[0] < 0.45
    assert lock_step("1,2,4")[0] > 0.99


def test_when_a_worker_is_lost_the_others_share_what_is_left(sim_only):
    """The fastest of three dies: a round then has two batches, by the speeds of the two."""
    machines = (
        ob.Machine(Constant(0.04)),
        ob.Machine(Constant(0.02)),
        ob.Machine(Constant(0.01), failures=(ob.Failure(0.2),)),
    )
    seen = Records()
    run(
        sim_only, problem(samples=28 * 40), "bsp", cluster=ob.Cluster(machines, patience=0.05),
        shares="speed", batch_size=28, epochs=1, listeners=[seen],
    )  # fmt: skip
    assert len(list(seen.of(Lost))) == 1
    assert sizes(seen)[2] == {0: 12, 1: 24, 2: 48}
    assert sizes(seen)[-3] == {0: 19, 1: 37}


# ---------------------------------------------------------------- what is refused


def test_what_makes_no_sense_is_refused_before_a_run(engine):
    for shares, name, says in (
        ("1,2", "bsp", "shares=1,2 are of 2 workers, and there are 3"),
        ("speed", "gossip", "weighed by samples"),
        ("speed:least=9", "bsp", "least=9 is more than a batch of 4"),
        (3, "bsp", "shares cannot be 3: write 'speed'"),
    ):
        with pytest.raises(ConfigError, match=says):
            run(engine, problem(), name, workers=3, shares=shares)


class Pairs(Dataset):
    """Makes batches itself: each item is one."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        rows = torch.arange(6, dtype=torch.float64).view(2, 3) + number
        return rows, rows[:, :2]


def test_batches_that_the_data_makes_are_not_cut_anew(sim_only):
    """Their samples may have to be together, and of a lease of two such batches one would count."""
    what, options = problem(), {"cluster": UNEQUAL, "batch_size": None, "epochs": 1}
    sampler = BatchSampler(SequentialSampler(what.data), 4, False)
    other = type("Buckets", (BatchSampler,), {})(SequentialSampler(what.data), 4, False)
    for loader in (
        DataLoader(what.data, batch_sampler=other),
        DataLoader(Pairs(), batch_size=None),
    ):
        with pytest.raises(
            ConfigError, match="other sizes than the DataLoader makes: leave shares"
        ):
            run(sim_only, what._replace(data=loader), "bsp", shares="speed", **options)
        run(sim_only, what._replace(data=loader), "bsp", shares="equal", **options)
    plainly = DataLoader(what.data, batch_sampler=sampler)
    got = run(sim_only, what._replace(data=plainly), "bsp", shares="1,2,3", **options)
    assert [round(w.batch) for w in got.summary().per_worker] == [2, 4, 6]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("shares", "more", "remedy"),
    [
        ("speed", {}, "shares='speed:least=2'"),
        ("1,2,4", {}, "shares='1,2,4,least=2'"),
        ("speed:least=2", {"layout": "pp=2,microbatches=2"}, "shares='speed:least=4'"),
        ("speed:least=4", {"batch_size": 2, "accumulate": 4}, "accumulate=1"),
    ],
)
def test_batch_norm_needs_two_samples_at_a_time(sim_only, shares, more, remedy):
    """45 is no multiple of anything here, so that the end of an epoch has what is left."""
    what, options = problem(normed, samples=45), {"cluster": UNEQUAL, "batch_size": 8} | more
    with pytest.raises(ConfigError, match=f"batch norm refuses that.*write {remedy}"):
        run(sim_only, what, "bsp", shares=shares, **options)
    if remedy.startswith("shares"):
        run(sim_only, what, "bsp", shares=remedy.split("'")[1], **options)


# ---------------------------------------------------------------- scripts and the command line


def script(folder):
    path = folder / "train.py"
    text = SCRIPT.replace("HERE", "pass").replace("AFTER", "")
    path.write_text(text.replace("ob.join(", "ob.join(shares=[1, 3], ", 1))
    return path


def check_script(capsys, path, out):
    assert json.loads((out / "run.json").read_text())["shares"] == "1,3"
    slow, fast = json.loads((out / "summary.json").read_text())["per_worker"]
    assert fast["samples"] > 2 * slow["samples"]
    code, told, wrong = answer(capsys, "run", "--replay", out, path)
    assert code == 0, wrong
    assert "identical at all" in told


def test_a_scripts_loop_gets_batches_of_its_workers_size(tmp_path, capsys):
    path, out = script(tmp_path), tmp_path / "run"
    code, _, wrong = answer(capsys, "run", "--engine", "sim", "-n", 2, "--out", out, path)
    assert code == 0, wrong
    check_script(capsys, path, out)
    # The command line wins.
    _, _, wrong = answer(capsys, "run", "--engine", "sim", "-n", 2, "--shares", "1,2,4", path)
    assert "shares=1,2,4 are of 3 workers, and there are 2" in wrong


def test_so_does_a_real_scripts_and_alone_there_is_nothing_to_share(tmp_path, capsys):
    path, out = script(tmp_path), tmp_path / "run"
    done = offbeat("run", "-n", "2", "--out", out, path)
    assert done.returncode == 0, done.stderr
    check_script(capsys, path, out)
    assert SingleHost().settle({"shares": [1, 3], "seed": 1})["shares"] is None


def test_the_command_line_estimates_with_shares(capsys):
    words = ("simulate", "--cost-only", "--cluster", UNEQUAL, "--steps", 50, "--json")
    summary = json.loads(answer(capsys, *words, "--shares", "speed:most=1.5")[1])["summary"]
    assert summary["shares"] == "speed:most=1.5"
    assert max(w["samples"] / w["steps"] for w in summary["per_worker"]) < 48
    equal = json.loads(answer(capsys, *words)[1])["summary"]
    assert equal["shares"] == ""
    assert summary["samples_per_second"] > 1.8 * equal["samples_per_second"]


def test_the_command_line_trains_with_shares(tmp_path, capsys):
    out = tmp_path / "run"
    words = ("simulate", "--recipe", "digits", "--cluster", UNEQUAL, "--shares", "speed")
    code, told, wrong = answer(capsys, *words, "--out", out)
    assert code == 0, wrong
    assert "shares      speed" in told
    assert "identical at all" in answer(capsys, "replay", out)[1]


def test_a_comparison_has_shares_where_they_make_sense(tmp_path):
    what = problem(samples=48)
    task = ob.Task(what.model, what.data, what.loss, optimizer=SGD)
    plan = ComparisonPlan(["bsp", "ssp:3"], [1, 2], Simulated("10ms"), shares="1,3", batch_size=4)
    found = compare(task, plan, tmp_path / "grid")
    told = {str(point): why for point, why in found.impossible.items()}
    assert "are of 2 workers, and there are 1" in told["bsp on 1 device"]
    with pytest.raises(ConfigError, match="weighed by samples"):
        ComparisonPlan(["gossip"], [2], shares="speed")
    assert "bsp on 2 devices" not in told
    assert found.grid.settings["shares"] == "1,3"
    digest = found.grid.digests()[0]
    assert digest.summary.shares == "1,3"
    assert [round(w.batch) for w in digest.summary.per_worker] == [2, 6]
