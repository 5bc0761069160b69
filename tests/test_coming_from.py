"""The script that people have, in its versions: how many lines change, and what comes out."""

import difflib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.engine.script import Script
from offbeat.engine.sim.scripts import simulate_script
from offbeat.folder.checkpoint import RunFolder

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "examples" / "coming_from"
PAGE = ROOT / "docs" / "coming-from.md"


def changed(name: str) -> tuple[int, int]:
    """Lines that are written, and lines that go, from the plain script to another."""
    texts = [(HERE / file).read_text().splitlines() for file in ("plain.py", name)]
    lines = list(difflib.unified_diff(*texts, n=0))[2:]
    return sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def test_as_few_lines_are_written_as_for_ddp() -> None:
    ours, ddp = changed("ours.py"), changed("ddp.py")
    assert ours[0] <= ddp[0]
    told = re.findall(r"^\| `(ddp|ours)\.py` \| (\d+) \| (\d+) \|", PAGE.read_text(), re.M)
    assert {name: (int(new), int(gone)) for name, new, gone in told} == {"ddp": ddp, "ours": ours}


def score(words: str) -> float:
    found = re.findall(r"best (\d\.\d+) in epoch", words)
    assert len(found) == 1  # one worker tells it
    return float(found[0])


def test_it_ends_as_well_as_the_plain_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, chance = torch.get_num_threads(), torch.get_rng_state()
    monkeypatch.setattr(sys, "argv", ["plain.py", str(tmp_path / "plain")])
    runpy.run_path(str(HERE / "plain.py"), run_name="__main__")
    plain = score(capsys.readouterr().out)
    ours = Script(HERE / "ours.py", (str(tmp_path / "ours"),))
    for discipline in ("bsp", "ssp:3"):
        asked: dict[str, Any] = {"discipline": discipline, "out": tmp_path / discipline}
        run = simulate_script(ours, ob.Cluster.parse("20ms,30ms"), asked)
        assert abs(score(capsys.readouterr().out) - plain) < 0.03
        assert run.summary().ledger[0]["applied"] == 44 * 32
        kept = RunFolder(tmp_path / discipline).inside("state/worker-0").at_most(10_000, False)
        assert kept is not None
        assert any(name.startswith("average.") for name in kept.tensors)
    torch.set_num_threads(threads)
    torch.set_rng_state(chance)
