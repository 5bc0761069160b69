"""The one value: every front door has its names and kinds, and a run is what keywords ask for."""

import inspect
from dataclasses import fields
from functools import partial
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.config.describe import Recorded, describe
from offbeat.config.keywords import ELSEWHERE
from offbeat.config.run_config import (
    LOCAL,
    NAMES,
    RAY,
    Alone,
    Local,
    OnRay,
    Options,
    RunConfig,
    Simulated,
    configure,
)
from offbeat.config.setup import make_job
from offbeat.errors import ConfigError
from offbeat.join import Defaults, Member
from offbeat.train import TrainOptions

KINDS = get_type_hints(OnRay) | get_type_hints(RunConfig)
# What is written in another way than it is kept: text for a cluster or for times, None for "as
# usual", a DataLoader for the options that it says, a function
# for data.
WRITTEN = (
    *("engine", "cluster", "workers", "emulate", "patience"),
    *("data", "batch_size", "shuffle", "drop_last"),
)
DATA = TensorDataset(torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
SGD = partial(torch.optim.SGD, lr=0.1)


def wanted(**more: Any) -> RunConfig:
    what = {"model": nn.Linear(3, 2), "data": DATA, "loss": F.cross_entropy, "optimizer": SGD}
    return configure(what | {"batch_size": 2} | more)


def named(function: Any) -> dict[str, Any]:
    """The keywords that a function spells out, and their kinds."""
    left_out = ("self", "options", "return")
    return {name: kind for name, kind in get_type_hints(function).items() if name not in left_out}


def test_train_takes_every_option_and_no_other() -> None:
    only_scripts = {"token"}  # whose processes may be on several hosts
    assert {*named(ob.train), *get_type_hints(TrainOptions)} == set(NAMES) - only_scripts
    assert not {*named(ob.train)} & {*get_type_hints(TrainOptions)}


def test_join_and_its_loop_take_a_part_of_them() -> None:
    loop = {*named(Member.optimizer)} - {"rule"} | {*named(Member.batches)} - {"dataset"}
    assert {*get_type_hints(Defaults), *loop} <= set(NAMES)
    assert not {*get_type_hints(Defaults)} & loop
    assert set(ELSEWHERE) <= set(NAMES)
    assert not set(ELSEWHERE) & {*get_type_hints(Defaults)}


def test_what_replay_takes_is_what_train_takes() -> None:
    assert {*get_type_hints(Options)} < {*get_type_hints(TrainOptions)}


@pytest.mark.parametrize(
    "door", [named(ob.train), named(TrainOptions), named(Defaults), named(Member.batches)]
)
def test_options_are_of_the_same_kind_at_every_door(door: dict[str, Any]) -> None:
    for name in {*door} & {*KINDS} - {*WRITTEN, "loss"}:
        assert door[name] == KINDS[name], name


def test_defaults_are_the_same_at_every_door() -> None:
    usual = {f.name: f.default for f in fields(RunConfig)}
    for door in (ob.train, Member.batches, Member.optimizer):
        for name, parameter in inspect.signature(door).parameters.items():
            if parameter.default is not parameter.empty and name in usual and name not in WRITTEN:
                assert parameter.default == usual[name], name


def test_what_a_folder_says_are_options_of_a_run() -> None:
    assert {*Recorded.__struct_fields__} <= {*NAMES, "numerics"}


def test_the_engine_is_local_unless_a_cluster_says_otherwise() -> None:
    assert wanted().engine == Local()
    assert wanted().workers == 4
    assert wanted(workers=2, emulate="20ms", patience=None).engine == Local(emulate=(0.02, 0.02))
    simulated = wanted(cluster="20ms,80ms")
    assert isinstance(simulated.engine, Simulated)
    assert simulated.workers == 2
    assert wanted(engine="sim", workers=3).engine == Simulated(ob.Cluster.equal(3))
    assert wanted(engine=Alone(2), workers=1).engine == Alone(2)


@pytest.mark.parametrize("name", LOCAL)
def test_what_only_real_workers_have_is_refused_in_virtual_time(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is for engine='local'"):
        wanted(engine="sim", **{name: "1"})


@pytest.mark.parametrize("name", RAY)
def test_what_is_for_ray_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is for engine='ray'"):
        wanted(**{name: 1})


def test_ray_has_options_of_its_own_and_those_of_processes() -> None:
    engine = wanted(engine="ray", workers=8, begin=2, address="auto", patience=3).engine
    assert engine == OnRay(begin=2, address="auto", patience=3)
    assert engine.resources == {"CPU": 1}
    assert OnRay(worker_resources={"GPU": 0.5}).resources == {"CPU": 1, "GPU": 0.5}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"begin": 5}, "begin=5 workers, and there may be 4 at most"),
        ({"begin": 0}, "begin must be a whole number"),
        ({"placement": "left"}, "placement"),
        ({"worker_resources": {"GPU": "all"}}, "worker_resources says how much of what"),
        ({"worker_resources": 4}, "worker_resources cannot be 4"),
        ({"address": 6379}, "address cannot be 6379"),
        ({"wait": "long"}, "wait cannot be 'long'"),
        ({"tls": "yes"}, "tls cannot be 'yes'"),
    ],
)
def test_what_ray_cannot_be_told(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wanted(engine="ray", **more)


def test_nobody_says_how_numbers_are_made() -> None:
    for name in ("numerics", "reading"):
        with pytest.raises(ConfigError, match=f"unknown option '{name}'"):
            wanted(**{name: 1})


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ({}, {"threads", "overlap", "via", "emulate", "metric"}),
        ({"engine": "sim"}, {"cluster", "metric"}),
        ({"engine": Alone(1), "workers": 1, "loss": None}, {"threads"}),
        ({"engine": "sim", "loss": None}, {"cluster"}),
    ],
)
def test_a_folder_says_where_it_ran_and_what_it_came_from(
    more: dict[str, Any], keys: set[str]
) -> None:
    config = wanted(origin={"loop": "train.py"}, **more)
    told = describe(config, make_job(config))
    always = {"discipline", "workers", "batch_size", "accumulate", "epochs", "seed", "codec"}
    always |= {"pull_codec"}
    always |= {"nonfinite", "hash_every", "numerics", "shuffle", "order", "drop_last", "shards"}
    always |= {"shares"}
    always |= {"optimizer", "schedule", "clip", "constrain", "policies", "layout", "model"}
    assert {*told} == always | keys | {"samples", "engine", "origin", "device"}
    assert told["origin"] == {"loop": "train.py"}
