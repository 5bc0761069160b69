"""Golden trajectories: one small fixed run of every named discipline, written down once.

They hold values and not hashes, so that another processor's rounding is no difference. After a
change that is meant, `pytest tests/contract/test_golden.py --regenerate` writes them anew.
"""

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.discipline.named import ROWS
from offbeat.engine.sim.compute_times import Constant
from offbeat.log.records import Updated
from tests.contract.common import NAMES, Records, named, problem, run

FOLDER = Path(__file__).parent / "golden"
CLUSTER = ob.Cluster(
    (
        ob.Machine(Constant(0.01), latency=0.001),
        ob.Machine(Constant(0.013), bandwidth=1e5, failures=(ob.Failure(0.04, 0.03),)),
        ob.Machine(Constant(0.021), pauses=(ob.Pause(0.05, 0.01),), joins_at=0.004),
    ),
    apply=0.0005,
    patience=0.015,
)


def _trajectory(engine: str, name: str) -> dict[str, Any]:
    seen = Records()
    got = run(
        engine, problem(samples=26), named(3)[name], cluster=CLUSTER, seed=11, listeners=[seen]
    )
    updates = list(seen.of(Updated))
    figures = got.summary()
    return {
        "discipline": figures.discipline,
        "updates": figures.updates,
        "seconds": _short(figures.seconds),
        "bytes sent": figures.bytes_sent,
        "workers": [[part.worker for part in record.parts] for record in updates],
        "staleness": [[part.staleness for part in record.parts] for record in updates],
        "times": [_short(record.time) for record in updates],
        "losses": [_short(record.parts[0].loss) for record in updates],
        "parameters": {
            key: [_short(x) for x in tensor.flatten().tolist()]
            for key, tensor in got.model.state_dict().items()
        },
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def differences(golden: Any, found: Any, where: str = "") -> list[str]:
    """Every place where two trajectories differ by more than rounding, in words."""
    if isinstance(golden, dict) and isinstance(found, dict):
        keys = dict.fromkeys([*golden, *found])
        return [
            line
            for key in keys
            for line in differences(golden.get(key), found.get(key), f"{where}/{key}")
        ]
    if isinstance(golden, list) and isinstance(found, list):
        pairs = enumerate(zip_longest(golden, found))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    both = isinstance(golden, float | int) and isinstance(found, float | int)
    inexact = isinstance(golden, float) or isinstance(found, float)
    same = found == pytest.approx(golden, rel=1e-4, abs=1e-7) if both and inexact else False
    return [] if same or golden == found else [f"{where}: golden {golden}, now {found}"]


@pytest.mark.parametrize("name", NAMES)
def test_trajectory(sim_only, name, regenerate):
    """Virtual time alone comes to the same figures on every machine."""
    found = _trajectory(sim_only, name)
    path = FOLDER / f"{name}.json"
    if regenerate:
        path.write_text(_text(found))
    lines = differences(json.loads(path.read_text()), found)
    assert not lines, f"{path.name} differs in {len(lines)} places:\n" + "\n".join(lines[:20])


def _text(value: dict[str, Any]) -> str:
    """One line for each list, so that a changed file is readable line by line."""
    rows = []
    for key, item in value.items():
        if isinstance(item, dict):
            inner = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in item.items()]
            rows.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n }")
        else:
            rows.append(f" {json.dumps(key)}: {json.dumps(item)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def test_every_named_discipline_has_a_trajectory():
    """Hogwild alone keeps no log; and no file is left over from a row that is gone."""
    covered = {str(discipline).partition(":")[0] for discipline in named(3).values()}
    assert covered == set(ROWS) - {"hogwild"}
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES)


def test_differences_are_found_and_told():
    golden = {"times": [0.1, 0.2], "staleness": [[0], [1]], "updates": 2}
    assert (
        differences(golden, {"times": [0.1000001, 0.2], "staleness": [[0], [1]], "updates": 2})
        == []
    )
    changed = {"times": [0.1, 0.3, 0.4], "staleness": [[0], [2]], "updates": 3}
    assert differences(golden, changed) == [
        "/times[1]: golden 0.2, now 0.3",
        "/times[2]: golden None, now 0.4",
        "/staleness[1][0]: golden 1, now 2",
        "/updates: golden 2, now 3",
    ]
