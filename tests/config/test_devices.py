"""Devices as users write them; one that is not there is refused before anything begins."""

import threading

import pytest
import torch

from offbeat.config import devices
from offbeat.config.devices import Devices, asked_for, check_forkable, devices_of, expected
from offbeat.errors import ConfigError
from offbeat.model.device import CPU


def test_nothing_said_is_the_cpu() -> None:
    assert devices_of(None, 3) == Devices(("cpu",))
    assert devices_of("cpu", 3).of(2) is CPU
    assert str(devices_of(["cpu", "cpu"], 2)) == "cpu,cpu"


def test_each_worker_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_look", lambda names: names or ("cuda:0", "cuda:1"))
    found = devices_of("cuda:0, cuda:1,cpu", 3)
    assert [str(found.of(worker)) for worker in range(3)] == ["cuda:0", "cuda:1", "cpu"]
    assert found.kinds == {"cuda"}
    assert str(devices_of("cuda", 3)) == "cuda:0"
    shared = devices_of("auto", 3)
    assert [str(shared.of(worker)) for worker in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="PyTorch knows a device here"
)
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device 'cuda:3' is not there \(.+\): write device="):
        devices_of("cuda:3", 2)
    assert devices_of("auto", 2) == Devices(("cpu",))


@pytest.mark.parametrize("wanted", ["gpu", "", "cuda:x", ["cpu", 3.5], "meta:"])
def test_what_is_no_device_is_refused(wanted: str | list[str]) -> None:
    with pytest.raises(ConfigError, match="is no device: write device='cuda:0'"):
        devices_of(wanted, 2)


def test_there_is_one_for_each_worker_or_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_look", lambda names: names)
    with pytest.raises(ConfigError, match="2 devices for 3 workers"):
        devices_of("cuda:0,cuda:1", 3)
    with pytest.raises(ConfigError, match="here they all compute in one process"):
        _ = devices_of("cuda:0,cuda:1", 2).single
    assert str(devices_of("cuda:1,cuda:1", 2).single) == "cuda:1"


def test_a_script_is_told_before_its_loop_if_all_have_the_same() -> None:
    assert expected(None) == expected(["cpu", "cpu"]) == torch.device("cpu")
    assert expected("cuda:1") == torch.device("cuda:1")
    for wanted in ("auto", "cuda:0,cuda:1"):
        with pytest.raises(ConfigError, match=r"ask run\.device inside for x, y"):
            expected(wanted)


def test_processes_of_a_worker_may_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_look", lambda names: names)
    found = devices_of("cuda:0,cuda:1,cuda:2,cpu", 2, 2)
    places = [str(found.of(worker, process)) for worker in range(2) for process in range(2)]
    assert places == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert {str(devices_of("cuda:0,cuda:1", 2, 2).of(1, process)) for process in range(2)} == {
        "cuda:1"
    }
    with pytest.raises(ConfigError, match="3 devices for 2 workers of 2 processes"):
        devices_of("cuda:0,cuda:1,cuda:2", 2, 2)


def test_workers_elsewhere_look_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_look", None)  # nobody looks here
    found = asked_for("cuda:0,cuda:1", 2)
    tried: list[tuple[str, ...]] = []
    monkeypatch.setattr(devices, "_begun", lambda names: tried.append(names) or ("cuda:0",))
    assert str(found.begun(1)) == "cuda:1"
    assert str(asked_for("auto", 2).begun(1)) == "cuda:0"
    assert tried == [("cuda:1",), ()]


def test_what_autograd_began_for_a_device_cannot_be_forked() -> None:
    check_forkable(Devices())
    named, over = threading.Event(), threading.Event()

    def wait() -> None:
        with open("/proc/thread-self/comm", "w") as comm:
            comm.write("pt_autograd_0")
        named.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    named.wait()
    try:
        with pytest.raises(ConfigError, match="has made a backward pass"):
            check_forkable(Devices())
    finally:
        over.set()
        thread.join()
