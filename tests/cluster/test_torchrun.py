"""torchrun has started a process on each of three hosts."""

import secrets
import sys
from pathlib import Path

import pytest

from benchmarks.network.hosts import Hosts
from offbeat.log.log import read
from offbeat.log.records import Linked
from tests.cluster.common import Command, run_here
from tests.contract.common import recount

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).with_name("ranks.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def test_torchrun_over_three_hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", str(tmp_path))
    token = secrets.token_urlsafe(32)
    with Hosts(3, tmp_path) as hosts:
        started = []
        for rank, host in enumerate(hosts):
            (host.folder / "offbeat.token").write_text(token)
            words = ["--nnodes=3", "--nproc-per-node=1", f"--node-rank={rank}"]
            words += [f"--master-addr={hosts[1].address}", "--master-port=29400", str(SCRIPT)]
            started.append(Command(host, *TORCHRUN, *words))
        said = "".join(command.ended() for command in started)
    for rank in range(3):
        assert f"rank {rank} of 3 ends at version 72" in said
    records = list(read(tmp_path / "run" / "log.jsonl"))
    came = {(r.worker, r.host) for r in records if isinstance(r, Linked)}
    assert came == {(0, "lab1"), (1, "lab2"), (2, "lab3")}
    for epoch in recount(records, 96, 3):
        assert epoch == {"applied": 96, "repeated": 0, "missing": 0, "dropped": 0}
    said = run_here("run", "--replay", str(tmp_path / "run"), str(SCRIPT))
    assert "identical at all 72 versions" in said
