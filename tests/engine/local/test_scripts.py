"""A script on several processes: once up to its loop, then in every worker to its end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.log.log import read
from offbeat.log.records import Joined

SCRIPT = """
from functools import partial

import torch
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
print("once")
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 2))
with ob.join() as run:
    model = run.replica(torch.nn.Linear(3, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    for x, y in run.batches(data, batch_size=4, epochs=2):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        run.record(loss)
        HERE
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
total = sum(float(p.detach().abs().sum()) for p in model.parameters())
print(f"end {run.rank} {run.version} {total:.6f}", flush=True)
AFTER
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("HERE", "pass").replace("AFTER", ""))
    return path


def offbeat(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_every_worker_ends_with_the_same_final_model(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = offbeat("run", "-n", 3, "--sync", "asp", "--out", out, script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("once") == 1
    # Two workers may print into one line.
    ends = re.findall(r"end (\d) (\d+) (\d\.\d+)", done.stdout)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1", "2"]
    assert {version for _, version, _ in ends} == {"24"}
    assert len({total for _, _, total in ends}) == 1
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [48, 48]
    again = offbeat("run", "--replay", out, script)
    assert again.returncode == 0, again.stderr
    assert "identical at all 24 versions" in again.stdout


@pytest.mark.parametrize(
    "words", [("bsp", "--via", "allreduce"), ("local:2", "--via", "allreduce"), ("gossip",)]
)
def test_without_common_parameters(script: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    out = tmp_path / "run"
    done = offbeat("run", "-n", 3, "--sync", *words, "--out", out, script)
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"end (\d) (\d+) (\d\.\d+)", done.stdout)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1", "2"]
    assert len({total for _, _, total in ends}) == 1
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [48, 48]
    again = offbeat("run", "--replay", out, script)
    assert again.returncode == 0, again.stderr
    assert "identical at all" in again.stdout


def test_how_contributions_meet_is_for_real_workers(script: Path) -> None:
    done = offbeat("run", "--engine", "sim", "--via", "allreduce", script)
    assert done.returncode == 2
    assert "--via is for real workers: leave it out" in done.stderr


def test_a_script_with_a_process_for_each_shard(script: Path, tmp_path: Path) -> None:
    """The command line's number wins over the script's, and a replay has yet another."""
    script.write_text(script.read_text().replace("ob.join()", "ob.join(shards=1)"))
    out = tmp_path / "run"
    done = offbeat("run", "-n", 2, "--sync", "asp", "--shards", 2, "--out", out, script)
    assert done.returncode == 0, done.stderr
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [48, 48]
    assert figures["memory"]["store_largest"] < figures["memory"]["store"]
    again = offbeat("run", "--replay", out, script)
    assert "identical at all 24 versions" in again.stdout, again.stderr


def test_torchrun_with_a_process_for_each_shard(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = f"ob.join(shards=2, discipline='asp', out={str(out)!r})"
    script.write_text(script.read_text().replace("ob.join()", settings))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [48, 48]
    assert figures["memory"]["store_largest"] < figures["memory"]["store"]
    again = offbeat("run", "--replay", out, script)
    assert "identical at all 24 versions" in again.stdout, again.stderr


# What rank 1 does before it joins: wait for the way in, then try it as another user and as its own.
HOSTILE = """
import os, pathlib, socket, time
if os.environ["RANK"] == "1":
    def ways():
        names = [line.split()[-1] for line in open("/proc/net/unix") if "@offbeat" in line]
        found = [name.replace("@", chr(0), 1).encode() for name in names]
        run, port = os.environ["TORCHELASTIC_RUN_ID"], os.environ["MASTER_PORT"]
        found = [name for name in found if f"{run} {port}".encode() in name]
        for path in pathlib.Path(PLACE).glob("*/*.socket"):  # by a short name
            folder = os.open(path.parent, os.O_RDONLY)
            found.append(f"/proc/self/fd/{folder}/{path.name}".encode())
        return found
    def attack(way):
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wire.settimeout(20)
        try:
            wire.connect(way)
            wire.send(b"[1, {}]")
            while True:
                said, handles, _, _ = socket.recv_fds(wire, 9999, 2)
                if handles:
                    return "got in"
                if not said:
                    return "refused"
        except OSError as error:
            return type(error).__name__
    while not (there := ways()):
        time.sleep(0.01)
    pid = os.fork()
    if pid == 0:
        os.setgid(65534)
        os.setuid(65534)
        print("another user:", *map(attack, there), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print("this user:", *map(attack, there), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="plays another user")
def test_nobody_else_comes_in_under_torchrun(script: Path, tmp_path: Path) -> None:
    place, out = tmp_path / "place", tmp_path / "run"
    place.mkdir(0o711)
    hostile = HOSTILE.replace("PLACE", repr(str(place)))
    text = script.read_text().replace("ob.join()", f"ob.join(out={str(out)!r})")
    script.write_text(hostile + text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"XDG_RUNTIME_DIR": str(place)},
    )
    assert done.returncode == 0, done.stderr
    assert "another user: PermissionError" in done.stdout
    assert "this user: refused" in done.stdout
    assert "refused a connection to the ranks of this run: what it said makes no sense" in (
        done.stderr
    )
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [48, 48]
    assert list((place / "offbeat").iterdir()) == []


def test_a_worker_that_dies_in_its_loop_is_forked_again(script: Path, tmp_path: Path) -> None:
    mark, out = tmp_path / "mark", tmp_path / "run"
    die = f"import os, pathlib; mark = pathlib.Path({str(mark)!r})\n" + " " * 8
    die += "if run.rank == 1 and run.version > 3 and not mark.exists():\n" + " " * 12
    die += "mark.touch(); os.kill(os.getpid(), 9)"
    script.write_text(SCRIPT.replace("HERE", die).replace("AFTER", ""))
    # Slow enough that the other worker has not done everything before this one is back.
    done = offbeat("run", "-n", 2, "--emulate", "50ms", "--sync", "bsp", "--out", out, script)
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    joins = [r.worker for r in read(out / "log.jsonl") if isinstance(r, Joined)]
    assert joins.count(1) == 2
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [48, 48]


def test_a_worker_that_ends_with_status_0_in_its_loop_is_forked_again(
    script: Path, tmp_path: Path
) -> None:
    mark, out = tmp_path / "mark", tmp_path / "run"
    die = f"import os, pathlib; mark = pathlib.Path({str(mark)!r})\n" + " " * 8
    die += "if run.rank == 1 and run.version > 3 and not mark.exists():\n" + " " * 12
    die += "mark.touch(); os._exit(0)"
    script.write_text(SCRIPT.replace("HERE", die).replace("AFTER", ""))
    done = offbeat("run", "-n", 2, "--emulate", "50ms", "--sync", "bsp", "--out", out, script)
    assert done.returncode == 0, done.stderr
    joins = [r.worker for r in read(out / "log.jsonl") if isinstance(r, Joined)]
    assert joins.count(1) == 2
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [48, 48]


def test_workers_that_always_end_with_status_0_end_the_run(script: Path) -> None:
    script.write_text(SCRIPT.replace("HERE", "import os; os._exit(0)").replace("AFTER", ""))
    done = offbeat("run", "-n", 2, "--sync", "asp", script)
    assert done.returncode == 3
    assert "ended with exit status 0 4 times in a row without any work" in done.stderr


# To whom the signal goes: the launcher, whose workers are its children, or torchrun.
STOP = """import os, signal
        if run.rank == 1 and run.version > 3: os.kill(os.getppid(), signal.SIGTERM)"""


def test_sigterm_saves_and_the_run_goes_on(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    script.write_text(SCRIPT.replace("HERE", STOP).replace("AFTER", ""))
    words = ("run", "-n", 2, "--emulate", "50ms", "--sync", "asp", "--out", out)
    done = offbeat(*words, script)
    assert done.returncode == 143, done.stderr
    assert "goes on with the same command and --resume" in done.stderr
    assert "Traceback" not in done.stderr
    begun = json.loads((out / "summary.json").read_text())["updates"]
    assert 4 <= begun < 24
    script.write_text(SCRIPT.replace("HERE", "pass").replace("AFTER", ""))
    done = offbeat(*words, "--resume", script)
    assert done.returncode == 0, done.stderr
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [48, 48]


def torchrun(script: Path) -> subprocess.CompletedProcess[str]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200)


def test_sigterm_saves_a_run_under_torchrun(script: Path, tmp_path: Path) -> None:
    """torchrun sends it on to every rank; nobody leaves before the server has saved."""
    out = tmp_path / "run"
    settings = f"ob.join(discipline='bsp', out={str(out)!r}, resume=True)"
    text = SCRIPT.replace("AFTER", "").replace("ob.join()", settings)
    # From the fourth version on nobody gets further before the signal is there.
    wait = STOP + "\n" + " " * 8 + "if run.version > 3: stopping(run)"
    stopping = """
import time
from offbeat.engine.local.shared_memory import Counts

def stopping(run):
    while not run._seat.roles.shared.counts[Counts.STOPPING]:
        time.sleep(0)

torch.manual_seed(0)
"""
    script.write_text(text.replace("HERE", wait).replace("\ntorch.manual_seed(0)\n", stopping))
    done = torchrun(script)
    assert done.returncode != 0
    begun = json.loads((out / "summary.json").read_text())["updates"]
    assert 4 <= begun < 12
    script.write_text(text.replace("HERE", "pass"))
    done = torchrun(script)
    assert done.returncode == 0, done.stderr
    figures = json.loads((out / "summary.json").read_text())
    assert [epoch["applied"] for epoch in figures["ledger"]] == [48, 48]


def test_a_mistake_in_the_loop_is_told_with_its_line(script: Path) -> None:
    script.write_text(SCRIPT.replace("HERE", "1 / 0").replace("AFTER", ""))
    done = offbeat("run", "-n", 2, script)
    assert done.returncode == 3
    assert "ZeroDivisionError: division by zero" in done.stderr
    line = script.read_text()[: script.read_text().index("1 / 0")].count("\n") + 1
    assert f"{script} line {line}" in done.stderr
    assert done.stderr.count("train.py line") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("here", "after", "words"),
    [
        ('run.record(float("nan"))', "", "the loss is nan at worker"),
        ("model.late = torch.nn.Linear(1, 1)", "", "'late.weight' is new"),
        ("model.bias.requires_grad_()", "requires_grad_(False)", "'bias' was frozen when the run"),
    ],
)
def test_an_error_of_offbeats_own_has_the_line_of_the_step(
    script: Path, here: str, after: str, words: str
) -> None:
    text = SCRIPT.replace("HERE", here).replace("AFTER", "")
    if after:
        made = "model = run.replica(torch.nn.Linear(3, 2))"
        text = text.replace(made, f"{made}; model.bias.{after}")
    script.write_text(text)
    done = offbeat("run", "-n", 2, script)
    assert done.returncode == 3
    line = text[: text.index("optimizer.step()")].count("\n") + 1
    assert done.stderr.startswith(f"error: {script} line {line}: ")
    assert words in done.stderr
    assert done.stderr.count("train.py line") == 1


def test_a_mistake_after_the_loop_is_told_too(script: Path) -> None:
    script.write_text(SCRIPT.replace("HERE", "pass").replace("AFTER", "1 / 0"))
    done = offbeat("run", "-n", 2, script)
    assert done.returncode == 3
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistake_after_the_loop_counts_while_others_are_still_in_theirs(
    script: Path, tmp_path: Path
) -> None:
    """The server has not told of the end by then: it waits for the other one's last words."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Worker 1 is held up in its loop, and given up, until worker 0 has failed after its own.
    wait = f"""if run.rank == 1:
            import os, select
            from contextlib import suppress
            pid = int(open({str(pipe)!r}).read())
            with suppress(ProcessLookupError):
                select.select([os.pidfd_open(pid)], [], [])"""
    fail = f"""
if run.rank == 0:
    import os
    with open({str(pipe)!r}, "w") as pipe:
        print(os.getpid(), file=pipe)
    1 / 0
"""
    script.write_text(SCRIPT.replace("HERE", wait).replace("AFTER", fail))
    done = offbeat("run", "-n", 2, "--sync", "asp", "--patience", "3", script)
    assert done.returncode == 3, done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert len(re.findall(r"end 0", done.stdout)) == 1  # nobody went through the end again
    assert "end 1" in done.stdout


def test_one_that_waits_for_a_failed_one_does_not_wait_for_ever(script: Path) -> None:
    fail = """
if run.rank == 0:
    1 / 0
import signal
signal.pause()
"""
    script.write_text(SCRIPT.replace("HERE", "pass").replace("AFTER", fail))
    done = offbeat("run", "-n", 2, "--patience", "1", script)
    assert done.returncode == 3, done.stderr
    assert "ZeroDivisionError: division by zero" in done.stderr


def test_workers_that_all_leave_early_end_the_run(script: Path, tmp_path: Path) -> None:
    leave = "if run.version > 3: break"
    script.write_text(SCRIPT.replace("HERE", leave).replace("AFTER", ""))
    done = offbeat("run", "-n", 2, "--sync", "asp", "--out", tmp_path / "run", script)
    assert done.returncode == 0, done.stderr
    assert "end 0" in done.stdout
    assert "end 1" in done.stdout
