"""Something to go on from is in memory, whenever the server dies."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from offbeat.config.job import Job
from offbeat.config.setup import make_job
from offbeat.engine.local import crash_image as image
from offbeat.engine.local.crash_image import CrashImages
from offbeat.log.records import Part
from offbeat.model.table import Flat, Table
from offbeat.store.parameters import Parameters
from offbeat.worker.contribution import Contribution
from tests.contract.common import asked

RULES = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.1),
}


def made(rule: Any, discipline: str = "asp") -> tuple[Job, Parameters]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    job = make_job(asked(nn.Linear(3, 2), data, F.cross_entropy, discipline, rule, 2, 4, 1))
    parameters = job.make_parameters()
    assert parameters is not None
    return job, parameters


def images(job: Job, parameters: Parameters) -> CrashImages:
    found = CrashImages.of(job, parameters, Table.of([]))
    assert found is not None
    return found


def step(parameters: Parameters, scale: float, kept: CrashImages | None = None) -> None:
    if kept is not None:
        kept.before()
    gradient = [Flat(flat.table) for flat in parameters.flats]
    for flat in gradient:
        for span in flat.spans:
            span.fill_(scale)
    parameters.update([Contribution(Part(0, 1, 0, 0, [], 4), gradient)])


@pytest.mark.parametrize("rule", RULES)
def test_a_store_that_reads_its_image_goes_on_as_if_nothing_had_happened(rule: str) -> None:
    job, parameters = made(RULES[rule])
    kept = images(job, parameters)
    for version in range(1, 4):
        step(parameters, 0.1 * version, kept)
        kept.write(version)
    found = kept.read(3)
    assert found is not None
    other = job.make_parameters()
    assert other is not None
    other.load(found, other.meta())
    for one in (parameters, other):
        step(one, 0.7)
    assert other.digest() == parameters.digest()
    kept.close()


def test_what_an_earlier_server_left_in_an_image_is_not_taken_for_this_ones() -> None:
    job, parameters = made(RULES["momentum"])
    kept = images(job, parameters)
    kept.present[:] = 1  # it had made steps; this one has made none
    kept.write(0)
    found = kept.read(0)
    assert found is not None
    assert all(name.startswith("parameters/") for name in found)
    kept.close()


@pytest.mark.parametrize("rule", RULES)
def test_both_of_the_last_two_versions_are_there_and_no_other(rule: str) -> None:
    job, parameters = made(RULES[rule])
    kept = images(job, parameters)
    hashes = {}
    for version in range(1, 5):
        step(parameters, 0.1, kept)
        kept.write(version)
        hashes[version] = parameters.digest()
    assert kept.read(2) is None
    for version in (3, 4):
        assert digest(job, kept.read(version)) == hashes[version]
    kept.close()


def digest(job: Job, found: dict[str, torch.Tensor] | None) -> str:
    """Of a store that goes on with what was found."""
    other = job.make_parameters()
    assert other is not None
    assert found is not None
    other.load(found, other.meta())
    return other.digest()


def killed(*arguments: Any) -> None:
    raise KeyboardInterrupt


class Died(NamedTuple):
    """A store that was killed on its way from version 2 to version 3, and what it was at 2."""

    job: Job
    parameters: Parameters
    kept: CrashImages
    hash: str


@pytest.fixture(params=["before", "copying", "kept", "updating", "writing"])
def died(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Died]:
    job, parameters = made(RULES["momentum"])
    kept = images(job, parameters)
    for version in (1, 2):
        step(parameters, 0.1, kept)
        kept.write(version)
    hashed = parameters.digest()
    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        if request.param == "copying":
            patched.setattr(Flat, "copy_", killed)
        if request.param == "writing":
            patched.setattr(torch, "_foreach_copy_", killed)
        go_on(parameters, kept, request.param)
        raise AssertionError("it lives")
    yield Died(job, parameters, kept, hashed)
    kept.close()


def go_on(parameters: Parameters, kept: CrashImages, until: str) -> None:
    """The way from version 2 to version 3."""
    if until == "before":
        killed()
    kept.keep()  # in spare time
    if until == "kept":
        killed()
    kept.before()
    for flat in parameters.flats:
        flat.spans[0][:2] += 1.0  # a part of it is another already
    if until == "updating":
        killed()
    step(parameters, 0.1)
    kept.write(3)


def test_wherever_a_server_dies_the_last_version_is_found(died: Died) -> None:
    assert died.kept.read(3) is None
    assert digest(died.job, died.kept.read(2)) == died.hash


def test_it_is_found_again_if_the_next_server_dies_as_it_begins(died: Died) -> None:
    died.kept.begin(2, died.kept.read(2))
    for flat in died.parameters.flats:
        flat.zero_()  # it loads an older checkpoint first
    assert digest(died.job, died.kept.read(2)) == died.hash


def test_nor_does_the_next_server_lose_it_while_it_copies_what_was_found(
    died: Died, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "fill", killed)
    with suppress(KeyboardInterrupt):
        died.kept.begin(2, died.kept.read(2))
    assert digest(died.job, died.kept.read(2)) == died.hash


def test_a_server_that_begins_anew_finds_no_copy_of_another_past(died: Died) -> None:
    died.kept.begin(0, None)
    assert died.kept.read(2) is None
    died.kept.write(2)  # the same number, of what has become something else
    died.kept.keep()
    now = died.parameters.digest()
    died.kept.before()
    assert digest(died.job, died.kept.read(2)) == now


def test_a_rule_that_learns_something_new_has_no_image() -> None:
    job, parameters = made(RULES["sgd"])
    kept = images(job, parameters)
    step(parameters, 0.1, kept)
    parameters.updaters[0].separate()  # what the rule keeps of each tensor is its own
    weight = next(iter(parameters.updaters[0].tensors.values()))
    parameters.updaters[0].rule.state[weight]["surprise"] = torch.ones(1)
    kept.write(1)
    assert kept.read(1) is None
    kept.close()


def test_a_large_model_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    job, parameters = made(RULES["sgd"])
    monkeypatch.setattr(image, "LARGEST", 8)
    assert CrashImages.of(job, parameters, Table.of([])) is None


def test_the_buffers_that_workers_have_sent_are_in_the_image_of_their_version() -> None:
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    rule = RULES["momentum"]
    job = make_job(asked(model, data, F.cross_entropy, "asp", rule, 2, 4, 1))
    parameters = job.make_parameters()
    assert parameters is not None
    kept = images(job, parameters)
    means = {}
    for version in range(1, 5):
        kept.before()
        sent = {n: b + version for n, b in model.named_buffers()}
        nothing = [Flat(flat.table) for flat in parameters.flats]
        worker = version % 3 // 2  # 0, 1, 0, 0
        part = Part(worker, 1, version, 0, [], 4)
        parameters.update([Contribution(part, nothing, statistics=sent)])
        kept.write(version)
        means[version] = {n: t.clone() for n, t in parameters.averages.mean().items()}
    for version in (3, 4):
        found = kept.read(version)
        assert found is not None
        other = job.make_parameters()
        assert other is not None
        other.load(found, {**other.meta(), "averages": {"live": [0, 1], "lost": []}})
        assert other.averages.seen == {0: 4 * version - 4, 1: 4}
        for name, value in other.averages.mean().items():
            assert torch.equal(value, means[version][name])
    kept.close()
