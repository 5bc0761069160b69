"""`offbeat layout`: what it prints for recipes and scripts, and its errors."""

from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

import offbeat as ob
from tests.cli.common import answers, objects

Capture = pytest.CaptureFixture[str]

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import offbeat as ob


def make():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    data = TensorDataset(torch.ones(8, 4), torch.ones(8, 4))
    return ob.Task(model, data, nn.functional.mse_loss, batch_size=8)


def whole_batches():
    task = make()
    loss = ob.BatchLoss(lambda model, batch: model(batch[0]).sum())
    return ob.Task(task.model, task.data, loss, batch_size=8)


def failing():
    class Wrong(nn.Module):
        def forward(self, value):
            raise TypeError("my own mistake")

    return ob.Task(nn.Sequential(Wrong(), Wrong()), make().data, nn.functional.mse_loss)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


answer = answers("layout")
asked = objects(answer)


def test_chars_in_eighty_columns(capsys: Capture, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 60)
    options = [f"path={text}", "context=8", "width=8", "heads=2"]
    words = [word for option in options for word in ("--option", option)]
    code, out, err = answer(capsys, "--recipe", "chars", *words, "--layout", "pp=4,microbatches=8")
    assert (code, err) == (0, "")
    assert out.startswith("pp=4,microbatches=8 for chars\n")
    for word in (
        "32 samples in 8 microbatches",
        "idle",
        "embed",
        "nothing else was",
        "4 processes",
    ):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80


def test_resnet_by_name(capsys: Capture) -> None:
    words = ["--recipe", "resnet50", "--option", "side=32", "--option", "samples=4"]
    layout = "pp=3,split=blocks.3+blocks.13,schedule=gpipe,microbatches=2,replicas=2"
    threads = torch.get_num_threads()
    found = asked(capsys, *words, "--batch-size", 4, "--layout", layout, "--threads", 1)
    assert found["processes"] == 6
    assert found["split"] == ["blocks.3", "blocks.13"]
    assert [stage["last"] for stage in found["stages"]] == ["blocks.2", "blocks.12", "classify"]
    weights = sum(process["memory"]["gradients"] for process in found["per_process"])
    assert weights == 4 * 25_557_032
    assert found["threads"] == 1
    assert torch.get_num_threads() == threads
    assert "batch norm sees microbatches of 2" in found["notes"][0]


def test_speeds_links_and_memory_reach_the_prediction(capsys: Capture, script: Path) -> None:
    words = ["--script", f"{script}:make", "--layout", "pp=2"]
    plain = asked(capsys, *words)
    assert len(plain["profile"]["blocks"]) == 4
    slow = asked(capsys, *words, "--bandwidth", "10B/s")
    assert slow["seconds"] > 10
    tiny = asked(capsys, *words, "--speeds", "0.000001,1")
    assert tiny["stages"][0]["blocks"] == 1
    code, _, err = answer(capsys, *words, "--memory", "0.1kB")
    assert code == 2
    assert "within 100 bytes" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layout", "pp=5"], "4 blocks, too few for 5 stages: write pp=4 or less"),
        (["--layout", "pp=3"], "a batch of 8 does not divide into 3 microbatches"),
        (["--layout", "pp=2,split=6"], "there is no block '6'"),
        (["--layout", "p=2"], "unknown 'p'"),
        (["--layout", "pp=2", "--speeds", "2:1"], "write for example 2,1,1,1"),
        (["--layout", "pp=2", "--memory", "big"], "write for example 500MB"),
        (["--layout", "pp=2", "--threads", "0"], "--threads must be at least 1"),
        (["--layout", "pp=2", "--batch-size", "10"], "from 1 to the 8 samples of the data"),
        ([], "--layout"),
    ],
)
def test_mistakes(capsys: Capture, script: Path, words: list[str], told: str) -> None:
    code, out, err = answer(capsys, "--script", f"{script}:make", *words)
    assert (code, out) == (2, "")
    assert told in err


def test_mistakes_of_scripts(capsys: Capture, script: Path) -> None:
    layout = ["--layout", "pp=2"]
    code, _, err = answer(capsys, "--script", f"{script}:whole_batches", *layout)
    assert code == 2
    assert "use ob.explain(layout, model, sample)" in err
    code, _, err = answer(capsys, "--script", f"{script}:failing", "--batch-size", "4", *layout)
    assert code == 3
    assert "mine.py line" in err
    assert "my own mistake" in err


# ---------------------------------------------------------------- of a run


def test_a_run_shows_what_was_predicted_and_what_was_measured(
    capsys: Capture, script: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 4))
    run = ob.train(
        model, data, torch.nn.functional.mse_loss, workers=1, batch_size=8, layout="pp=2",
        optimizer=partial(torch.optim.SGD, lr=0.1), out=out,
        origin={"script": f"{script}:make"},
    )  # fmt: skip
    figures = run.summary().layout
    assert figures is not None
    assert figures.processes == 2
    assert [process.steps for process in figures.per_process] == [2, 2]
    assert all(0 < process.busy <= process.total for process in figures.per_process)
    assert figures.predicted_seconds is not None
    found = asked(capsys, out, "--script", f"{script}:make")
    assert found["layout"] == msgspec.to_builtins(figures)
    assert found["now"]["seconds"] > 0
    code, words, _ = answer(capsys, out, "--script", f"{script}:make")
    assert code == 0
    for word in ("measured", "predicted ", "predicted now", "better", "process"):
        assert word in words
    assert max(map(len, words.splitlines()[1:])) <= 80  # paths are not broken
    code, _, err = answer(capsys, out)
    assert code == 2
    assert "if you trust it" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [([], "Write --layout pp=2, or the folder"), (["run", "--layout", "pp=2"], "has its own")],
)
def test_a_layout_or_a_folder(capsys: Capture, words: list[str], told: str) -> None:
    code, _, err = answer(capsys, *words)
    assert code == 2
    assert told in err


def test_a_run_without_a_layout_is_refused(capsys: Capture, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 4))
    ob.train(
        model, data, torch.nn.functional.mse_loss, engine="sim", workers=1, out=tmp_path / "r",
        optimizer=partial(torch.optim.SGD, lr=0.1), batch_size=8,
    )  # fmt: skip
    code, _, err = answer(capsys, tmp_path / "r")
    assert code == 2
    assert "no finished run of split replicas" in err
