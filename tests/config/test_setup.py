"""A job and its description: what was described can be made again, and differences are named."""

import json
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.config.describe import (
    describe_job,
    describe_optimizer,
    first_difference,
    optimizer_from,
)
from offbeat.config.job import Job, Training
from offbeat.config.run_config import RunConfig
from offbeat.config.setup import make_job
from offbeat.errors import CheckpointError
from offbeat.log.log import Log
from tests.contract.common import asked

DATA = TensorDataset(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
SGD = partial(torch.optim.SGD, lr=0.1)


def config(discipline: str = "bsp", optimizer: Any = SGD, **options: Any) -> RunConfig:
    model = nn.Linear(3, 2)
    return asked(model, DATA, F.cross_entropy, discipline, optimizer, 2, 2, 1, 7, **options)


def job(discipline: str = "bsp", optimizer: Any = SGD, **options: Any) -> Job:
    return make_job(config(discipline, optimizer, **options))


def described(wanted: RunConfig) -> dict[str, Any]:
    return describe_job(wanted, make_job(wanted))


def numbers(made: Job) -> Training:
    return made.content


def test_the_rule_goes_where_it_belongs() -> None:
    clip = ob.Clip(norm=1.0)
    schedule = ob.Schedule(partial(torch.optim.lr_scheduler.StepLR, step_size=1))
    central = numbers(job(clip=clip, schedule=schedule))
    assert central.local_rule is None
    assert central.store_rule.factory is SGD
    assert (central.store_rule.clip, central.store_rule.schedule) == (clip, schedule)
    local = numbers(job("local:2", clip=clip, schedule=schedule))
    assert local.local_rule is not None
    assert local.local_rule.factory is SGD
    assert (local.local_rule.clip, local.local_rule.schedule) == (clip, schedule)
    assert (local.store_rule.clip, local.store_rule.schedule) == (None, None)


def test_accumulation_makes_the_batch_larger() -> None:
    assert job(accumulate=2).batch_size == 4
    assert described(config(accumulate=2))["batch_size"] == 2


def test_the_plain_codec_is_no_codec() -> None:
    assert job(codec="plain").codec is None
    assert job(codec="topk:0.5").codec == ob.codec.TopK(0.5)
    assert job(codec=ob.codec.Int8()).codec == ob.codec.Int8()


def test_shards_by_number_or_by_placement() -> None:
    assert numbers(job(shards=2)).placement == ob.BySize(2)
    assert numbers(job(shards=ob.ByCount(2))).placement == ob.ByCount(2)


def test_a_discipline_keeps_its_short_name_and_the_store_fills_its_numbers_in() -> None:
    made = job("easgd")
    assert str(made.discipline) == "easgd"
    assert made.make_store(Log()).discipline.send == ob.Elastic(10, 0.45)


def test_a_description_is_json_and_equals_itself() -> None:
    for wanted in (config(), config("easgd", codec="int8"), config("asup", None)):
        here = described(wanted)
        saved = json.loads(json.dumps(msgspec.to_builtins(here)))
        assert first_difference(saved, here) is None
        assert ob.parse(saved["discipline"]) == ob.parse(str(wanted.discipline))


@pytest.mark.parametrize(
    "factory",
    [SGD, torch.optim.Adam, partial(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9), foreach=None),
     partial(ob.optim.RMSMomentum, lr=0.2), partial(ob.optim.DelayedNesterov, delay=3)],
)  # fmt: skip
def test_a_described_optimiser_is_made_again(factory: Any) -> None:
    described = json.loads(json.dumps(describe_optimizer(factory)))
    again = optimizer_from(described)
    assert again is not None
    one, other = factory([torch.zeros(1)]), again([torch.zeros(1)])
    assert type(one) is type(other)
    assert one.defaults == other.defaults


@pytest.mark.parametrize(
    "factory",
    [lambda p: torch.optim.SGD(p, lr=0.1), partial(torch.optim.SGD, lr=torch.tensor(0.1)),
     partial(lambda p, lr: torch.optim.SGD(p, lr=lr), lr=0.1)],
)  # fmt: skip
def test_an_optimiser_of_ones_own_must_be_passed_again(factory: Any) -> None:
    described = describe_optimizer(factory)
    json.dumps(described)
    with pytest.raises(CheckpointError, match=r"the run used an optimiser of its own .* pass it"):
        optimizer_from(described)


@pytest.mark.parametrize(
    "name", ["os.system", "torch.optim.lr_scheduler", "torch.optim.Nothing", "builtins.eval", ""]
)
def test_nothing_but_optimisers_is_made_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match="optimiser of its own"):
        optimizer_from({"name": name, "settings": {}})


def test_no_optimiser_is_described_as_none() -> None:
    assert describe_optimizer(None) is None
    assert optimizer_from(None) is None


def test_the_first_difference_in_words() -> None:
    here = described(config())
    assert first_difference(here | {"workers": 3}, here) == "workers is 2 here and 3 in the run"
    other = [*here["model"][:1], "bias (3,) torch.float32"]
    assert first_difference(here | {"model": other}, here) == (
        "the model has bias (2,) torch.float32 where the run has bias (3,) torch.float32"
    )
    assert first_difference(here | {"model": here["model"][:1]}, here) == (
        "the model has bias (2,) torch.float32 where the run has nothing"
    )
    longer = [*here["model"], "extra (1,) torch.float32"]
    assert first_difference(here | {"model": longer}, here) == (
        "the model has nothing where the run has extra (1,) torch.float32"
    )
    adam = describe_optimizer(partial(torch.optim.Adam, betas=(0.8, 0.9)))
    assert first_difference(here | {"optimizer": adam}, here) == (
        "optimizer is torch.optim.SGD(lr=0.1) here and "
        "torch.optim.Adam(betas=[0.8, 0.9]) in the run"
    )
    missing = {key: value for key, value in here.items() if key != "seed"}
    assert first_difference(missing, here) == "seed is 7 here and None in the run"
