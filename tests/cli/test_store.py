"""`offbeat store`, `work` and `doctor --at`: real processes of one machine, and wrong words."""

import os
import re
import signal
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.log.log import read
from offbeat.log.records import Joined, Lost, Updated
from tests.contract.common import recount
from tests.engine.hosts.common import Command, until
from tests.engine.local.common import children, nothing_left

Capture = pytest.CaptureFixture[str]
SCRIPT = """
    import os
    import time
    from functools import partial
    import torch
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset
    import offbeat as ob

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn({samples}, 3), torch.randn({samples}, 2))
    with ob.join(discipline="asp") as run:
        model = run.replica(torch.nn.Linear(3, {outputs}))
        optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.01))
        for x, y in run.batches(data, batch_size=4, epochs={epochs}):
            loss = F.mse_loss(model(x)[:, :2], y)
            loss.backward()
            run.record(loss)
            if not os.path.exists("{go}"):
                time.sleep(0.05)
            optimizer.step()
            optimizer.zero_grad()
    print(f"worker {{run.rank}} is through with version {{run.version}}", flush=True)
"""
USUAL = {"samples": 64, "outputs": 2, "epochs": 4}
LONG_RUN = 20  # epochs of a run that is slow until the test lets it go on


class Place:
    """A folder with a script and a token, and the commands that were started there."""

    def __init__(self, folder: Path):
        self.folder, self.started = folder, list[Command]()
        self.script = self.write("train.py")
        (folder / "offbeat.token").write_text("a token of these tests\n")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    def write(self, name: str, **changes: int) -> Path:
        go = "go" if changes.get("epochs") == LONG_RUN else "train.py"
        (self.folder / name).write_text(textwrap.dedent(SCRIPT.format(go=go, **USUAL | changes)))
        return self.folder / name

    def run(self, *words: object) -> Command:
        self.started.append(Command(*words, folder=self.folder))
        return self.started[-1]

    def store(self, *words: object, script: str = "train.py") -> Command:
        found = self.run("store", "--listen", self.address, *words, script)
        found.says("waiting for")
        return found

    def work(self, *words: object, script: str = "train.py") -> Command:
        return self.run("work", "--at", self.address, *words, script)

    def records(self) -> list[Any]:
        file = self.folder / "run" / "log.jsonl"
        return list(read(file)) if file.exists() else []

    def is_exact(self, epochs: int) -> list[Any]:
        records = self.records()
        for epoch in recount(records, 64, epochs):
            assert (epoch["applied"], epoch["repeated"], epoch["missing"]) == (64, 0, 0)
        return records

    def trains(self, updates: int = 5) -> None:
        """Wait until so many updates are in the log."""
        until(lambda: sum(isinstance(r, Updated) for r in self.records()) > updates)

    def let_go(self) -> None:
        """From now on no step is slow."""
        (self.folder / "go").touch()

    def replays(self) -> None:
        replay = self.run("run", "--replay", "run", "train.py")
        assert replay.end() == 0, replay.said

    def close(self) -> None:
        for command in self.started:
            command.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with nothing_left():
        made = Place(tmp_path)
        yield made
        made.close()
        del made


def well(*commands: Command) -> None:
    for command in commands:
        assert command.end() == 0, command.said


def workers_of(command: Command) -> dict[str, int]:
    return children(command.pid)


# ---------------------------------------------------------------- coming and going


def test_two_workers_train_and_the_run_is_replayed(place: Place) -> None:
    store = place.store("-n", 2, "--out", "run", "--codec", "int8", "--pull-codec", "int8")
    doctor = place.run("doctor", "--at", place.address)
    assert doctor.end() == 0, doctor.said
    assert "Ready to work there." in doctor.said
    work = place.work("-n", 2)
    well(store, work)
    assert {f"worker {n} is through" in work.said for n in (0, 1)} == {True}
    assert "over the wire" in store.said
    assert "a token of these" not in store.said + work.said
    place.is_exact(4)
    place.replays()


def test_workers_come_late_are_killed_and_leave(place: Place) -> None:
    """Of two to three: one is killed and started again, one comes late, one is interrupted."""
    place.write("train.py", epochs=LONG_RUN)
    store = place.store("-n", "2:3", "--out", "run", "--patience", 5)
    first = place.work()
    second = place.work()
    place.trains()
    (victim,) = workers_of(first).values()
    os.kill(victim, signal.SIGKILL)
    first.says("a worker was killed by SIGKILL: starting it again")
    third = place.work()
    until(lambda: {r.worker for r in place.records() if isinstance(r, Joined)} == {0, 1, 2})
    second.signal(signal.SIGINT)
    assert second.end() == 130
    place.let_go()
    well(store, first, third)
    records = place.is_exact(LONG_RUN)
    again = [r.worker for r in records if isinstance(r, Joined) and r.incarnation > 1]
    assert len(again) == 1  # in its own place
    assert {r.worker for r in records if isinstance(r, Lost)} >= set(again)
    place.replays()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_store_that_is_asked_to_stop_saves_and_goes_on(place: Place, number: int) -> None:
    place.write("train.py", epochs=LONG_RUN)
    store = place.store("-n", 1, "--out", "run")
    work = place.work()
    place.trains()
    store.signal(number)
    assert store.end() == 128 + number, store.said
    assert "--resume" in store.said
    assert work.end() in (130, 143), work.said
    place.let_go()
    again = place.store("-n", 1, "--out", "run", "--resume")
    well(place.work(), again)
    place.is_exact(LONG_RUN)
    place.replays()


def test_a_server_that_is_killed_is_started_again_and_workers_find_it(place: Place) -> None:
    place.write("train.py", epochs=LONG_RUN)
    store = place.store("-n", 2, "--out", "run", "--patience", 5)
    work = place.work("-n", 2)
    place.trains()
    os.kill(children(store.pid)["offbeat server"], signal.SIGKILL)
    until(lambda: any(r.incarnation > 1 for r in place.records() if isinstance(r, Joined)))
    place.let_go()
    well(work, store)
    records = place.is_exact(LONG_RUN)
    assert max(r.incarnation for r in records if isinstance(r, Joined)) > 1
    place.replays()


def test_sigterm_ends_a_worker_and_the_store_gives_its_samples_to_others(place: Place) -> None:
    place.write("train.py", epochs=LONG_RUN)
    store = place.store("-n", 2, "--out", "run")
    work, other = place.work(), place.work()
    place.trains()
    work.signal(signal.SIGTERM)
    assert work.end() == 143
    place.let_go()
    well(other, store)
    place.is_exact(LONG_RUN)


def test_workers_add_up_among_themselves_if_the_store_is_told_so(place: Place) -> None:
    store = place.store("-n", 2, "--sync", "bsp", "--via", "allreduce", "--out", "run")
    well(place.work("-n", 2), store)
    assert all(len(r.parts) == 2 for r in place.is_exact(4) if isinstance(r, Updated))
    assert '"via": "allreduce"' in (place.folder / "run" / "run.json").read_text()
    place.replays()


def test_shards_of_the_store_are_behind_its_one_port(place: Place) -> None:
    store = place.store("-n", 2, "--shards", 2, "--out", "run", "--codec", "topk:0.3")
    well(place.work("-n", 2), store)
    place.is_exact(4)
    place.replays()


# ---------------------------------------------------------------- workers that differ


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"outputs": 3}, r"the model has .*3.* where the run has .*2"),
        ({"samples": 60}, "samples is 60 here and 64 in the run"),
        ({"epochs": 5}, "epochs is 5 here and 4 in the run"),
    ],
    ids=str,
)
def test_a_worker_that_differs_is_told_where(
    place: Place, changes: dict[str, int], difference: str
) -> None:
    store = place.store("-n", 1)
    place.write("other.py", **changes)
    other = place.work(script="other.py")
    assert other.end() == 2
    assert re.search(f"runs another script than the store: {difference}", flat(other.said))
    well(place.work(), store)  # and nobody else minds


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_script_that_differs_in_a_comment_is_another(place: Place) -> None:
    store = place.store("-n", 1)
    (place.folder / "other.py").write_text(place.script.read_text() + "# a comment\n")
    other = place.work(script="other.py")
    assert other.end() == 2
    assert "the script is" in flat(other.said)
    well(place.work(), store)


@pytest.mark.parametrize("name", ["torch", "offbeat", "python"])
def test_another_version_is_named(place: Place, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from offbeat.engine.hosts import doctor, sketch

    store = place.store("-n", 1)
    versions = sketch.versions
    with monkeypatch.context() as patch:
        for module in (sketch, doctor):
            patch.setattr(module, "versions", lambda: versions() | {name: "0.0.1"})
        other, asked = place.work(), place.run("doctor", "--at", place.address)
    assert other.end() == 2
    assert f"{name} is 0.0.1 here and {versions()[name]} in the run" in flat(other.said)
    assert asked.end() == 1
    assert f"install {name} {versions()[name]} here" in flat(asked.said)
    well(place.work(), store)


def test_another_token_is_refused_and_counted(place: Place) -> None:
    store = place.store("-n", 1)
    (place.folder / "other.token").write_text("another token than that\n")
    other = place.work("--token-file", "other.token")
    assert other.end() == 2
    assert "compare the token files of both sides" in flat(other.said)
    well(place.work(), store)
    assert re.search(r"1 connection", flat(store.said)), store.said


def test_one_too_many(place: Place) -> None:
    place.write("train.py", epochs=LONG_RUN)
    store = place.store("-n", 1, "--out", "run")
    work = place.work()
    place.trains()
    late = place.work()
    assert late.end() == 2
    assert "all 1 places of this run are taken" in flat(late.said)
    store.signal(signal.SIGINT)
    store.end()
    work.end()


# ---------------------------------------------------------------- wrong words


def refused(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command says that is wrong; nothing is left of it."""
    with nothing_left():
        code = main([str(word) for word in words])
    out, err = capfd.readouterr()
    assert code == 2, out + err
    return flat(out + err)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT.format(go="train.py", **USUAL)))
    (tmp_path / "offbeat.token").write_text("a token of these tests\n")
    return tmp_path


def test_addresses_that_cannot_be_listened_at(folder: Path, capfd: Capture) -> None:
    said = refused(capfd, "store", "--no-tls", "--listen", "192.0.2.1:7077", "train.py")
    assert "nobody can listen at 192.0.2.1:7077" in said
    assert "name an address of this machine" in said
    assert "is no address" in refused(capfd, "store", "--listen", "a:b", "train.py")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused(capfd, "store", "--listen", where, "train.py")
    assert "in use" in said
    assert "a port that is free" in said


def test_addresses_that_cannot_be_reached(folder: Path, capfd: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
    said = refused(capfd, "work", "--at", where, "train.py")
    assert f"no store answers at {where} (Connection refused)" in said
    assert f"offbeat doctor --at {where}" in said
    said = refused(capfd, "doctor", "--at", where)
    assert f"{where} cannot be reached (Connection refused)" in said


def test_what_does_not_go_over_a_network(folder: Path, capfd: Capture) -> None:
    said = refused(capfd, "store", "--listen", "127.0.0.1:0", "--sync", "hogwild", "train.py")
    assert "hogwild does not go over a network" in said
    assert "use asp" in said
    split = (
        (folder / "train.py")
        .read_text()
        .replace(
            "torch.nn.Linear(3, 2)",
            "torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))",
        )
    )
    (folder / "split.py").write_text(split)
    said = refused(capfd, "store", "--listen", "127.0.0.1:0", "--layout", "pp=2", "split.py")
    assert re.search(r"the layout pp=2\S* does not go over a network", said)
    assert "use offbeat run" in said


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("store", "nothing.py"), "there is no file nothing.py"),
        (("work", "nothing.py"), "there is no file nothing.py"),
        (("store", "-n", "x", "train.py"), "-n takes a number or two"),
        (("store", "-n", "3:2", "train.py"), "the second number is the most"),
        (("store", "-n", "0", "train.py"), "-n"),
        (("work", "-n", "0", "train.py"), "-n"),
        (("store", "--certificate", "a.pem,b.pem", "train.py"), "add --tls"),
        (("store", "--tls", "--certificate", "a.pem", "train.py"), "cert.pem,key.pem"),
        (("work", "--authority", "a.pem", "train.py"), "add --tls"),
        (("doctor", "--at", "127.0.0.1:1", "--authority", "a.pem"), "add --tls"),
        (("work", "--token-file", "none", "train.py"), "cannot be read from none"),
        (("work", "--token-variable", "NONE", "train.py"), "there is no variable NONE"),
        (("work", "--token-variable", "A", "--token-file", "b", "train.py"), "name one of them"),
        (("work", "--at", "host:x", "train.py"), "is no address"),
    ],
    ids=str,
)
def test_wrong_words_name_the_remedy(
    folder: Path, capfd: Capture, words: tuple[str, ...], remedy: str
) -> None:
    assert remedy in refused(capfd, *words)


def test_a_token_is_made_for_its_owner_alone(folder: Path, capfd: Capture) -> None:
    os.unlink("offbeat.token")
    with nothing_left():
        assert main(["token"]) == 0
    file = folder / "offbeat.token"
    assert file.stat().st_mode & 0o777 == 0o600
    out, err = capfd.readouterr()
    assert file.read_text().strip() not in out + err
    assert "no token can be written" in refused(capfd, "token")  # it is not written over
