"""On a real terminal: what a script prints stays on the screen, from every process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.terminal import Emulated, played

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
from functools import partial

import torch
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.report import live

live.Progress.idle = live.Progress.draw  # at every record, so that each line is in danger

x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
print("before the loop")
with ob.join(LISTENERS) as run:
    model = run.replica(torch.nn.Linear(3, 1))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1))
    for number, (a, b) in enumerate(run.batches(TensorDataset(x, x.sum(1, True)), batch_size=4)):
        loss = ((model(a) - b) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number < 3:
            print(f"worker {run.rank} line {number}", flush=True)
            print(f"worker {run.rank} warns {number}", file=sys.stderr)
    BEYOND
    if run.rank == 0:
        print("result", len(x))
"""


def environment() -> dict[str, str]:
    # Unbuffered, a line and its end are two writes, between which others may come, here as without.
    strange = ("NO_COLOR", "COLUMNS", "LINES", "PYTHONUNBUFFERED")
    kept = {k: v for k, v in os.environ.items() if k not in strange}
    return kept | {"TERM": "xterm", "PYTHONPATH": str(ROOT)}


def write(folder: Path, listeners: str = "", beyond: str = "") -> None:
    text = SCRIPT.replace("LISTENERS", listeners).replace("    BEYOND", beyond)
    (folder / "train.py").write_text(text)


OFFBEAT = [sys.executable, "-m", "offbeat", "run"]
DISPLAYED = "listeners=[live.Progress('alone')]"


@pytest.mark.parametrize(
    ("command", "listeners", "workers"),
    [
        ([*OFFBEAT, "-n", "2", "train.py"], "", 2),
        ([*OFFBEAT, "--engine", "sim", "-n", "2", "train.py"], "", 2),
        ([sys.executable, "train.py"], DISPLAYED, 1),
        (
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"],
            "",
            2,
        ),
    ],
    ids=["local", "sim", "alone", "torchrun"],
)
def test_every_line_that_a_script_prints_is_left_on_the_screen(
    command: list[str], listeners: str, workers: int, tmp_path: Path
) -> None:
    write(tmp_path, listeners)
    code, screen, written = played(command, tmp_path, environment())
    assert code == 0, screen
    lines = screen.splitlines()
    displayed = "offbeat" in command or bool(listeners)
    there = lines if displayed else screen  # torchrun's processes are unbuffered
    for worker in range(workers):
        for number in range(3):
            assert f"worker {worker} line {number}" in there
            assert f"worker {worker} warns {number}" in there
    assert "result 48" in there
    assert ("\x1b[J" in written) == displayed  # or there was nothing to be afraid of
    assert not any("staleness" in line and "clock" in line for line in lines)  # it is gone
    assert "\x1b[?25l" not in written


def test_lines_without_an_end_and_of_workers_that_are_killed_stay(tmp_path: Path) -> None:
    write(
        tmp_path,
        beyond="""
    import os, signal
    if run.rank == 1:
        print("bar 10 %", end="\\r", flush=True)
        print("bar 100 %", end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    _, screen, _ = played([*OFFBEAT, "-n", "2", "train.py"], tmp_path, environment())
    assert "bar 100 %" in screen
    assert "bar 10 %" not in screen
    assert "worker 1 line 2" in screen.splitlines()


def test_ctrl_c_leaves_what_was_printed(tmp_path: Path) -> None:
    write(tmp_path)
    text = (tmp_path / "train.py").read_text().replace("batch_size=4", "batch_size=4, epochs=9999")
    (tmp_path / "train.py").write_text(text)
    asked = []

    def stop(text: str, process: "subprocess.Popen[bytes]") -> None:
        if not asked and "worker 0 warns 2" in text:
            asked.append(True)
            process.send_signal(signal.SIGINT)

    code, screen, _ = played([*OFFBEAT, "-n", "2", "train.py"], tmp_path, environment(), stop)
    assert code == 130
    assert "worker 0 warns 2" in screen.splitlines()
    assert "\nstopped with" in screen


def test_the_terminal_of_the_tests_erases_what_a_careless_display_erases() -> None:
    screen = Emulated()
    screen.feed("picture\r\nprinted\r\n\x1b[2A\r\x1b[Jpicture\r\n")
    assert screen.text == "picture"
    screen.feed("x" * 100)
    assert screen.text.splitlines()[1:] == ["x" * 80, "x" * 20]
