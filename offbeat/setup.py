"""From what a user passes to a checked job, and to its description in a run folder."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import nn
from torch.utils.data import Dataset

from offbeat import codec as codecs
from offbeat import optim
from offbeat.choices import InPlace, at_least
from offbeat.codec import Codec
from offbeat.data import Collate, Reader
from offbeat.discipline import Discipline, as_discipline
from offbeat.errors import CheckpointError, ConfigError
from offbeat.given import check_kinds, check_names
from offbeat.job import NUMERICS, Job, Numbers
from offbeat.layout.cut import Cut
from offbeat.layout.settle import Around, settle
from offbeat.layout.tree import batch_size, head, tensors
from offbeat.layout.value import Layout
from offbeat.length import check_length
from offbeat.replica import last, objective, turns
from offbeat.replica.objective import BatchLoss, Loss
from offbeat.replica.soundness import check_hooks, check_mode, check_model, check_sparse
from offbeat.store.checkpoint import RunFolder
from offbeat.store.constraint import Constraint, constraints_of, refuse_rows
from offbeat.store.schedule import Schedule
from offbeat.store.table import (
    ByCount,
    BySize,
    ByWeight,
    Placement,
    Staged,
    count,
    fingerprint,
    total_bytes,
)
from offbeat.store.updater import Clip, Group, Recipe, groups_of, rule_factory
from offbeat.task import OptimizerFactory
from offbeat.trial import try_batch

_HASHED = 128 << 10  # bytes to hash for each update
_RAREST = 25  # versions at most between two hashes
# What descriptions mean that were written before there was a choice.
ABSENT = {"drop_last": False, "numerics": 1}


class Options(TypedDict, total=False):
    """What `train` and `replay` take beyond the essentials."""

    codec: Codec | str | None  # how small contributions are made: "topk:0.01", "int8", ...
    schedule: Schedule | None  # learning rate over epochs or versions
    clip: Clip | None  # gradient clipping
    constrain: Constraint | str | Sequence[Constraint | str] | None  # after each update
    groups: Callable[[nn.Module], Sequence[dict[str, Any]]] | None  # parameter groups
    policies: Mapping[str, str]  # buffer name patterns to shared, averaged or local
    shards: int | Placement  # of the store
    accumulate: int  # parts in which a batch is computed
    collate: Collate | None
    shuffle: bool
    drop_last: bool  # leave out the samples at the end of an epoch that make no whole batch
    nonfinite: Literal["stop", "skip"]
    hash_every: int | None  # versions between two hashes in the log; None: more for large models
    layout: Layout | str | None  # how each replica is split over processes: "pp=2"


@dataclass(frozen=True)
class Essentials:
    """What is trained and how, before it is checked."""

    model: nn.Module
    data: Dataset[Any]
    loss: Loss | None  # None where a script computes it
    discipline: Discipline | str
    optimizer: OptimizerFactory | None
    workers: int
    batch_size: int
    epochs: int
    seed: int = 0
    numerics: int = NUMERICS


def make_job(wanted: Essentials, options: Mapping[str, Any]) -> Job:
    """Check everything that can be checked before a run, and put it together."""
    check_names(options, Options.__annotations__)
    check_kinds(options)
    if not isinstance(wanted.model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(wanted.model).__name__}")
    at_least("workers", wanted.workers, 1)
    at_least("batch_size", wanted.batch_size, 1)
    at_least("epochs", wanted.epochs, 1)
    at_least("seed", wanted.seed, 0)
    discipline = as_discipline(wanted.discipline)
    filled = discipline.for_workers(wanted.workers)
    model = wanted.model
    check_model(model)
    if wanted.loss is not None:
        check_mode(model)
    if options.get("layout") is not None:
        check_hooks(model)
    accumulate = at_least("accumulate", options.get("accumulate", 1), 1)
    collate, shuffle = options.get("collate"), options.get("shuffle", True)
    reader = Reader(wanted.data, wanted.seed, shuffle, collate)
    cut = _cut(wanted, options, model, reader)
    placement = _placement(options.get("shards", 1))
    job = Job(
        Numbers(
            model,
            reader,
            wanted.loss or _unknown,
            *_rules(filled, wanted.optimizer, model, options),
            placement if cut is None else Staged(cut.groups(), count(placement)),
            options.get("policies", {}),
            accumulate,
            cut,
        ),
        discipline,
        wanted.workers,
        wanted.batch_size * accumulate,
        wanted.epochs,
        wanted.seed,
        _codec(options.get("codec")),
        options.get("nonfinite", "stop"),
        _hash_every(options.get("hash_every"), model),
        options.get("drop_last", False),
        wanted.numerics,
    )
    _check_constraints(job)
    job.check()
    check_length(job)
    last.check(job, wanted.loss)
    return job


def try_step(job: Job) -> None:
    """Try one step of a worker, and refuse what would come out otherwise than in PyTorch."""
    assert isinstance(job.content, Numbers)
    numbers = job.content
    size = min(job.batch_size // numbers.accumulate, job.samples)
    found = try_batch(numbers.model, numbers.reader, numbers.loss, size)
    if numbers.cut is not None and found.reads:
        raise ConfigError(
            "the loss looks at the model's parameters itself, and with a layout they are in other "
            "processes: use weight_decay= of the optimiser, or leave layout out"
        )
    if found.sparse and numbers.local_rule is None:
        rule = numbers.store_rule
        one = [nn.Parameter(torch.zeros(1)) for _ in rule.groups]
        groups = [{**group, "params": [p]} for (_, group), p in zip(rule.groups, one, strict=True)]
        check_sparse(found.sparse, rule.factory(groups))


def _cut(
    wanted: Essentials, options: Mapping[str, Any], model: nn.Module, reader: Reader
) -> Cut | None:
    layout = options.get("layout")
    if layout is None:
        return None
    clip = options.get("clip")
    around = Around(
        as_discipline(wanted.discipline),
        wanted.batch_size,
        options.get("accumulate", 1),
        isinstance(wanted.loss, BatchLoss),
        options.get("codec") is not None,
        clip is not None and clip.norm is not None,
        options.get("nonfinite") == "skip",
        wanted.optimizer,
    )
    inputs = partial(_inputs, reader, wanted.batch_size)
    if wanted.loss is None:
        inputs = partial(_guessed, reader, wanted.batch_size, model)
    cut = settle(layout, model, around, inputs)
    if cut.shards is not None:
        sample = inputs()
        turns.check(cut, model, head(sample, -(-batch_size(sample) // cut.layout.pieces)))
    return cut


def _inputs(reader: Reader, count: int) -> Any:
    batch = objective.first_batch(reader, count)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigError("a layout needs batches of (inputs, target): pass collate=")
    return batch[0]


def _guessed(reader: Reader, count: int, model: nn.Module) -> Any:
    """What a script may well pass to its model: the first of a pair; None if that does not fit."""
    batch = objective.first_batch(reader, count)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return None
    try:
        try_batch(model, reader, _any_sum, min(count, len(reader)))
    except ConfigError:
        return None
    return batch[0]


def _any_sum(output: Any, _: Any) -> torch.Tensor:
    """A loss of whatever the output is."""
    taught = [tensor for tensor in tensors(output) if tensor.requires_grad]
    return torch.stack([tensor.sum() for tensor in taught]).sum()


def _unknown(*_: Any) -> torch.Tensor:
    raise ConfigError("only the script knows the loss of this run: use offbeat run")


def _rules(
    discipline: Discipline,
    optimizer: OptimizerFactory | None,
    model: nn.Module,
    options: Mapping[str, Any],
) -> tuple[Recipe, Recipe | None]:
    """The store's rule, and the worker's own where it makes local steps.

    Schedule, clipping and groups belong to the user's optimiser, wherever that works.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer is made by offbeat over its own tensors: pass a factory such as "
            f"partial(torch.optim.{type(optimizer).__name__}, lr=...), not an optimiser"
        )
    if discipline.brings_rule and optimizer is not None:
        raise ConfigError(
            f"{discipline} brings its own rule, so optimizer= would be ignored: leave it out, "
            "or use asp to apply your optimiser to every gradient"
        )
    groups = groups_of(model, options.get("groups"))
    limits = constraints_of(options.get("constrain"), model)
    if limits and (discipline.pairs or isinstance(discipline.send, InPlace)):
        raise ConfigError(
            f"a constraint holds after each update of the store, and under {discipline} workers "
            "change parameters by themselves: use asp or ssp, or leave constrain out"
        )
    mine: dict[str, Any] = {"schedule": options.get("schedule"), "clip": options.get("clip")}
    mine["constraints"] = limits
    if not discipline.steps_locally:
        return Recipe(rule_factory(discipline, optimizer), groups, **mine), None
    if optimizer is None:
        raise ConfigError(
            f"{discipline} makes local steps: pass optimizer=partial(torch.optim.SGD, lr=0.1)"
        )
    plain: tuple[Group, ...] = ((tuple(name for names, _ in groups for name in names), {}),)
    if isinstance(discipline.send, InPlace):  # the store has nothing to apply
        return Recipe(partial(torch.optim.SGD, lr=0.0), plain), Recipe(optimizer, groups, **mine)
    store = Recipe(rule_factory(discipline, None), plain, constraints=limits)
    return store, Recipe(optimizer, groups, **mine)


def _check_constraints(job: Job) -> None:
    assert isinstance(job.content, Numbers)
    cut, local = job.content.cut, job.content.local_rule
    if cut is not None and cut.shards is not None and local is not None:
        refuse_rows(local.constraints, str(job.discipline), str(cut.layout))


def _hash_every(value: int | None, model: nn.Module) -> int:
    """A hash reads every parameter, so a large model is hashed less often than it is updated."""
    if value is not None:
        return value
    return min(_RAREST, 1 + total_bytes(model.parameters()) // _HASHED)


def _placement(value: Any) -> Placement:
    if isinstance(value, BySize | ByCount | ByWeight):
        return value
    return BySize(at_least("shards", value, 1))


def _codec(value: Codec | str | None) -> Codec | None:
    codec = codecs.parse(value) if isinstance(value, str) else value
    return None if isinstance(codec, codecs.Plain) else codec


# ---------------------------------------------------------------- the description in a run folder


def numerics_of(out: str | Path | None, resume: bool) -> int:
    """How numbers are made: as ever, in a run that goes on."""
    folder = RunFolder(out) if resume and out is not None else None
    if folder is None or not folder.config_file.exists():
        return NUMERICS
    return int(folder.config().get("numerics", ABSENT["numerics"]))


def describe(job: Job, optimizer: OptimizerFactory | None) -> dict[str, Any]:
    """A job as JSON: enough to make it again, given model, data and loss."""
    assert isinstance(job.content, Numbers)
    numbers = job.content
    return {
        "discipline": str(job.discipline),
        "workers": job.workers,
        "batch_size": job.batch_size // numbers.accumulate,
        "accumulate": numbers.accumulate,
        "epochs": job.epochs,
        "seed": job.seed,
        "codec": None if job.codec is None else str(job.codec),
        "nonfinite": job.nonfinite,
        "hash_every": job.hash_every,
        "numerics": job.numerics,
        "shuffle": numbers.reader.shuffle,
        "drop_last": job.drop_last,
        "shards": count(numbers.placement),
        "optimizer": describe_optimizer(optimizer),
        "schedule": _describe_schedule(numbers),
        "clip": _clip_text(numbers),
        "constrain": [str(limit) for limit in numbers.store_rule.constraints] or None,
        "policies": dict(numbers.policies),
        "layout": None if numbers.cut is None else str(numbers.cut.layout),
        "model": fingerprint(numbers.model),
        "samples": len(numbers.reader),
    }


def _users_rule(numbers: Numbers) -> Recipe:
    """The recipe with the user's own schedule and clipping, wherever it works."""
    return numbers.local_rule or numbers.store_rule


def _describe_schedule(numbers: Numbers) -> str | None:
    schedule = _users_rule(numbers).schedule
    if schedule is None:
        return None
    inner, settings = _taken_apart(schedule.factory)
    inside = ", ".join(f"{key}={value}" for key, value in settings.items())
    return f"{getattr(inner, '__name__', 'custom')}({inside}) per {schedule.per}"


def _clip_text(numbers: Numbers) -> str | None:
    clip = _users_rule(numbers).clip
    return None if clip is None else f"norm={clip.norm}, value={clip.value}"


def _taken_apart(factory: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A factory and its settings; only a partial shows any."""
    if isinstance(factory, partial):
        return factory.func, dict(factory.keywords)
    return factory, {}


def describe_optimizer(factory: OptimizerFactory | None) -> dict[str, Any] | None:
    """A factory by name and settings where it has them, else only what it looks like."""
    if factory is None:
        return None
    inner, settings = _taken_apart(factory)
    plain = all(isinstance(v, int | float | str | bool | tuple | None) for v in settings.values())
    name = getattr(inner, "__name__", "")
    home = inspect.getmodule(inner)
    known = home is not None and home.__name__.startswith(("torch.optim", "offbeat.optim"))
    if known and plain and hasattr(torch.optim if _torch(home) else optim, name):
        prefix = "torch.optim" if _torch(home) else "offbeat.optim"
        return {"name": f"{prefix}.{name}", "settings": settings}
    return {"name": name or "custom", "settings": None}


def _torch(module: Any) -> bool:
    return bool(module.__name__.startswith("torch."))


def optimizer_from(described: Mapping[str, Any] | None) -> OptimizerFactory | None:
    """Make a described optimiser again; only PyTorch's own and offbeat's are made by name."""
    if described is None:
        return None
    prefix, _, name = str(described["name"]).rpartition(".")
    homes = {"torch.optim": torch.optim, "offbeat.optim": optim}
    kind = getattr(homes.get(prefix), name, None)
    right = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if not right or described["settings"] is None or kind is None:
        raise CheckpointError(
            f"the run used an optimiser of its own ({described['name']}): pass it as optimizer="
        )
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in described["settings"].items()}
    return partial(kind, **settings)


def first_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Where two descriptions differ first, in words; the model's tensors one by one."""
    for key, value in here.items():
        other = saved.get(key, ABSENT.get(key))
        if key == "model" and value != other:
            ours, theirs = list(value), list(other or [])
            for index in range(max(len(ours), len(theirs))):
                mine = ours[index] if index < len(ours) else "nothing"
                that = theirs[index] if index < len(theirs) else "nothing"
                if mine != that:
                    return f"the model has {mine} where the run has {that}"
        if key == "optimizer":
            value, other = _settings_text(value), _settings_text(other)
        if key == "metric":
            value, other = (None if one is None else one["name"] for one in (value, other))
        if value != other:
            return f"{key} is {value} here and {other} in the run"
    return None


def _settings_text(described: Mapping[str, Any] | None) -> str:
    if described is None:
        return "none"
    settings = described["settings"] or {}
    inside = ", ".join(f"{k}={list(v) if isinstance(v, tuple) else v}" for k, v in settings.items())
    return f"{described['name']}({inside})"
