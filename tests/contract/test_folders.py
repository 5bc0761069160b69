"""Folders that were damaged, mixed up or set as traps: a clear error or a right run, always."""

import json
import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.cli.layout_run import show_run
from offbeat.log import files as logfile
from offbeat.report.digest import RunDigest, digest
from tests.contract.common import Problem, Stop, StopAfter, check_run, problem, run, scratch

HOW: dict[str, Any] = {"checkpoint_every": 3, "evaluate_every": 10, "epochs": 2}
SIMULATED = {"cluster": "10ms,13ms,17ms", "origin": {"loop": "train.py"}, **HOW}
SPLIT = {"layout": "pp=2,microbatches=2", **SIMULATED, "cluster": "10ms,13ms"}
DEADLINE = 60  # seconds, for a failure in words in the place of a test that hangs
MANY = 5000  # records, of runs that write some hundred


class Endless(ob.Listener):
    """A run that goes on for ever ends here, by the count and not by the clock."""

    def __init__(self) -> None:
        self.left = MANY

    def see(self, record: Any) -> None:
        self.left -= 1
        assert self.left, "a run without an end"


@contextmanager
def bounded() -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise AssertionError("this hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- folders as they should be


class Folders:
    """A run that was stopped, the same one finished, a split one, and others to mix them with."""

    def __init__(self, place: Path):
        self.place, self.what = place, problem(samples=26)
        twin = TensorDataset(self.what.data.tensors[0].flip(0), self.what.data.tensors[1])
        self.twin = self.what._replace(data=twin)  # the same settings and the same weights
        self.other = problem(samples=26, seed=1)
        self.whole = self._run("finished")
        self._run("stopped", stop=25)
        self._run("twin", self.twin, stop=25)
        self._run("other", self.other, stop=25)
        self.split = self._run("split", how=SPLIT)
        self.started = self._begun(place / "stopped", place / "started")
        self.digests = {name: told(digest(place / name)) for name in ("finished", "split")}
        self.versions = {
            name: ob.replay(place / name, *self.what).versions
            for name in ("finished", "stopped", "split")
        }
        # What a trap leads to, and must not be touched.
        self.outside = place / "outside"
        self.outside.mkdir()
        (self.outside / "precious").write_text("untouched")

    def _run(
        self, name: str, what: Problem | None = None, stop: int = 0, how: Any = SIMULATED
    ) -> ob.Run | None:
        with suppress(Stop):
            listeners = [StopAfter(stop)] if stop else []
            out, what = self.place / name, what or self.what
            return run("sim", what, "asp", out=out, test=what.data, listeners=listeners, **how)
        return None

    def _begun(self, start: Path, out: Path) -> Any:
        how = {**SIMULATED, "epochs": 1}
        return outcome(
            run("sim", self.what, "asp", start=start, out=out, listeners=[Endless()], **how)
        )

    # ---------------------------------------------------------------- what is done with a folder

    def report(self, folder: Path, kind: str) -> None:
        found = told(digest(folder))
        if kind != "stopped" and found.finished:  # else the folder says less than it did
            assert found == self.digests[kind]

    def replay(self, folder: Path, kind: str) -> None:
        found = ob.replay(folder, *self.what)
        if found.identical:  # of a run that was stopped, the log may end anywhere
            assert found.versions == self.versions[kind] or kind == "stopped"

    def resume(self, folder: Path, kind: str) -> None:
        how = SPLIT if kind == "split" else SIMULATED
        data, listeners = self.what.data, [Endless()]
        again = run(
            "sim", self.what, "asp", out=folder, test=data, resume=True, listeners=listeners, **how
        )
        expected = self.split if kind == "split" else self.whole
        assert expected is not None
        assert outcome(again) == outcome(expected)
        assert told(digest(folder)) == self.digests["split" if kind == "split" else "finished"]

    def start(self, folder: Path, kind: str) -> None:
        with scratch() as place, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = self._begun(folder, place / "new")
        assert kind != "stopped" or said or found == self.started

    def layout(self, folder: Path, kind: str) -> None:
        show_run(folder, None, json=True)


def told(found: RunDigest) -> Any:
    found.name = ""
    if found.summary.layout is not None:  # other times at every turn
        found.summary.layout.predicted_seconds = found.summary.layout.predicted_idle_share = None
    return found


def outcome(got: ob.Run) -> Any:
    tensors = [t.numpy().tobytes() for t in got.model.state_dict().values()]
    figures = got.summary().to_dict()
    return got.parameter_hash, tensors, figures | {"layout": None}  # which has measured times


@pytest.fixture(scope="module")
def folders() -> Iterator[Folders]:
    with scratch() as place:
        with in_parts():
            made = Folders(place)
        yield made


@contextmanager
def in_parts() -> Iterator[None]:
    """Logs of a few updates have several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logfile, "PART", 3000)
        yield


# ---------------------------------------------------------------- what is done to a folder

Harm = Callable[[random.Random, Path, Folders], None]


def flip(draw: random.Random, file: Path, folders: Folders) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 20])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def digit(draw: random.Random, file: Path, folders: Folders) -> None:
    content = bytearray(file.read_bytes())
    places = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    if places:
        content[draw.choice(places)] = draw.choice(b"0123456789")
    file.write_bytes(content)


def longer_number(draw: random.Random, file: Path, folders: Folders) -> None:
    content = file.read_bytes()
    places = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    if places:
        place = draw.choice(places)
        content = content[:place] + b"9" * draw.choice([1, 5, 30]) + content[place:]
    file.write_bytes(content)


def cut(draw: random.Random, file: Path, folders: Folders) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.choice([0, draw.randrange(len(content)), len(content) - 1])])


def a_line(draw: random.Random, file: Path, folders: Folders) -> None:
    """Gone, or there twice."""
    lines = file.read_bytes().splitlines(keepends=True)
    place = draw.randrange(len(lines))
    lines[place : place + 1] = [] if draw.random() < 0.5 else [lines[place]] * 2
    file.write_bytes(b"".join(lines))


def append(draw: random.Random, file: Path, folders: Folders) -> None:
    with file.open("ab") as end:
        end.write(draw.choice([b"\0" * 4096, b"{}\n", b'{"kind":"rest","time":1e9,"worker":0}\n']))


def gone(draw: random.Random, file: Path, folders: Folders) -> None:
    file.unlink()


def swapped(draw: random.Random, file: Path, folders: Folders) -> None:
    """For the file of the same place in another run."""
    folder = next(path for path in file.parents if (path / "run.json").exists())
    others = [folders.place / name for name in ("twin", "other", "finished", "stopped", "split")]
    found = [other / file.relative_to(folder) for other in others]
    there = [path for path in found if path.exists() and path.read_bytes() != file.read_bytes()]
    if there:
        shutil.copy(draw.choice(there), file)


def link(draw: random.Random, file: Path, folders: Folders) -> None:
    """To the same content outside, to a file that is none of the run's, or to nowhere."""
    aside = folders.outside / f"{draw.randrange(10**9)}-{file.name}"
    shutil.copy(file, aside)
    file.unlink()
    file.symlink_to(draw.choice([aside, folders.outside / "precious", "/dev/zero", "nowhere"]))


def no_file(draw: random.Random, file: Path, folders: Folders) -> None:
    file.unlink()
    if draw.random() < 0.5:
        file.mkdir()
    else:
        os.mkfifo(file)


def planted_drafts(draw: random.Random, file: Path, folders: Folders) -> None:
    """Links under names that a run is going to write."""
    folder = next(path for path in file.parents if (path / "run.json").exists())
    names = ["run.json", "model.safetensors", "summary.json", "manifest.json", "log.jsonl"]
    for name in names:
        (folder / f".{name}").symlink_to(folders.outside / "precious")
    (folder / "lock").symlink_to(folders.outside / draw.choice(["precious", "new"]))


def linked_folder(draw: random.Random, file: Path, folders: Folders) -> None:
    """The checkpoints, or one of them, lie elsewhere."""
    folder = next(path for path in file.parents if (path / "run.json").exists())
    names = [folder / "checkpoints", *(folder / "checkpoints").iterdir()]
    chosen, aside = draw.choice(names), folders.outside / f"folder-{draw.randrange(10**9)}"
    shutil.copytree(chosen, aside)
    shutil.rmtree(chosen)
    chosen.symlink_to(aside)


HARMS: list[Harm] = [
    *(flip, digit, digit, longer_number, cut, a_line, append, gone, swapped, swapped),
    *(link, no_file, planted_drafts, linked_folder),
]


def harmed(folders: Folders, place: Path, draw: random.Random) -> tuple[str, str]:
    """A copy of a folder with one thing wrong: which folder, and what was done."""
    kind = draw.choice(["stopped", "stopped", "finished", "split"])
    shutil.copytree(folders.place / kind, place)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    file, harm = draw.choice(files), draw.choice(HARMS)
    if file.stat().st_size:
        harm(draw, file, folders)
    return kind, f"{kind}/{file.relative_to(place)}: {harm.__name__}"


def try_one(folders: Folders, seed: int) -> None:
    draw = random.Random(seed)
    deed = draw.choice([Folders.report, Folders.replay, Folders.start] + [Folders.resume] * 2)
    with scratch() as place:
        kind, what = harmed(folders, place / "run", draw)
        if kind == "split" and deed is Folders.start:
            deed = Folders.layout
        before = contents(folders.outside)
        with in_parts(), bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it went back to an older checkpoint
            try:
                deed(folders, place / "run", kind)
            except ob.OffbeatError:
                pass  # that is an answer
            except BaseException as error:
                error.add_note(f"seed {seed}: {deed.__name__} of {what}")
                raise
        assert contents(folders.outside) == before, f"seed {seed}: {deed.__name__} of {what}"


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("hundred", range(4))
def test_a_folder_with_something_wrong(folders, hundred, capsys):
    """Nothing is wrong with one in every few: then the run must be the right one."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        try_one(folders, seed)


@pytest.mark.soak
@pytest.mark.parametrize("thousand", range(1, 11))
def test_many_folders_with_something_wrong(folders, thousand, capsys):
    for seed in range(1000 * thousand, 1000 * thousand + 1000):
        try_one(folders, seed)


# ---------------------------------------------------------------- both engines


def stopped(engine: str, out: Path) -> tuple[Problem, dict[str, Any]]:
    what, options = problem(samples=26), {"workers": 2, "checkpoint_every": 2, "epochs": 3}
    with suppress(Stop):
        run(engine, what, "asp", out=out, listeners=[StopAfter(40)], **options)
    return what, options


def test_a_log_that_lost_its_end_goes_on_from_the_older_checkpoint(engine, tmp_path):
    """A page never reached the disk: the newest checkpoint counts on it, the other does not."""
    what, options = stopped(engine, tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    newest = json.loads((tmp_path / "run/checkpoints" / names[-1] / "state.json").read_text())
    os.truncate(log, newest["session"]["log"] - 100)
    with pytest.warns(UserWarning, match=rf"shorter.*went back to checkpoint {names[-2]}"):
        run(engine, what, "asp", out=tmp_path / "run", resume=True, **options)
    check_run(tmp_path / "run", what, epochs=3)


def test_the_log_of_another_run_is_not_gone_on_with(engine, tmp_path):
    what, options = stopped(engine, tmp_path / "run")
    stopped(engine, tmp_path / "same")
    other = problem(samples=26, seed=1)
    with suppress(Stop):
        out, stop = tmp_path / "other", [StopAfter(40)]
        run(engine, other, "asp", out=out, listeners=stop, **options)
    for name in ("other", "same") if engine == "local" else ("other",):
        shutil.copy(tmp_path / name / "log.jsonl", tmp_path / "run" / "log.jsonl")
        with pytest.raises(ob.CheckpointError, match=r"log\.jsonl is of another run"):
            run(engine, what, "asp", out=tmp_path / "run", resume=True, **options)


def test_real_processes_go_on_or_say_why_not(local_only, tmp_path):
    what, options = stopped(local_only, tmp_path / "stopped")

    class Places:
        place, outside = tmp_path, tmp_path / "outside"

    Places.outside.mkdir()
    (Places.outside / "precious").write_text("untouched")
    went_on = 0
    for seed in range(14):
        draw, folder = random.Random(seed), tmp_path / f"run-{seed}"
        shutil.copytree(tmp_path / "stopped", folder)
        file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        HARMS[seed % len(HARMS)](draw, file, Places)  # type: ignore[arg-type]
        before = contents(Places.outside)
        with bounded(), warnings.catch_warnings(), suppress(ob.OffbeatError):
            warnings.simplefilter("ignore", UserWarning)
            run(local_only, what, "asp", out=folder, resume=True, **options)
            check_run(folder, what, epochs=3)
            went_on += 1
        assert contents(Places.outside) == before
    assert 0 < went_on < 14
