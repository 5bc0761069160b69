"""A script on another host may end the run for all before its samples are done."""

import json
import subprocess
import sys

from offbeat.engine.script import Script
from offbeat.engine.sim.scripts import replay_script
from offbeat.folder.checkpoint import RunFolder
from offbeat.transport.handshake import new_token

SCRIPT = """
import torch
from torch.utils.data import TensorDataset
import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(4000, 3), torch.zeros(4000, 1))
with ob.join(discipline="asp") as run:
    model = run.replica(torch.nn.Linear(3, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for done, (x, y) in enumerate(run.batches(data, batch_size=4), 1):
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if run.rank == 0 and done == 3:
            run.stop()
print(f"version {run.version}\\n", end="", flush=True)  # in one piece
"""
LONG = 120  # seconds: a bound, and not what it takes
OFFBEAT = (sys.executable, "-m", "offbeat")


def test_a_script_that_ends_the_run_for_all_is_no_error_of_the_store(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "offbeat.token").write_text(new_token())
    (tmp_path / "offbeat.token").chmod(0o600)
    pipes = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    serve = [*OFFBEAT, "store", "--json", "--listen", "127.0.0.1:0", "-n", "2", "--out", "run"]
    with subprocess.Popen([*serve, "train.py"], **pipes) as store:
        try:
            at = next(line for line in store.stderr if "127.0.0.1:" in line)
            at = next(word for word in at.split() if "127.0.0.1:" in word).rstrip(",:;.")
            work = [*OFFBEAT, "work", "--at", at, "-n", "2", "train.py"]
            worked = subprocess.run(work, **pipes, timeout=LONG, check=False)
            said, complaints = store.communicate(timeout=LONG)
        finally:
            store.kill()
    assert worked.returncode == 0, worked.stderr
    assert store.returncode == 0, complaints
    version = json.loads(said)["summary"]["updates"]
    assert 3 <= version < 1000
    assert worked.stdout.split() == ["version", str(version)] * 2
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert '"kind":"end"' in log
    assert '"settings":[{"lr":0.0081' in log
    assert replay_script(Script(tmp_path / "train.py"), RunFolder(tmp_path / "run")).identical
