"""Beginning with an earlier run: what its rule kept is taken where it means the same, or told."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.folder.tensors import load_tensors
from offbeat.log.log import read
from offbeat.log.records import Begun
from tests.contract.common import problem, run

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


def begun(engine: str, folder: Path, first: Any, second: Any, **options: Any) -> tuple[bool, str]:
    """Whether a second run has taken what the rule of the first had kept, and what was said."""
    (discipline, optimizer), (then, another) = first, second
    what = problem()
    run(engine, what, discipline, optimizer=optimizer, workers=2, out=folder / "one")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        start = {"start": folder / "one", "out": folder / "two"}
        run(engine, what, then, optimizer=another, workers=2, **start, **options)
    assert ob.replay(folder / "two", *what).identical
    (record,) = [r for r in read(folder / "two" / "log.jsonl") if isinstance(r, Begun)]
    found = any(n.startswith("rule/") for n in load_tensors(folder / "two" / "start.safetensors"))
    words = [str(one.message) for one in told if one.category is RuntimeWarning]
    places = {Path(one.filename).name for one in told if one.category is RuntimeWarning}
    assert places <= {"common.py"}  # whose line calls `train`
    assert bool(words) == bool(record.left)
    assert all(record.left in one and "begins afresh" in one for one in words)
    return found, record.left


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("bsp", MOMENTUM), ("asp", MOMENTUM)),
        (("asp", MOMENTUM), ("bsp", partial(MOMENTUM, lr=0.01, weight_decay=0.1))),
        (("bsp", ADAM), ("ssp:2", ADAM)),
        (("diloco:2", MOMENTUM), ("diloco:3", ADAM)),
        (("bsp", MOMENTUM), ("gossip", MOMENTUM)),
    ],
)
def test_the_same_rule_in_the_same_role_goes_on(engine, first, second, tmp_path):
    assert begun(engine, tmp_path, first, second) == (True, "")


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (("bsp", MOMENTUM), ("diloco:2", MOMENTUM), "was given gradients, this one is given chang"),
        (
            ("diloco:2", MOMENTUM),
            ("bsp", MOMENTUM),
            "was given changes of local steps, this one is",
        ),
        (
            ("bsp", MOMENTUM),
            ("bsp", partial(MOMENTUM, momentum=0.5)),
            "momentum was 0.9 and is 0.5",
        ),
        (("asp", ADAM), ("asp", partial(ADAM, amsgrad=True)), "amsgrad was False and is True"),
        (("bsp", ADAM), ("bsp", MOMENTUM), "that rule was Adam and this one is SGD"),
    ],
)
def test_another_role_or_rule_begins_afresh_and_is_told(engine, first, second, why, tmp_path):
    found, told = begun(engine, tmp_path, first, second)
    assert not found
    assert why in told


def test_momentum_of_gradients_is_no_outer_momentum(engine, tmp_path):
    """At an inner rate of 0 nothing changes, so parameters stay where they are."""
    what, still = problem(), partial(torch.optim.SGD, lr=0.0)
    first = run(engine, what, "bsp", optimizer=MOMENTUM, workers=2, out=tmp_path / "one")
    with pytest.warns(RuntimeWarning, match="given gradients"):
        second = run(
            engine, what, "diloco:2", optimizer=still, workers=2, start=tmp_path / "one"
        )  # fmt: skip
    assert second.parameter_hash == first.parameter_hash


def test_nothing_is_told_where_nothing_was_kept(engine, tmp_path):
    plain = partial(torch.optim.SGD, lr=0.1)
    assert begun(engine, tmp_path, ("bsp", plain), ("diloco:2", plain)) == (False, "")


def test_a_schedule_that_moves_momentum_leaves_the_rule_what_it_is(engine, tmp_path):
    turning = partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3)
    options = {"schedule": ob.Schedule(turning, "version"), "optimizer": MOMENTUM, "workers": 2}
    run(engine, problem(), "bsp", out=tmp_path / "one", **options)
    run(engine, problem(), "bsp", start=tmp_path / "one", **options)  # and no warning


def test_a_run_that_goes_on_takes_nothing_a_second_time(engine, tmp_path):
    what, options = problem(), {"optimizer": MOMENTUM, "workers": 2}
    run(engine, what, "bsp", out=tmp_path / "one", **options)
    options |= {"start": tmp_path / "one", "out": tmp_path / "two"}
    first = run(engine, what, "bsp", **options)
    kept = (tmp_path / "two" / "start.safetensors").read_bytes()
    again = run(engine, what, "bsp", resume=True, **options)
    assert again.parameter_hash == first.parameter_hash
    assert (tmp_path / "two" / "start.safetensors").read_bytes() == kept
