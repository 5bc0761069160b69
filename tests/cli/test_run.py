"""`offbeat run`: whose words are whose, what it prints, and how a script's mistakes are told."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.config.run_config import RunConfig
from offbeat.engine.local import scripts as local_script
from offbeat.engine.local.single import SingleParticipant
from offbeat.engine.script import Script
from offbeat.engine.sim.cluster import Cluster
from offbeat.engine.sim.scripts import simulate_script
from tests.cli.common import answers

SCRIPT = """
import sys
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
with ob.join(discipline="asp", seed=3) as run:
    model = run.replica(nn.Linear(3, 2))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.05))
    for x, y in run.batches(data, batch_size=4):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
if run.rank == 0:
    print("words", sys.argv[1:], "of", run.workers)
"""
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def changed(script: Path, old: str, new: str) -> int:
    """Replace one line; returns its number."""
    text = script.read_text()
    assert text.count(old) == 1
    script.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


answer = answers("run")


def asked(capsys: Capture, *words: object) -> tuple[int, Any]:
    code, out, _ = answer(capsys, "--json", *words)
    return code, json.loads(out)


# ---------------------------------------------------------------- what it does


def test_a_layout_splits_the_replicas(capsys: Capture, script: Path) -> None:
    changed(script, "nn.Linear(3, 2)", "nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))")
    layout = ("--engine", "sim", "--layout", "pp=2,split=count")
    _, one = asked(capsys, *layout, script)
    assert one["summary"]["workers"] == 1
    assert one["summary"]["layout"]["layout"] == "pp=2,schedule=gpipe,split=1"
    assert one["summary"]["layout"]["processes"] == 2
    _, two = asked(capsys, "--engine", "sim", "--layout", "pp=2,split=count,replicas=2", script)
    assert (two["summary"]["workers"], two["summary"]["layout"]["processes"]) == (2, 4)
    _, three = asked(capsys, *layout, "--cluster", "20ms,30ms,80ms", script)
    assert three["summary"]["workers"] == 3
    code, _, err = answer(capsys, "-n", 3, "--layout", "pp=2,replicas=2", script)
    assert code == 2
    assert "leave one of them out" in err
    code, _, err = answer(capsys, "--layout", "pp=2,schedule=1f1b", script)
    assert code == 2
    assert "write schedule=gpipe or layers" in err


def test_words_behind_the_script_are_its_own(capsys: Capture, script: Path) -> None:
    code, out, _ = answer(capsys, "--engine", "sim", "-n", 2, script, "--json", "-n", "7", "x")
    assert code == 0
    assert "words ['--json', '-n', '7', 'x'] of 2\n" in out
    assert "asp on 2 simulated workers, train.py" in out


def test_the_command_wins_over_the_script(capsys: Capture, script: Path) -> None:
    _, result = asked(capsys, "--cluster", "20ms,30ms,80ms", script)
    assert result["summary"]["discipline"] == "asp"
    assert result["summary"]["workers"] == 3
    _, other = asked(capsys, "--cluster", "20ms,30ms,80ms", "--sync", "ssp:1", script)
    assert other["summary"]["discipline"] == "ssp:1"
    _, seeded = asked(capsys, "--cluster", "20ms,30ms,80ms", "--seed", 4, script)
    assert seeded["summary"]["parameter_hash"] != result["summary"]["parameter_hash"]
    _, same = asked(capsys, "--cluster", "20ms,30ms,80ms", "--seed", 3, script)
    assert same["summary"]["parameter_hash"] == result["summary"]["parameter_hash"]


def test_a_folder_and_its_replay(capsys: Capture, script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, out, _ = answer(capsys, "--engine", "sim", "--out", folder, script)
    assert code == 0
    assert f"offbeat run --replay {folder} {script}" in out
    code, out, _ = answer(capsys, "--replay", folder, script)
    assert (code, out) == (0, "identical at all 12 versions\n")
    assert asked(capsys, "--replay", folder, script)[1]["identical"] is True
    changed(script, "lr=0.05", "lr=0.06")
    code, _, err = answer(capsys, "--replay", folder, script)
    assert code == 4
    assert "cannot be replayed with this: optimizer is torch.optim.SGD(lr=0.06) here" in err
    assert main(["replay", str(folder)]) == 2
    assert f"offbeat run --replay {folder} train.py" in capsys.readouterr().err


def test_a_replay_that_differs_says_so(capsys: Capture, script: Path, tmp_path: Path) -> None:
    answer(capsys, "--engine", "sim", "--out", tmp_path / "run", script)
    changed(script, "mse_loss", "l1_loss")
    code, _, err = answer(capsys, "--replay", tmp_path / "run", script)
    assert code == 5
    assert "differs first at version 1" in err


def test_ctrl_c_and_resume(capsys: Capture, script: Path, tmp_path: Path) -> None:
    stop = (
        "import signal; run.version == 4 and signal.raise_signal(signal.SIGINT); optimizer.step()"
    )
    words = ("--engine", "sim", "--out", tmp_path / "run")
    changed(script, "optimizer.step()", stop)
    code, _, err = answer(capsys, *words, script)
    assert code == 130
    assert "--resume" in err
    changed(script, stop, "optimizer.step()")
    code, result = asked(capsys, *words, "--resume", script)
    assert code == 0
    assert result["summary"]["ledger"][0]["applied"] == 48


def test_everything_is_as_before(capsys: Capture, script: Path) -> None:
    before = (list(sys.argv), list(sys.path), sys.modules["__main__"])
    answer(capsys, "--engine", "sim", script)
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


# ---------------------------------------------------------------- the local engine's part


def test_only_the_launcher_comes_back(
    capsys: Capture, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script stops at its first batch, where everything is known."""
    result = simulate_script(Script(script), Cluster.equal(3), {})
    capsys.readouterr()
    seen: list[Any] = []

    def launch(config: RunConfig) -> Any:
        seen.append(config)
        return result

    monkeypatch.setattr(local_script, "start", launch)
    code, out, _ = answer(capsys, "--emulate", "20ms,20ms,80ms", "--patience", 2, script)
    assert code == 0
    assert "words" not in out
    (config,) = seen
    assert (config.batch_size, config.workers) == (4, 3)
    assert (config.engine.patience, config.engine.emulate) == (2.0, (0.02, 0.02, 0.08))


def test_a_worker_ends_with_its_script(
    capsys: Capture, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a worker's process the script goes on to its end, and no further."""

    class Gone(BaseException):
        pass

    class Seat(SingleParticipant):
        def ended(self, error: BaseException | None) -> None:
            raise Gone(error)

    monkeypatch.setattr(local_script, "start", Seat)
    with pytest.raises(Gone) as gone:
        answer(capsys, script)
    assert gone.value.args == (None,)
    assert "words [] of 4" in capsys.readouterr().out
    changed(script, 'print("words"', '1 / 0; print("words"')
    with pytest.raises(Gone) as gone:
        answer(capsys, script)
    assert isinstance(gone.value.args[0], ZeroDivisionError)


# ---------------------------------------------------------------- mistakes

SIM = ("--engine", "sim", "-n", "2")


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        ("torch.manual_seed(0)", "1 / 0", 2, "ZeroDivisionError: division by zero"),
        ("nn.functional.mse_loss(model(x)", "nn.functional.mse_loss(modle(x)", 3, "NameError"),
        ('print("words"', '1 / 0; print("words"', 3, "ZeroDivisionError: division by zero"),
        ("optimizer.step()", "pass", 2, "make one step for each batch"),
        ("model = run.replica(nn.Linear(3, 2))", "pass", 2, "optimizer before replica"),
        ("import sys", "import sys; x = (", 2, "'(' was never closed"),
    ],
)
def test_a_scripts_mistake_has_its_line(
    capsys: Capture, script: Path, old: str, new: str, code: int, words: str
) -> None:
    line = changed(script, old, new)
    got, _, err = answer(capsys, *SIM, script)
    assert got == code
    if words.startswith("make one"):
        line = SCRIPT[: SCRIPT.index("for x, y")].count("\n") + 1
    elif "before replica" in words:
        line = SCRIPT[: SCRIPT.index("optimizer = ")].count("\n") + 1
    assert err.startswith(f"error: {script} line {line}: ")
    assert words in err
    assert err.count("\n") == 1
    assert asked(capsys, *SIM, script)[1]["exit_code"] == code


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["nothing.py"], "there is no file nothing.py: write offbeat run"),
        (["--engine", "sim", "--emulate", "20ms", "SCRIPT"], "--cluster"),
        (["--engine", "local", "--cluster", "20ms,30ms", "SCRIPT"], "add --engine sim"),
        (["--cluster", "20ms,30ms", "-n", "3", "SCRIPT"], "leave -n out"),
        (["--replay", "here", "--sync", "asp", "SCRIPT"], "leave the others out"),
        (["--engine", "sim", "--sync", "sp:3", "SCRIPT"], "ssp"),
        (["--engine", "sim", "--resume", "SCRIPT"], "name the one of the run to go on with"),
        (["--engine", "sim", "--nonsense", "SCRIPT"], "offbeat run --help"),
    ],
)
def test_the_users_mistakes(capsys: Capture, script: Path, words: list[str], remedy: str) -> None:
    words = [str(script) if word == "SCRIPT" else word for word in words]
    code, out, err = answer(capsys, *words)
    assert (code, out) == (2, "")
    assert remedy in err


@pytest.mark.parametrize(("leaving", "code"), [("sys.exit(7)", 7), ("sys.exit()", 0)])
def test_a_script_that_leaves_before_its_loop(
    capsys: Capture, script: Path, leaving: str, code: int
) -> None:
    changed(script, "torch.manual_seed(0)", leaving)
    assert answer(capsys, *SIM, script)[0] == code
    assert answer(capsys, script)[0] == code


def test_a_script_that_leaves_with_words(capsys: Capture, script: Path) -> None:
    changed(script, "torch.manual_seed(0)", "sys.exit('no data')")
    code, _, err = answer(capsys, *SIM, script)
    assert (code, err) == (1, "no data\n")


@pytest.mark.parametrize("words", [SIM, ()])
def test_a_script_without_a_loop(capsys: Capture, script: Path, words: Any) -> None:
    script.write_text("import offbeat\n")
    code, _, err = answer(capsys, *words, script)
    assert code == 2
    assert "ended without a loop: write for x, y in run.batches" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--address", "auto"], "--address is for a Ray cluster: add --engine ray"),
        (["--no-tls"], "--tls is for a Ray cluster: add --engine ray"),
        (["-n", "2:8"], "-n 2:8 is for a Ray cluster: add --engine ray"),
        (["--engine", "ray", "-n", "8:2"], "the second number is the most, and is smaller"),
        (["--engine", "ray", "--worker-resources", "GPU"], "--worker-resources takes JSON"),
        (["--engine", "ray", "--worker-resources", '{"GPU": -1}'], "how much of what each worker"),
        (["--engine", "ray", "--cluster", "20ms"], "--cluster is simulated"),
    ],
)
def test_what_is_said_of_a_ray_cluster_has_to_fit(
    script: Path, capsys: Capture, words: list[str], told: str
) -> None:
    code, _, err = answer(capsys, *words, script)
    assert code == 2
    assert told in " ".join(err.split())
