"""A run folder belongs to one live run, whatever runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.engine import run_session as kept_module
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.records import Updated
from tests.contract.common import check_run, problem, run

ROOT = Path(__file__).parents[2]


class Intruder(ob.Listener):
    """Tries to resume a run that is going on."""

    def __init__(self, engine: str, **options: Any):
        self.engine, self.options, self.said = engine, options, ""

    def see(self, record: Any) -> None:
        if isinstance(record, Updated) and record.version == 4:
            with pytest.raises(ob.CheckpointError) as caught:
                run(self.engine, problem(), "asp", resume=True, **self.options)
            self.said = str(caught.value)


def test_a_live_run_is_not_resumed(engine, tmp_path):
    what, options = problem(), {"workers": 2, "checkpoint_every": 2, "out": tmp_path / "run"}
    intruder = Intruder(engine, **options)
    run(engine, what, "asp", listeners=[intruder], **options)
    assert f"is in use by process {os.getpid()} " in intruder.said
    assert "wait until that has ended, or name another folder" in intruder.said
    check_run(tmp_path / "run", what)
    run(engine, what, "asp", resume=True, **options)  # now it may


def test_a_run_that_failed_lets_go(engine, tmp_path):
    def boom(*_: Any) -> Any:
        raise ZeroDivisionError

    what, options = problem(), {"workers": 2, "out": tmp_path / "run"}

    class Fails(ob.Listener):
        def see(self, record: Any) -> None:
            boom()

    with pytest.raises(ZeroDivisionError) as caught:
        run(engine, what, "asp", listeners=[Fails()], **options)
    run(engine, what, "asp", resume=True, **options)
    assert caught.value is not None  # whose frames have been alive until here


_KILLED = """
import os, signal, sys
import offbeat as ob
from tests.contract.common import problem, run
class Kill(ob.Listener):
    def see(self, record):
        os.kill(os.getpid(), signal.SIGKILL)
run(sys.argv[1], problem(), "asp", out=sys.argv[2], workers=2, listeners=[Kill()])
"""


def test_a_killed_launcher_leaves_the_folder_free_at_once(engine, tmp_path):
    words = [sys.executable, "-c", _KILLED, engine, str(tmp_path / "run")]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    RunFolder(tmp_path / "run").lock().release()
    run(engine, problem(), "asp", out=tmp_path / "run", workers=2, resume=True)


_SCRIPT = """
import sys
from functools import partial

import torch
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.folder.checkpoint import RunFolder

torch.manual_seed(0)
out = OUT
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
with ob.join(out=out) as run:
    model = run.replica(torch.nn.Linear(3, 2))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1))
    for x, y in run.batches(data, batch_size=4):
        torch.nn.functional.mse_loss(model(x), y).backward()
        try:
            RunFolder(out).lock()
        except ob.CheckpointError as error:
            assert "is in use by process" in str(error)
        else:
            raise AssertionError("anybody may write here")
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "offbeat", "run", "-n", "2"),
        ("-m", "offbeat", "run", "--cluster", "10ms,20ms"),
        (),
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    ],
    ids=["local", "sim", "alone", "torchrun"],
)
def test_a_script_holds_its_folder(words, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.replace("OUT", repr(str(tmp_path / "run"))))
    done = subprocess.run(
        [sys.executable, *words, str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "lock").exists()
    RunFolder(tmp_path / "run").lock().release()


# ---------------------------------------------------------------- Ctrl-C at the very end


def test_ctrl_c_while_the_model_is_written_waits_for_it(engine, tmp_path, monkeypatch):
    write = kept_module.replace_tensors

    def interrupted(path: Path, tensors: Any) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return write(path, tensors)

    monkeypatch.setattr(kept_module, "replace_tensors", interrupted)
    what, before = problem(), signal.getsignal(signal.SIGINT)
    with pytest.raises(ob.Interrupted) as caught:
        run(engine, what, "asp", workers=2, out=tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is before
    assert caught.value.run.summary().samples == 48
    assert (tmp_path / "run" / "summary.json").exists()
    check_run(tmp_path / "run", what)


def test_a_second_ctrl_c_stops_at_once_and_the_run_can_be_resumed(engine, tmp_path, monkeypatch):
    write, left = kept_module.replace_tensors, [2]

    def interrupted(path: Path, tensors: Any) -> str:
        while left[0]:
            left[0] -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return write(path, tensors)

    monkeypatch.setattr(kept_module, "replace_tensors", interrupted)
    what, options = problem(), {"workers": 2, "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        run(engine, what, "asp", **options)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    again = run(engine, what, "asp", resume=True, **options)
    assert again.summary().samples == 48
    check_run(tmp_path / "run", what)
