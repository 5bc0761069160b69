"""Runs on Ray: exact, replayed to the bit, mended, and nothing of them is left on the cluster."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.engine.ray.cluster import RayCluster
from offbeat.errors import ConfigError, RunError
from tests.contract.common import SGD, assert_close, check_run, plain, problem
from tests.engine.ray.common import nothing_held, on_ray


@pytest.fixture(autouse=True)
def _clean(ray_cluster: RayCluster) -> Any:
    with nothing_held(ray_cluster):
        yield


def test_a_run_is_exact_and_replays_to_the_bit(tmp_path: Path) -> None:
    what = problem()
    done = on_ray(what, "asp", out=tmp_path / "run")
    assert done.summary().engine == "ray"
    assert done.summary().workers == 2
    check_run(tmp_path / "run", what)


def test_lock_step_is_a_large_batch_on_data_that_each_host_reads(tmp_path: Path) -> None:
    what = problem()
    read = what._replace(data=lambda: what.data)
    done = on_ray(read, "bsp", optimizer=SGD, out=tmp_path / "run")
    check_run(tmp_path / "run", what)
    assert_close(done.model, plain(what, SGD, batch_size=8))


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    what = problem()
    with open(tmp_path / "file", "w") as file:

        def loss(output: Any, target: Any) -> Any:
            file.tell()
            return what.loss(output, target)

        with pytest.raises(ConfigError, match="loss cannot be sent to other hosts"):
            on_ray(what._replace(loss=loss), "asp", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_that_a_host_lacks_is_told_with_its_name(tmp_path: Path) -> None:
    what, place = problem(), tmp_path / "data"
    place.touch()  # here and not there

    def read() -> Any:
        if not place.exists():
            raise FileNotFoundError(place)
        place.unlink()
        return what.data

    with pytest.raises(ConfigError, match=r"the data cannot be read on .*FileNotFoundError"):
        on_ray(what._replace(data=read), "asp", workers=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_more_than_there_is_room_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"room for 0 of 2 workers.* 1 llama.*wait=600"):
        on_ray(problem(), "asp", worker_resources={"CPU": 0.1, "llama": 1}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_actor_that_dies_at_the_start_is_told(tmp_path: Path) -> None:
    what, here = problem(), os.getpid()

    def read() -> Any:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return what.data

    with pytest.raises(ConfigError, match="Ray could not start a worker"):
        on_ray(what._replace(data=read), "asp", workers=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_is_not_the_one_we_are_connected_to_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is connected to the Ray cluster at .*ray.shutdown"):
        on_ray(problem(), "asp", address="192.0.2.1:6379")


def test_an_error_of_the_users_is_told_with_its_line() -> None:
    def loss(output: Any, target: Any) -> Any:
        import ray

        if ray.get_runtime_context().worker.mode == 1:  # an actor
            raise ArithmeticError("too hard")
        return output.sum()

    with pytest.raises(RunError, match=r"worker \d failed: ArithmeticError: too hard .*line"):
        on_ray(problem()._replace(loss=loss), "asp", workers=1)


def test_one_may_begin_with_fewer_than_there_may_be(tmp_path: Path) -> None:
    """There is no room for the others."""
    what, need = problem(), {"CPU": 1.5}
    done = on_ray(what, "bsp", workers=6, begin=2, worker_resources=need, out=tmp_path / "run")
    assert isinstance(done, ob.Run)
    check_run(tmp_path / "run", what)
