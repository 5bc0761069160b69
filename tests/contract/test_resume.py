"""A run that was stopped at any moment goes on to exactly where it would have arrived."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offbeat as ob
from offbeat.config.setup import make_job
from offbeat.engine.sim.compute_times import Constant
from offbeat.log.log import Log
from offbeat.log.records import Updated
from tests.contract.common import (
    CODECS,
    MOMENTUM,
    NAMES,
    Problem,
    Stop,
    StopAfter,
    asked,
    check_run,
    clusters,
    examples,
    named,
    optimizer_for,
    packs_pulls,
    problem,
    run,
    scratch,
    seeds,
)
from tests.contract.real import AtStep, Once


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


def _outcome(got: ob.Run) -> tuple[str, bytes, dict[str, Any], list[bytes]]:
    tensors = [t.numpy().tobytes() for t in got.model.state_dict().values()]
    log = (got.folder / "log.jsonl").read_bytes()
    return got.parameter_hash, log, got.summary().to_dict(), tensors


def _stop_and_resume_real(stops: list[int], out: Path, what: Problem, *args: Any, **options: Any):
    """The same with real processes, whose order is another after each stop.

    So it is the log that is looked at: nothing lost, and one that a replay can follow to its end.
    """
    for index, records in enumerate(stops):
        with suppress(Stop):
            listeners = [StopAfter(records)]
            run("local", what, *args, out=out, resume=index > 0, listeners=listeners, **options)
    got = run("local", what, *args, out=out, resume=True, **options)
    code = {key: options[key] for key in ("schedule", "clip", "groups") if key in options}
    records = check_run(out, what, options.get("epochs", 2), **code)
    last = [record.hash for record in records if isinstance(record, Updated)][-1]
    assert got.parameter_hash == last
    assert got.summary().updates == sum(isinstance(record, Updated) for record in records)


def _stop_and_resume(engine: str, stops: list[int], out: Path, *args: Any, **options: Any):
    """Run, stopped once for each of `stops`, and resumed until it is over."""
    for index, records in enumerate(stops):
        try:
            run(engine, *args, out=out, resume=index > 0, listeners=[StopAfter(records)], **options)
        except Stop:
            continue
    return _outcome(run(engine, *args, out=out, resume=True, **options))


@pytest.mark.parametrize("name", NAMES)
@examples(3, local=1)
@given(
    cluster=clusters(faults=True),
    seed=seeds,
    codec=st.sampled_from(CODECS),
    every=st.integers(1, 5),
    stops=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    data=st.data(),
)
def test_stopped_anywhere_and_resumed(engine, name, cluster, seed, codec, every, stops, data):
    what = problem(net, samples=26)
    discipline = named(len(cluster))[name]
    adam = partial(torch.optim.Adam, lr=0.01)
    factory = data.draw(st.sampled_from([MOMENTUM, adam]))
    options = {
        "cluster": cluster,
        "seed": seed,
        "codec": codec,
        "pull_codec": data.draw(st.sampled_from(CODECS)) if packs_pulls(discipline) else None,
        "checkpoint_every": every,
        "optimizer": optimizer_for(discipline, factory),
        "test": what.data,
        "evaluate_every": data.draw(st.sampled_from([26, 10])),
    }
    with scratch() as folder:
        if engine == "local":
            _stop_and_resume_real(stops[:2], folder / "run", what, discipline, **options)
            return
        whole = run(engine, what, discipline, out=folder / "whole", **options)
        again = _stop_and_resume(engine, stops, folder / "stopped", what, discipline, **options)
        assert again == _outcome(whole)
        found = ob.replay(folder / "stopped", *what)
        assert found.identical
        assert found.compared == whole.summary().updates


def test_patience_goes_on_as_it_was(sim_only, tmp_path):
    """A contribution that was under way is a sign of life of a worker that stands still."""
    still = ob.Machine(Constant(0.02), pauses=(ob.Pause(0.025, 0.15),))
    cluster = ob.Cluster((ob.Machine(Constant(0.01)), still), apply=0.01, patience=0.1)
    what, options = problem(samples=60), {"cluster": cluster, "checkpoint_every": 1}
    whole = run(sim_only, what, "asp", out=tmp_path / "whole", **options)
    log = (whole.folder / "log.jsonl").read_bytes()
    assert b'"lost"' not in log
    _stop_and_resume(sim_only, [14], tmp_path / "again", what, "asp", **options)
    assert (tmp_path / "again" / "log.jsonl").read_bytes() == log


def test_averaged_buffers_do_not_depend_on_the_order_in_which_they_were_restored():
    """A mean of three depends on their order in its last bits, so workers count in their order."""
    job = make_job(asked(*problem(net), ob.ASP(), MOMENTUM, 3, 4, 1))
    statistics = {
        worker: {"1.running_mean": torch.full((4,), value, dtype=torch.float64)}
        for worker, value in enumerate([0.1, 1e9 / 3, -1e9 / 3])
    }
    means = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        store = job.make_store(Log())
        for worker in order:
            store.parameters.averages.take(worker, 1, statistics[worker])
        means.append(store.parameters.export(net().double())[1].running_mean.tolist())
    assert means[0] == means[1] == means[2]


@pytest.mark.parametrize("per", ["epoch", "version"])
@pytest.mark.parametrize("name", ["asp", "bsp", "local", "easgd", "average"])
def test_schedules_groups_and_clipping_go_on(engine, name, per, tmp_path):
    what, discipline = problem(samples=26), named(3)[name]
    options = {
        "cluster": "10ms,13ms,20ms",
        "epochs": 3,
        "schedule": ob.Schedule(partial(torch.optim.lr_scheduler.StepLR, step_size=2), per),
        "clip": ob.Clip(norm=0.4),
        "groups": lambda model: [{"params": list(model.parameters()), "lr": 0.3}],
        "checkpoint_every": 2,
        "shards": 2,
    }
    if engine == "local":
        _stop_and_resume_real([12, 9], tmp_path / "run", what, discipline, **options)
        return
    whole = run(engine, what, discipline, out=tmp_path / "whole", **options)
    for records in (12, 25):
        out = tmp_path / f"after-{records}"
        assert _stop_and_resume(engine, [records], out, what, discipline, **options) == _outcome(
            whole
        )


@pytest.mark.parametrize("name", ["local", "average", "easgd", "asp"])
def test_a_schedule_does_not_trouble_a_worker_that_comes_late(engine, name):
    """It enters with the schedule already moved on; that is no reason for a warning."""
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    early, late = ob.Machine(ob.Cluster.equal(1, "10ms").machines[0].compute), 0.12
    machines = (early, ob.Machine(early.compute, joins_at=late))
    what = problem(samples=26)
    if engine == "local":  # it dies and comes again when some epochs are over
        what = what._replace(loss=AtStep(what.loss, {(1, 9): Once(signal.SIGKILL)}))
    got = run(
        engine, what, named(2)[name], cluster=ob.Cluster(machines), epochs=4,
        schedule=ob.Schedule(halve),
    )  # fmt: skip
    assert got.summary().per_worker[1].samples > 0


def test_checkpoints_by_epoch_and_none_at_all(engine, tmp_path):
    """Stopped before the first checkpoint the run begins anew, afterwards at the last epoch."""
    what = problem(samples=26)
    options = {"cluster": "10ms,13ms", "epochs": 3}
    if engine == "local":
        for records in (1, 30):
            out = tmp_path / f"after-{records}"
            _stop_and_resume_real([records], out, what, "asp", **options)
        return
    whole = _outcome(run(engine, what, "asp", out=tmp_path / "whole", **options))
    for records in (1, 5, 30, 45):
        out = tmp_path / f"after-{records}"
        assert _stop_and_resume(engine, [records], out, what, "asp", **options) == whole


def test_a_finished_run_resumes_to_itself(engine, tmp_path):
    what = problem()
    options = {"workers": 2, "checkpoint_every": 3, "out": tmp_path / "run"}
    whole = _outcome(run(engine, what, "ssp:1", **options))
    if engine == "local":  # from its last checkpoint, in whatever order
        _stop_and_resume_real([], tmp_path / "run", what, "ssp:1", workers=2, checkpoint_every=3)
        return
    assert _outcome(run(engine, what, "ssp:1", resume=True, **options)) == whole


def test_another_run_is_not_resumed(engine, tmp_path):
    what = problem()
    run(engine, what, "asp", workers=2, out=tmp_path / "run")
    for change in ({"seed": 1}, {"workers": 3}, {"epochs": 3}, {"codec": "int8"}):
        options = {"workers": 2} | change
        with pytest.raises(ob.CheckpointError, match=next(iter(change))):
            run(engine, what, "asp", out=tmp_path / "run", resume=True, **options)


# ---------------------------------------------------------------- a real kill

KILLED = {
    "cluster": ob.Cluster.parse("10ms,exponential:20ms,15ms"),
    "codec": "topk:0.3",
    "checkpoint_every": 2,
    "seed": 4,
}


class KillAfter(ob.Listener):
    """Ends this very process without a chance to tidy up."""

    def __init__(self, records: int):
        self.left = records

    def see(self, record: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


_CHILD = """
import sys
from tests.contract.common import problem, run
from tests.contract.test_resume import KILLED, KillAfter, net
run(sys.argv[1], problem(net, samples=26), "asp", out=sys.argv[2], listeners=[KillAfter(23)],
    **KILLED)
"""


def test_killed_and_resumed(engine, tmp_path):
    what = problem(net, samples=26)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, engine, str(tmp_path / "killed")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "killed" / "summary.json").exists()
    assert list((tmp_path / "killed" / "checkpoints").iterdir())
    if engine == "local":
        _stop_and_resume_real([], tmp_path / "killed", what, "asp", **KILLED)
        return
    whole = run(engine, what, "asp", out=tmp_path / "whole", **KILLED)
    again = run(engine, what, "asp", out=tmp_path / "killed", resume=True, **KILLED)
    assert _outcome(again) == _outcome(whole)


def test_killed_while_the_folder_was_being_made(engine, tmp_path):
    what = problem()
    whole = run("sim", what, "asp", workers=2, out=tmp_path / "whole")
    for number, leftover in enumerate([[], ["initial.safetensors"], [".run.json"]]):
        out = tmp_path / f"cut{number}"
        (out / "checkpoints").mkdir(parents=True)
        for name in leftover:
            (out / name).write_bytes(b"half a fi")
        with pytest.raises(ob.ConfigError, match="pass resume=True"):
            run(engine, what, "asp", workers=2, out=out)
        again = run(engine, what, "asp", workers=2, out=out, resume=True)
        if engine == "local":
            check_run(out, what)
            continue
        assert _outcome(again) == _outcome(whole)


def test_a_folder_of_something_else_is_never_resumed_over(engine, tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ob.ConfigError, match="exists and is not empty"):
        run(engine, problem(), "asp", workers=2, out=tmp_path, resume=True)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
