"""`offbeat compare`: what it prints and keeps, how it goes on, and how mistakes are answered."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import compare as command
from offbeat.cli import main
from offbeat.errors import ConfigError
from offbeat.report.grid import Grid

TASK = """
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

X = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
HERE = Path(__file__).parent
calls = 0


def make():
    data = TensorDataset(X, Y)
    print("made")
    return nn.Linear(5, 2), data, nn.functional.cross_entropy, data


def deep():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    return model, TensorDataset(X, Y), nn.functional.cross_entropy


def stands_still():
    def loss(output, target):
        global calls
        calls += 1
        if calls > 50 and not (HERE / "go").exists():
            print("standing still", file=sys.stderr, flush=True)
            sys.stdin.read()
        return nn.functional.cross_entropy(output, target)

    return nn.Linear(5, 2), TensorDataset(X, Y), loss, TensorDataset(X, Y)


def interrupted():
    def loss(output, target):
        global calls
        calls += 1
        if calls == 50:
            raise KeyboardInterrupt
        return nn.functional.cross_entropy(output, target)

    return nn.Linear(5, 2), TensorDataset(X, Y), loss, TensorDataset(X, Y)


def fails_later():
    def loss(output, target):
        global calls
        calls += 1
        if calls == 50:
            raise OSError("the disk is gone")
        return nn.functional.cross_entropy(output, target)

    return nn.Linear(5, 2), TensorDataset(X, Y), loss, TensorDataset(X, Y)
"""
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(TASK)

    def page(grid: Grid, folder: Path) -> Path:
        (folder / "report.html").write_text(grid.title)
        return folder / "report.html"

    monkeypatch.setattr(command, "write_report", page)


def words(*more: object, make: str = "make") -> list[str]:
    usual = ["--devices", "1,2", "--sync", "bsp,asp", "--batch-size", "8", "--epochs", "2"]
    start = ["compare", "--script", f"job.py:{make}", "--engine", "sim", *usual]
    return [*start, *(str(word) for word in more)]


def answer(capsys: Capture, *given: str) -> tuple[int, str, str]:
    code = main(given)
    out, err = capsys.readouterr()
    return code, out, err


def states(folder: str) -> list[str]:
    results: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text())
    return [cell["state"] for cell in results["cells"]]


# ---------------------------------------------------------------- what it does


def test_table_results_and_report(capsys: Capture) -> None:
    code, out, err = answer(capsys, *words("--straggler", 4))
    assert code == 0
    assert "the last of two or more is 4 times slower" in " ".join(out.split())
    assert "results: runs/compare-job/results.json, runs/compare-job/results.csv" in out
    assert "report:  runs/compare-job/report.html" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "4/4 asp on 2 devices: " in err
    assert states("runs/compare-job") == ["finished"] * 4
    code, again, err = answer(capsys, *words("--straggler", 4))
    assert (code, again.replace("made\n", "")) == (0, out.replace("made\n", ""))
    assert err == "4 of 4 cells are there already\n"


def test_every_cell_has_the_layout(capsys: Capture) -> None:
    more = ["--layout", "pp=2,microbatches=2,split=count", "--json"]
    code, out, _ = answer(capsys, *words(*more, make="deep"))
    assert code == 0
    found = json.loads(out)
    assert found["settings"]["layout"].startswith("pp=2,microbatches=2,split=count for")
    for cell in found["cells"]:
        kept = json.loads((Path(found["folder"]) / cell["folder"] / "run.json").read_text())
        assert kept["layout"] == "pp=2,microbatches=2,split=1"
    code, _, err = answer(capsys, *words("--layout", "pp=2", make="deep"))
    assert code == 4
    assert "layout is pp=2 here" in err


def test_json_is_the_results_and_nothing_else(capsys: Capture) -> None:
    code, out, err = answer(capsys, *words("--json", "--out", "here", "--repeat", 2))
    assert code == 0
    found = json.loads(out)
    kept = json.loads(Path("here/results.json").read_text())
    assert found == kept | {"folder": "here", "report": "here/report.html"}
    assert [(c["devices"], c["repeat"]) for c in found["cells"][:2]] == [(1, 0), (2, 0)]
    assert len(found["cells"]) == 8
    assert "made" in err


def test_equal_seeds_begin_with_equal_weights(capsys: Capture) -> None:
    """The script seeds nothing, and yet every cell of a repeat starts from the same model."""
    _, out, _ = answer(capsys, *words("--json", "--repeat", 2, "--out", "one"))
    _, other, _ = answer(capsys, *words("--json", "--repeat", 2, "--out", "two"))
    first, second = (json.loads(text)["cells"] for text in (out, other))
    assert [c["parameter_hash"] for c in first] == [c["parameter_hash"] for c in second]
    alone = {(c["discipline"], c["repeat"]): c for c in first if c["devices"] == 1}
    assert alone["bsp", 0]["parameter_hash"] == alone["asp", 0]["parameter_hash"]
    assert alone["bsp", 0]["parameter_hash"] != alone["bsp", 1]["parameter_hash"]


def test_a_recipe_with_rates_of_its_own(capsys: Capture) -> None:
    more = ["--lr", "0.2", "--lr", "asp=0.05", "--cluster", "20ms", "--json", "--out", "here"]
    code, out, _ = answer(
        capsys, "compare", "--devices", "2", "--sync", "bsp,asp,asup", "--epochs", "1", *more
    )
    assert code == 0
    assert json.loads(out)["settings"]["learning rate"] == "all 0.2, asp 0.05"
    rates = []
    for name in ("bsp", "asp", "asup"):
        config = json.loads(Path(f"here/cells/{name}-on2/run.json").read_text())
        rates.append(config["optimizer"] and config["optimizer"]["settings"]["lr"])
        assert config["origin"] == {"recipe": "digits", "options": {"seed": 0}}
    assert rates == [0.2, 0.05, None]
    assert main(["replay", "here/cells/asp-on2"]) == 0


def test_without_matplotlib_results_are_there(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(grid: Grid, folder: Path) -> Path:
        raise ConfigError("the report draws its figures with matplotlib: pip install it")

    monkeypatch.setattr(command, "write_report", missing)
    code, out, _ = answer(capsys, *words())
    assert code == 0
    assert "no report: the report draws its figures with matplotlib" in out
    assert states("runs/compare-job") == ["finished"] * 4


# ---------------------------------------------------------------- what goes wrong


def test_a_failing_cell_is_shown_and_the_grid_goes_on(capsys: Capture) -> None:
    code, out, err = answer(capsys, *words(make="fails_later"))
    line = TASK.splitlines().index('            raise OSError("the disk is gone")') + 1
    assert code == 3
    assert f"bsp on 2 devices: job.py line {line}: OSError: the disk is gone" in out
    assert f"2/4 bsp on 2 devices: failed: job.py line {line}" in err
    assert "tries failed cells again" in err
    assert "failed" in states("runs/compare-job")
    assert states("runs/compare-job")[0] == "finished"


def test_what_is_not_possible_is_shown_and_is_no_failure(capsys: Capture) -> None:
    code, out, _ = answer(capsys, *words("--sync", "soft:2"))
    assert code == 0
    assert "soft:2 on 1 device: not possible: an update cannot gather 2" in out
    assert states("runs/compare-job") == ["finished"] * 4 + ["impossible", "finished"]


def test_ctrl_c_says_how_to_go_on(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    given = words(make="interrupted")
    monkeypatch.setattr(sys, "argv", ["offbeat", *given])
    code, out, err = answer(capsys, *given)
    assert (code, out) == (130, "")
    assert (
        f"stopped after 1 of 4 cells; go on with the same command:\n  offbeat {' '.join(given)}"
        in (err)
    )
    assert not Path("runs/compare-job/results.json").exists()


def test_killed_it_goes_on_and_runs_nothing_twice(capsys: Capture) -> None:
    given = words("--out", "here", make="stands_still")
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat", *given],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(command.__file__).parents[2])},
    )
    assert process.stderr is not None
    assert process.stdin is not None
    lines = []
    with process, process.stdin, process.stderr:
        for line in process.stderr:
            lines.append(line)
            if line == "standing still\n":
                break
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, lines
    kept = Path("here/cells/bsp-on1/log.jsonl")
    before = (kept.stat().st_ino, kept.stat().st_mtime_ns)
    assert sorted(p.name for p in Path("here/cells").iterdir()) == [".bsp-on2", "bsp-on1"]
    assert Path("here/cells/.bsp-on2/log.jsonl").stat().st_size > 0
    Path("go").touch()
    code, _, err = answer(capsys, *given)
    assert code == 0
    assert err.startswith("1 of 4 cells are there already\n2/4 bsp on 2 devices: ")
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == before
    assert states("here") == ["finished"] * 4
    assert sorted(p.name for p in Path("here/cells").iterdir()) == [
        *("asp-on1", "asp-on2", "bsp-on1", "bsp-on2"),
    ]
    # A cell begun again is as if it had never been stopped.
    main(words("--out", "fresh", make="stands_still"))
    there = [json.loads(Path(f"{f}/results.json").read_text())["cells"] for f in ("here", "fresh")]
    assert there[0] == there[1]


def test_a_script_that_changed_is_another_comparison(capsys: Capture) -> None:
    assert main(words()) == 0
    capsys.readouterr()
    Path("job.py").write_text(TASK.replace("nn.Linear(5, 2), data", "nn.Linear(5, 3), data"))
    code, _, err = answer(capsys, *words())
    assert code == 4
    assert "the script's content is" in err
    assert "name another folder with --out" in err


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        (["--devices", "0,1"], "at least 1, not 0"),
        (["--devices", "1,x"], "--devices must be a whole number"),
        (["--sync", "sp:3"], "did you mean 'ssp'?"),
        (["--sync", "soft:8"], "cannot gather 8 contributions from 2 workers"),
        (["--devices", "1,16"], "use a batch size of 6 or less, or use fewer devices"),
        (["--emulate", "20ms"], "write --cluster 20ms"),
        (["--engine", "local", "--straggler", "4"], "add --emulate 20ms"),
        (["--engine", "local", "--cluster", "20ms"], "add --engine sim"),
        (["--cluster", "20ms,20ms,20ms"], "describe one for all, or 2"),
        (["--lr", "asp=slow"], "must be a number"),
        (["--target", "90"], "write 90% or 0.9 for 90 %"),
        (["--target", "high"], "a number such as 90%, 0.9 or 0.35"),
        (["--layout", "pp=2,replicas=2"], "leave replicas out"),
        (["--layout", "pp=2"], "cannot be split: write pp=1"),
        (["--script", "job.py:made"], "did you mean 'make'?"),
        (["--nonsense"], "offbeat compare --help"),
    ],
)
def test_mistakes_are_found_before_anything_is_run(
    capsys: Capture, more: list[str], remedy: str
) -> None:
    code, out, err = answer(capsys, *words(*more))
    assert code == 2
    assert out.replace("made\n", "") == ""
    assert remedy in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()
