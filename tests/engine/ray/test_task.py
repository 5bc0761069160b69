"""What travels: all that a worker's job is made of, and nothing that is the launcher's own."""

from dataclasses import fields

import pytest

from offbeat.config.run_config import OnRay, RunConfig
from offbeat.config.setup import make_job
from offbeat.engine.ray.actor import WorkerActor, job_of
from offbeat.engine.ray.task import SENT, Task
from tests.contract.common import SGD, asked, problem

# Of the launcher alone: where, what is kept, who sees it; and what does not go over a network.
KEPT = {
    *("test", "metric", "layout", "engine", "verify", "token", "out", "resume", "start"),
    *("checkpoint_every", "evaluate_every", "listeners", "watch", "origin"),
    "test_device",
}


def test_every_option_is_sent_or_kept() -> None:
    assert {*SENT} | KEPT == {option.name for option in fields(RunConfig)}
    assert not {*SENT} & KEPT


@pytest.mark.parametrize("name", ["offbeat", "torch", "python"])
def test_a_host_with_another_version_is_told(name: str) -> None:
    task = Task.of(asked(*problem(), "bsp", SGD, 2, 4, 1), None)
    task.versions[name] = "0.5"
    words = WorkerActor(task, OnRay()).ready()
    assert words is not None
    assert words.ours
    assert f"does not fit the host of this run, because {name}" in words.message
    assert "0.5" in words.message


def test_the_job_there_is_the_one_here() -> None:
    what = problem()
    config = asked(*what, "bsp", SGD, 2, 4, 1, seed=5, drop_last=True)
    mine = make_job(config)
    for read in (None, lambda: what.data):
        task = Task.of(config, read)
        assert ("data" in task.given) == (read is None)
        theirs = job_of(task, config.engine)
        assert (theirs.discipline, theirs.seed, theirs.drop_last) == (mine.discipline, 5, True)
        assert theirs.content.reader.dataset is what.data
