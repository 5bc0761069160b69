"""Wrong values, whatever their kind: a ConfigError that names the remedy, before any process."""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.cli import main
from offbeat.errors import ConfigError

X, Y = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2


def train(**changes: Any) -> ob.Run:
    settings: dict[str, Any] = {
        "model": nn.Linear(3, 2), "data": TensorDataset(X, Y), "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.1), "workers": 2, "batch_size": 4,
    }  # fmt: skip
    return ob.train(**settings | changes)


def join(**options: Any) -> Any:
    return ob.join(**options)


def own(staleness: int) -> float:
    return 1 / (1 + staleness)


SIM: dict[str, Any] = {"engine": "sim"}
ALONE: dict[str, Any] = {"workers": None}

BAD: list[tuple[Callable[[], Any], str]] = [
    # the five choices
    (lambda: ob.Discipline(send="gradient"), "send must be one of Gradient, .* as in send=ob"),  # type: ignore[arg-type]
    (lambda: ob.Discipline(gather=3), r"gather must be one of All, Count, Pair"),  # type: ignore[arg-type]
    (lambda: ob.Discipline(weigh=own), r"weigh=ob.Inverse\(\), not .*own.*\(a function cannot be"),  # type: ignore[arg-type]
    (lambda: ob.Discipline(weigh=ob.Inverse), r"is a class: write weigh=ob.Inverse\(\)"),  # type: ignore[arg-type]
    (lambda: ob.Discipline(apply="sgd"), r"as in apply=ob.Rule\('sgd'\), not 'sgd'"),  # type: ignore[arg-type]
    (lambda: ob.Discipline(wait="inf"), "wait must be a whole number"),  # type: ignore[arg-type]
    (lambda: ob.ASP(weigh=own), "a function cannot be written to a log"),
    (lambda: ob.SSP(3, weigh="inverse"), "as in weigh=ob.Inverse.*not 'inverse'"),
    (lambda: ob.EASGD(alpha="x"), "alpha must lie between 0 and 1, not 'x'"),
    (lambda: ob.EASGD(alpha=math.nan), "alpha must lie between 0 and 1, not nan"),
    (lambda: ob.Downpour(lr=None), "lr must lie between 0 and inf, not None"),
    (lambda: ob.Downpour(lr=math.inf), "lr must lie between 0 and inf, not inf"),
    (lambda: ob.BMUF(nesterov="no"), "nesterov must be True or False, not 'no'"),
    (lambda: ob.Average(state=3), "state must be one of keep, average, reset, not 3"),
    (lambda: ob.Rule(3), "rule must be one of sgd"),  # type: ignore[arg-type]
    (lambda: ob.Polynomial("a"), "a must lie between 0 and inf, not 'a'"),  # type: ignore[arg-type]
    (lambda: ob.parse("bsp:backup"), "bsp takes backup, redo; write backup=1"),
    (lambda: ob.parse("bsp:2"), "bsp takes backup, redo; write backup=2"),
    # optimisers
    *[
        (partial(train, optimizer=torch.optim.LBFGS, **how), "LBFGS .*use an optimiser whose step")
        for how in ({}, SIM, {"discipline": "local:2"})
    ],
    (partial(train, optimizer=partial(torch.optim.SGD, lr=-1)), "cannot be made .*rate: -1"),
    (partial(train, optimizer=partial(torch.optim.SGD, rate=1)), "pass a factory such as"),
    (partial(train, optimizer=lambda _: 3), "optimizer made int, which is no optimiser"),
    # names
    (partial(train, emulat="20ms"), r"unknown option 'emulat' \(did you mean 'emulate'\?\)"),
    (partial(train, batchsize=3), r"did you mean 'batch_size'\?"),
    (partial(train, checkpont_every=3), r"did you mean 'checkpoint_every'\?"),
    (partial(train, metrc=None), r"did you mean 'metric'\?"),
    (partial(join, patienc=3), r"join has no 'patienc' \(did you mean 'patience'\?\)"),
    (partial(join, emulat="20ms"), r"join has no 'emulat' \(did you mean 'emulate'\?\)"),
    (partial(join, emulate="20ms"), "join has no 'emulate': write offbeat run --emulate"),
    (partial(join, epochs=3), r"join has no 'epochs': write run.batches\(..., epochs=...\)"),
    # times
    (partial(train, patience=math.inf), "patience must be seconds, above 0 and at most 1,000,000"),
    (partial(train, patience="3s"), "not '3s': write patience=30"),
    (partial(train, patience=1e9), "at most 1,000,000, not 1000000000.0"),
    (partial(train, emulate="1e300s"), r"must be at most 1e\+09 seconds"),
    (partial(train, emulate=3), "emulate must be one time for each worker, not 3"),
    (partial(train, cluster="1e15s,1ms", **ALONE), r"must be at most 1e\+09 seconds"),
    (partial(train, cluster="trace:/dev/zero", **ALONE), "/dev/zero: it is no regular file"),
    (partial(train, cluster=3, **ALONE), "a cluster is an ob.Cluster or text such as"),
    # numbers, switches and the rest
    (partial(train, workers=2.5), "workers must be a whole number of at least 1, not 2.5"),
    (partial(train, workers=2.5, **SIM), "workers must be a whole number of at least 1, not 2.5"),
    (partial(train, threads=1.5), "threads must be a whole number"),
    (partial(train, evaluate_every=1.5), "evaluate_every must be a whole number"),
    (partial(train, checkpoint_every="a"), "checkpoint_every must be a whole number"),
    (partial(train, hash_every="a"), "hash_every must be a whole number"),
    (partial(train, overlap="x"), "overlap must be True or False"),
    (partial(train, shuffle="x"), "shuffle must be True or False"),
    (partial(train, prefetch="x"), "prefetch must be True or False"),
    (partial(train, resume="x"), "resume must be True or False"),
    (partial(train, codec=3), "codec cannot be 3: write text such as 'topk:0.01'"),
    (partial(train, schedule=3), "schedule cannot be 3: write ob.Schedule"),
    (partial(train, clip=3), "clip cannot be 3: write ob.Clip"),
    (partial(train, policies=3), "policies cannot be 3"),
    (partial(train, listeners=3), "listeners cannot be 3: pass a list of ob.Listener"),
    (partial(train, out=3), "out cannot be 3: name a folder"),
    (partial(train, start=3), "start cannot be 3"),
    (partial(train, via=3), "via must be one of store, allreduce, not 3"),
    (partial(train, metric=3), r"3 is no metric: pass a function of outputs and targets"),
    (partial(train, metric=own), "the metric own needs a test set"),
    (lambda: ob.Metric("f1", own, on="batch"), "on 'model', 'outputs' or 'loss', not 'batch'"),  # type: ignore[arg-type]
    (partial(train, metric=ob.Metric("f1", own)), "the metric f1 needs a test set"),  # type: ignore[arg-type]
    (lambda: ob.Metric("", own), "a metric has a name such as 'f1'"),  # type: ignore[arg-type]
    (lambda: ob.Metric("f1", 3), "is computed by a function"),  # type: ignore[arg-type]
    (lambda: ob.Metric("f1", own, "yes"), "higher_is_better is True or False"),  # type: ignore[arg-type]
    (lambda: ob.estimate("20ms", "bsp", steps=1.5), "steps must be a whole number"),  # type: ignore[arg-type]
    (lambda: ob.estimate("20ms", "bsp", seed="x"), "seed must be a whole number"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "says"), BAD, ids=[says[:40] for _, says in BAD])
def test_a_wrong_value_is_refused_before_any_process(
    wrong: Callable[[], Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(ConfigError, match=says):
        wrong()


@pytest.mark.parametrize("command", ["simulate", "compare --devices 1,2"])
def test_a_negative_rate_on_the_command_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--lr", "-1"]) == 2
    assert "a learning rate must be" in capsys.readouterr().err
