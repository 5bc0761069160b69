"""The command line: what each command prints, and how each mistake is answered."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.recipes import recipe
from tests.cli.common import answers

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
X = torch.randn(96, 5)
Y = (X.sum(1) > 0).long()
calls = 0


def make():
    torch.manual_seed(1)
    return nn.Linear(5, 2), TensorDataset(X, Y), nn.functional.cross_entropy, TensorDataset(X, Y)


def task():
    return ob.Task(*make(), optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))


def terminated():
    import signal

    return interrupted(signal.SIGTERM)


def interrupted(what=2):
    import signal

    def loss(output, target):
        global calls
        calls += 1
        if calls == 30:
            signal.raise_signal(what)
        return nn.functional.cross_entropy(output, target)

    model, data, _, test = make()
    return model, data, loss, test


def fails_later():
    class Bad(torch.utils.data.Dataset):
        def __len__(self):
            return len(X)

        def __getitem__(self, index):
            if calls_left.pop():
                return X[index], Y[index]
            raise OSError("the disk is gone")

    calls_left = [False] + [True] * 60
    return nn.Linear(5, 2), Bad(), nn.functional.cross_entropy


def wrong():
    return 3
"""
ERROR_LINE = TASK.splitlines().index('            raise OSError("the disk is gone")') + 1


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's folder goes onto the path; here not for longer than a test."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(TASK)
    return path


Capture = pytest.CaptureFixture[str]


answer = answers()


def asked(capsys: Capture, *words: object) -> tuple[int, Any]:
    """A command with --json: standard output is one JSON object and nothing else."""
    code, out, _ = answer(capsys, *words, "--json")
    return code, json.loads(out)


def small(script: Path, *words: object, make: str = "make") -> list[object]:
    return ["simulate", "--script", f"{script}:{make}", "--batch-size", 8, *words]


# ---------------------------------------------------------------- the program


def test_version(capsys: Capture) -> None:
    assert answer(capsys, "--version")[:2] == (0, f"offbeat {ob.__version__}\n")


def test_alone_it_prints_help_with_commands_and_exit_codes(capsys: Capture) -> None:
    code, out, _ = answer(capsys)
    assert code == 0
    for word in ("simulate", "replay", "demo", "130"):
        assert word in out


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["simulate", "--sinc", "ssp:3"], "see offbeat simulate --help"),
        (["simulate", "--epochs", "many"], "--epochs"),
        (["simulate", "--epochs", "0"], "epochs must be a whole number of at least 1"),
        (["simulate", "--nonfinite", "explode"], "--nonfinite"),
        (["simulate", "--sync", "spp:3"], "did you mean 'ssp'"),
        (["simulate", "--recipe", "digit"], "did you mean 'digits'"),
        (["simulate", "--option", "hidden"], "--option key=value"),
        (["simulate", "--option", "hidden=wide"], "must be a whole number"),
        (["simulate", "--option", "hiden=3"], "did you mean 'hidden'"),
        (["simulate", "--recipe", "mnist"], "needs a value for 'folder'"),
        (["simulate", "--recipe", "digits", "--script", "a.py:f"], "leave one of them out"),
        (["simulate", "--script", "a.py:f", "--option", "a=b"], "belongs to a recipe"),
        (["simulate", "--script", "missing.py:f"], "no file missing.py"),
        (["simulate", "--script", "missing.py"], "--script FILE.py:FUNCTION"),
        (["simulate", "--sync", "asup", "--lr", "0.01"], "--sync 'asup:lr=0.01'"),
        (["simulate", "--sync", "asup:4,lr=1.0", "--lr", "0.5"], "--sync 'asup:4,lr=0.5'"),
        (["simulate", "--cluster", "20ms,80ms", "-n", "3"], "leave -n out"),
        (["simulate", "--cluster", "fast,slow"], "20ms"),
        (["simulate", "-n", "0"], "from 1 to"),
        (["simulate", "--codec", "zip"], "zip"),
        (["simulate", "--resume"], "--out DIR"),
        (["simulate", "--steps", "5"], "--cost-only"),
        (["simulate", "--cost-only", "--lr", "1"], "leave it out"),
        (["simulate", "--cost-only", "--steps", "0"], "at least 1"),
        (["replay"], "RUN_DIR"),
        (["fly"], "fly"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy_and_code_2(
    capsys: Capture, words: list[str], remedy: str
) -> None:
    code, out, err = answer(capsys, *words)
    assert (code, out) == (2, "")
    assert remedy in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    code, told = asked(capsys, *words)
    assert code == told["exit_code"] == 2
    assert remedy in told["error"]


def test_an_unforeseen_error_is_still_one_json_object(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*words: object, **more: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("offbeat.cli.simulate.estimate", bug)
    assert asked(capsys, "simulate", "--cost-only") == (
        1,
        {"error": "ZeroDivisionError: a bug", "exit_code": 1},
    )


# ---------------------------------------------------------------- scripts


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (TASK, "mak", r"no function 'mak' \(did you mean 'make'\?\); it has make, task"),
        (TASK, "wrong", r"returned int: return offbeat\.Task"),
        ("import torch\nx = 1 / 0\n", "make", r"job\.py line 2: ZeroDivisionError"),
        ("def make(:\n", "make", r"job\.py line 1: "),
        ("\ndef make():\n    return nothing\n", "make", r"job\.py line 3: NameError"),
        ("raise SystemExit('no')\n", "make", r"job\.py line 1: SystemExit: no"),
    ],
)
def test_a_script_with_a_mistake_is_told_file_and_line(
    capsys: Capture, script: Path, text: str, name: str, message: str
) -> None:
    script.write_text(text)
    code, out, err = answer(capsys, *small(script, make=name))
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert "Traceback" not in err


def test_a_script_that_fails_during_the_run_is_told_file_and_line(
    capsys: Capture, script: Path
) -> None:
    code, _, err = answer(capsys, *small(script, make="fails_later"))
    assert code == 3
    assert f"job.py line {ERROR_LINE}: OSError: the disk is gone" in err
    assert "Traceback" not in err


def test_a_rate_cannot_reach_into_a_function(capsys: Capture, script: Path) -> None:
    code, _, err = answer(capsys, *small(script, "--lr", 1, make="task"))
    assert code == 2
    assert "optimizer=partial(" in err


def test_a_script_may_import_what_lies_beside_it(capsys: Capture, script: Path) -> None:
    (script.parent / "beside_the_job.py").write_text(TASK)
    script.write_text("from beside_the_job import make\n")
    assert asked(capsys, *small(script))[0] == 0


# ---------------------------------------------------------------- simulate


def test_a_run_is_told_in_80_columns_without_escape_codes(capsys: Capture, script: Path) -> None:
    code, out, err = answer(capsys, *small(script, "--cluster", "20ms,80ms", "--sync", "ssp:1"))
    assert (code, err) == (0, "")
    for word in ("speed", "accuracy", "staleness", "waiting", "bytes", "memory", "ledger"):
        assert word in out
    assert "virtual second" in out
    assert "96 samples applied once" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_flags_reach_the_run(capsys: Capture, script: Path, tmp_path: Path) -> None:
    flags = ["--sync", "asp", "-n", 3, "--epochs", 2, "--lr", 0.5, "--codec", "bf16", "--seed", 7]
    more = ["--shards", 2, "--nonfinite", "skip", "--evaluate-every", 48, "--checkpoint-every", 5]
    code, told = asked(capsys, *small(script, *flags, *more, "--out", tmp_path / "run"))
    assert code == 0
    assert told["summary"]["workers"] == 3
    assert [test["samples"] for test in told["tests"]] == [48, 96, 144, 192]
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    wanted = {"discipline": "asp", "epochs": 2, "codec": "bf16", "seed": 7, "shards": 2}
    assert config | wanted | {"nonfinite": "skip", "batch_size": 8} == config
    assert config["optimizer"] == {"name": "torch.optim.SGD", "settings": {"lr": 0.5}}
    assert config["origin"] == {"script": f"{script}:make"}
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


def test_the_command_and_the_function_agree(capsys: Capture, script: Path) -> None:
    _, told = asked(capsys, "simulate", "--sync", "asup", "--option", "hidden=8", "--seed", 3)
    task = recipe("digits", hidden=8, seed=3)
    settings = {"discipline": "asup", "engine": "sim", "test": task.test, "seed": 3}
    run = ob.train(task.model, task.data, task.loss, **settings)
    assert told["summary"]["parameter_hash"] == run.parameter_hash
    assert told["summary"] == run.summary().to_dict()


def test_cost_only_asks_for_no_task(capsys: Capture) -> None:
    words = ["simulate", "--cost-only", "--sync", "bsp", "--steps", 10, "--model-bytes", 1000]
    code, told = asked(capsys, *words, "--cluster", "20ms,80ms")
    assert code == 0
    expected = ob.estimate("20ms,80ms", "bsp", steps=10, model_bytes=1000)
    assert told["summary"] == expected.to_dict()


def test_a_folder_is_not_written_over(capsys: Capture, script: Path, tmp_path: Path) -> None:
    words = small(script, "--out", tmp_path / "run")
    assert answer(capsys, *words)[0] == 0
    code, _, err = answer(capsys, *words)
    assert code == 2
    assert "--resume" in err
    code, _, err = answer(capsys, *words, "--resume", "--epochs", 3)
    assert code == 4
    assert "epochs is 3 here and 1 in the run" in err


def test_a_run_of_one_recipe_does_not_go_on_with_another(capsys: Capture, tmp_path: Path) -> None:
    words = ["simulate", "--option", "hidden=4", "--out", tmp_path / "run"]
    assert answer(capsys, *words)[0] == 0
    assert answer(capsys, *words, "--resume")[0] == 0
    code, _, err = answer(capsys, *words, "--resume", "--seed", 1)
    assert code == 4
    assert "--option seed=0" in err


# ---------------------------------------------------------------- replay


def test_replay_of_a_recipe_needs_only_the_folder(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["simulate", "--sync", "ssp:2", "--option", "hidden=8", "--seed", 1, "--out", folder]
    assert answer(capsys, *words)[0] == 0
    code, out, _ = answer(capsys, "replay", folder)
    assert (code, out) == (0, "identical at all 45 versions\n")
    code, told = asked(capsys, "replay", folder, "--every", 10)
    assert (code, told["identical"], told["versions"], told["compared"]) == (0, True, 45, 4)

    log = folder / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"version":21,"parts"' in line)
    digit = lines[at].index('"hash":"') + len('"hash":"')
    other = "1" if lines[at][digit] == "0" else "0"
    lines[at] = lines[at][:digit] + other + lines[at][digit + 1 :]
    log.write_text("".join(lines))
    code, out, err = answer(capsys, "replay", folder)
    assert (code, out) == (5, "")
    assert "version 21" in err
    code, told = asked(capsys, "replay", folder)
    assert code == told["exit_code"] == 5
    assert (told["identical"], told["difference"]["version"]) == (False, 21)


def test_replay_never_imports_what_a_folder_names(
    capsys: Capture, script: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert answer(capsys, *small(script, "--out", folder, make="task"))[0] == 0
    witness = tmp_path / "imported"
    script.write_text(f"open({str(witness)!r}, 'w').close()\n" + TASK)
    code, _, err = answer(capsys, "replay", folder)
    assert code == 2
    assert f"--script {script}:task" in err
    assert not witness.exists()
    # With it the optimiser, which the folder cannot name, comes from the script too.
    assert answer(capsys, "replay", folder, "--script", f"{script}:task")[0] == 0
    assert witness.exists()


@pytest.mark.parametrize(
    ("origin", "code", "words"),
    [({}, 2, "--script"), ({"recipe": "os.system"}, 4, "os.system"), (None, 4, "run.json")],
)
def test_replay_of_a_folder_it_cannot_use(
    capsys: Capture, tmp_path: Path, origin: object, code: int, words: str
) -> None:
    if origin is not None:
        (tmp_path / "run.json").write_text(json.dumps({"origin": origin}))
    found, _, err = answer(capsys, "replay", tmp_path)
    assert found == code
    assert words in err


def test_replay_every_must_be_positive(capsys: Capture, tmp_path: Path) -> None:
    assert answer(capsys, "replay", tmp_path, "--every", 0)[0] == 2


# ---------------------------------------------------------------- Ctrl-C


def program(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offbeat", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(ob.__file__).parent.parent)},
    )


@pytest.mark.parametrize(("make", "exit_code"), [("interrupted", 130), ("terminated", 143)])
def test_a_run_stopped_by_ctrl_c_goes_on_to_the_same_bits(
    capsys: Capture, script: Path, tmp_path: Path, make: str, exit_code: int
) -> None:
    flags = ["--sync", "ssp:2", "--epochs", 5]
    words = small(script, *flags, "--out", "run", make=make)
    stopped = program(tmp_path, *words)
    assert stopped.returncode == exit_code, stopped.stderr
    assert stopped.stdout == ""
    assert "Traceback" not in stopped.stderr
    where, command = stopped.stderr.splitlines()
    assert re.match(r"stopped at version \d+ \(\d+ % done", where)
    assert command.strip().endswith("--out run --resume")

    whole = small(script, *flags, "--out", tmp_path / "run", make="make")
    code, resumed = asked(capsys, *whole, "--resume")
    assert code == 0
    _, straight = asked(capsys, *small(script, *flags))
    assert resumed["summary"] == straight["summary"]
    assert resumed["summary"]["parameter_hash"]
    code, out, _ = answer(capsys, "replay", tmp_path / "run", "--script", f"{script}:make")
    assert (code, out) == (0, "identical at all 60 versions\n")


def test_without_a_folder_ctrl_c_says_that_nothing_was_kept(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*words: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offbeat.cli.simulate.train", stopped)
    assert asked(capsys, "simulate") == (
        130,
        {"error": "stopped before the run began", "exit_code": 130},
    )
    monkeypatch.setattr("offbeat.cli.simulate.estimate", stopped)
    assert answer(capsys, "simulate", "--cost-only")[0] == 130
