"""A replay arrives at the run's bits at every version, and finds a log that was altered."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offbeat as ob
from tests.contract.common import (
    CODECS,
    MOMENTUM,
    NAMES,
    both,
    clusters,
    examples,
    named,
    optimizer_for,
    packs_pulls,
    problem,
    run,
    scratch,
    seeds,
)


def normed() -> nn.Module:
    """Batch norm and dropout: state and chance at the worker."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


@pytest.mark.parametrize("name", NAMES)
@examples(5)
@given(cluster=clusters(faults=True), seed=seeds, codec=st.sampled_from(CODECS), data=st.data())
def test_replay_is_the_run_at_every_version(engine, name, cluster, seed, codec, data):
    what = problem(data.draw(st.sampled_from([normed, lambda: nn.Linear(3, 2)])), samples=26)
    discipline = named(len(cluster))[name]
    adam = partial(torch.optim.Adam, lr=0.01)
    factory = data.draw(st.sampled_from([MOMENTUM, adam]))
    pulled = data.draw(st.sampled_from(CODECS)) if packs_pulls(discipline) else None
    with scratch() as folder:
        out = folder / "run"
        got = run(
            engine, what, discipline, cluster=cluster, seed=seed, codec=codec, out=out,
            optimizer=optimizer_for(discipline, factory), pull_codec=pulled,
        )  # fmt: skip
        found = ob.replay(out, *what)
    assert found.difference is None
    assert found.versions == found.compared == got.summary().updates
    assert found.check() is found


def test_replay_with_schedule_clipping_groups_and_accumulation(engine, tmp_path):
    what = problem(samples=26)
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    for name in ("asp", "bsp", "local", "easgd"):
        for per in ("epoch", "version"):
            options: dict[str, Any] = {
                "schedule": ob.Schedule(halve, per),
                "clip": ob.Clip(norm=0.4),
                "groups": lambda model: [{"params": list(model.parameters()), "lr": 0.3}],
            }
            out = tmp_path / f"{name}-{per}"
            run(engine, what, named(3)[name], workers=3, accumulate=2, out=out, **options)
            ob.replay(out, *what, **options).check()
    changed = options | {"clip": None}
    with pytest.raises(ob.CheckpointError, match=r"clip is None here and norm=0\.4"):
        ob.replay(out, *what, **changed)


def test_a_run_that_began_with_another_can_be_replayed_alone(engine, tmp_path):
    what = problem()
    run(engine, what, "bsp", workers=2, out=tmp_path / "first")
    run(engine, what, "asp", workers=2, out=tmp_path / "second", start=tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    assert ob.replay(tmp_path / "second", *what).check().versions > 0


def test_replay_with_other_data_differs_at_the_first_version(engine, tmp_path):
    what = problem()
    run(engine, what, "asp", workers=2, out=tmp_path / "run")
    other = problem(seed=1)
    found = ob.replay(tmp_path / "run", what.model, other.data, what.loss)
    assert found.difference is not None
    assert found.difference.version == 1
    with pytest.raises(ob.ReplayMismatch, match="version 1 is the first that differs"):
        found.check()


# ---------------------------------------------------------------- altered logs

GRADIENTS = ["asp", "ssp", "bsp", "soft", "asp-gap"]


class Lines:
    """A log as lines that can be altered, put back, and replayed."""

    def __init__(self, folder: Path, what: Any):
        self.folder, self.what = folder, what
        self.file = folder / "log.jsonl"
        self.original = [json.loads(line) for line in self.file.read_bytes().splitlines()]

    def updates(self) -> dict[int, int]:
        """Line of each version."""
        return {r["version"]: i for i, r in enumerate(self.original) if r["kind"] == "update"}

    def replayed(self, alter: Callable[[list[Any]], None]) -> ob.Replay:
        lines = json.loads(json.dumps(self.original))
        alter(lines)
        assert lines != self.original, "the alteration altered nothing"
        self.file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return ob.replay(self.folder, *self.what)


def _lines(engine: str, name: str, folder: Path, workers: int = 3) -> Lines:
    what = problem(samples=40)
    cluster = "10ms,13ms,17ms" if workers == 3 else "10ms,13ms"
    run(engine, what, named(workers)[name], cluster=cluster, out=folder / "run")
    lines = Lines(folder / "run", what)
    lines.file.write_text("".join(json.dumps(line) + "\n" for line in lines.original))
    assert ob.replay(folder / "run", *what).identical
    return lines


def _found_at(found: ob.Replay) -> int:
    assert found.difference is not None, "the altered log was taken for the run's own"
    assert found.versions == found.difference.version - 1
    return found.difference.version


@pytest.mark.parametrize(("engine", "name"), both(GRADIENTS, ["asp", "bsp"]), indirect=["engine"])
def test_two_updates_swapped(engine, name, tmp_path):
    lines = _lines(engine, name, tmp_path)
    where = lines.updates()
    for version in (1, 4, max(where) - 1):

        def swap(log: list[Any], a: int = where[version], b: int = where[version + 1]) -> None:
            log[a], log[b] = log[b], log[a]

        assert _found_at(lines.replayed(swap)) == version


@pytest.mark.parametrize("name", ["asp", "ssp"])
def test_two_updates_swapped_under_each_others_number(engine, name, tmp_path):
    """The order is changed and the versions still count up: only the bits give it away."""
    lines = _lines(engine, name, tmp_path)
    where = lines.updates()
    for version in (1, 4, max(where) - 1):

        def swap(log: list[Any], a: int = where[version], b: int = where[version + 1]) -> None:
            log[a]["parts"], log[b]["parts"] = log[b]["parts"], log[a]["parts"]

        assert _found_at(lines.replayed(swap)) == version


@pytest.mark.parametrize(("engine", "name"), both(GRADIENTS, ["asp", "bsp"]), indirect=["engine"])
def test_one_worker_digit(engine, name, tmp_path):
    """Whoever is named in the log must be the one who computed; also where bits would agree."""
    lines = _lines(engine, name, tmp_path)
    for version, line in lines.updates().items():
        count = len(lines.original[line]["parts"])
        for index in range(count):

            def rename(log: list[Any], line: int = line, index: int = index) -> None:
                part = log[line]["parts"][index]
                part["worker"] = (part["worker"] + 1) % 3

            found = lines.replayed(rename)
            assert found.difference is not None, f"version {version}, part {index}"
            # At once where a gathered part is unknown, else when the books do not add up.
            assert found.difference.version >= version


@pytest.mark.parametrize(
    ("engine", "name"),
    both([*GRADIENTS, "local", "easgd", "downpour"], ["soft", "local", "easgd"]),
    indirect=["engine"],
)
def test_one_lease(engine, name, tmp_path):
    lines = _lines(engine, name, tmp_path)
    for version in (1, 3, max(lines.updates())):
        line = lines.updates()[version]
        for move in (-1, 1):

            def shift(log: list[Any], line: int = line, move: int = move) -> None:
                lease = log[line]["parts"][0]["leases"][0]
                lease[1 if lease[2] + move > 40 or lease[1] + move < 0 else 2] += move

            assert _found_at(lines.replayed(shift)) == version


@pytest.mark.parametrize("key", ["base", "sequence", "incarnation", "hash"])
def test_other_fields_of_an_update(engine, key, tmp_path):
    lines = _lines(engine, "asp", tmp_path)
    for version, line in lines.updates().items():

        def alter(log: list[Any], line: int = line) -> None:
            if key == "hash":
                text = log[line]["hash"]
                log[line]["hash"] = ("0" if text[0] != "0" else "1") + text[1:]
            else:
                log[line]["parts"][0][key] += 1

        assert _found_at(lines.replayed(alter)) == version


def test_a_missing_update_or_pull(engine, tmp_path):
    lines = _lines(engine, "asp", tmp_path)
    line = lines.updates()[5]
    assert _found_at(lines.replayed(lambda log: log.pop(line))) == 5
    next_push, whose = max(lines.updates()), lines.updates()[max(lines.updates())]
    who = lines.original[whose]["parts"][0]["worker"]
    pull = max(
        i
        for i, r in enumerate(lines.original[:whose])
        if r["kind"] == "pull" and r["worker"] == who
    )
    assert _found_at(lines.replayed(lambda log: log.pop(pull))) == next_push


def test_one_byte_of_the_order(engine, tmp_path):
    """A hand-made change of a single byte: the version that a worker pulled."""
    lines = _lines(engine, "asp", tmp_path, workers=2)
    raw = lines.file.read_bytes()
    spot = raw.index(b'"version": 3', raw.index(b'"kind": "pull"')) + len(b'"version": ')
    for digit in (b"2", b"4"):
        lines.file.write_bytes(raw[:spot] + digit + raw[spot + 1 :])
        # What is at version 3 says otherwise, so 4 is the first version not reached, or 3 itself.
        assert _found_at(ob.replay(lines.folder, *lines.what)) in (3, 4)
