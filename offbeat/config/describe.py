"""A run in its folder: what run.json says of it, read again, and where two descriptions differ."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import torch

from offbeat import optim
from offbeat.config.job import NUMERICS, Job, Training
from offbeat.config.run_config import RunConfig
from offbeat.config.task import OptimizerFactory, metrics_of
from offbeat.data.order import Reading
from offbeat.errors import CheckpointError
from offbeat.folder.checkpoint import RunFolder
from offbeat.model.table import count, fingerprint
from offbeat.rules.constraint import constraints_of
from offbeat.rules.updater import Recipe

# What descriptions mean that were written before there was a choice.
ABSENT = {"drop_last": False, "numerics": 1}


# ---------------------------------------------------------------- to run.json


def describe(config: RunConfig, job: Job) -> dict[str, Any]:
    """All that run.json says of a run."""
    told = describe_job(config, job) | config.engine.described(job)
    told["origin"] = dict(config.origin)
    told["device"] = str(job.content.devices)  # for whoever reads it: a run may go on elsewhere
    if config.loss is not None:  # of a script only its own code knows a score
        metrics = [metric.described() for metric in metrics_of(config.metric)]
        told["metric"] = metrics[0] if metrics else None
        if metrics[1:]:
            told["metrics"] = metrics[1:]
    return told


def describe_job(config: RunConfig, job: Job) -> dict[str, Any]:
    """A job as JSON: enough to make it again, given model, data and loss, wherever it runs."""
    numbers = job.content
    return {
        "discipline": str(job.course),
        "workers": job.workers,
        "batch_size": job.batch_size // numbers.accumulate,
        "accumulate": numbers.accumulate,
        "epochs": job.epochs,
        "seed": job.seed,
        "codec": None if job.codec is None else str(job.codec),
        "pull_codec": None if job.pull_codec is None else str(job.pull_codec),
        "nonfinite": job.nonfinite,
        "hash_every": job.hash_every,
        "numerics": job.numerics,
        "shuffle": numbers.reader.shuffle,
        "order": _order_text(numbers.reader.reading),
        "drop_last": job.drop_last,
        "shares": job.shares.told or None,
        "shards": count(numbers.placement),
        "optimizer": describe_optimizer(config.optimizer),
        "schedule": _describe_schedule(numbers),
        "clip": _clip_text(numbers),
        "constrain": [str(limit) for limit in numbers.store_rule.constraints] or None,
        "policies": dict(numbers.policies),
        "layout": None if numbers.cut is None else str(numbers.cut.layout),
        "model": fingerprint(numbers.model),
        "samples": len(numbers.reader),
    }


def sketch(config: RunConfig) -> dict[str, Any]:
    """The part of a script's description that all its workers have to agree on."""
    constraints = constraints_of(config.constrain, config.model)
    return {
        "model": fingerprint(config.model),
        "batch_size": config.batch_size,
        "epochs": config.epochs,
        "samples": len(config.reader()),
        "shuffle": config.shuffle,
        "order": _order_text(config.reading),
        "drop_last": config.drop_last,
        "optimizer": describe_optimizer(config.optimizer),
        "constrain": [str(one) for one in constraints] or None,
    }


def _order_text(reading: Reading) -> str | None:
    return None if reading.order is None else str(reading.order)


def _users_rule(numbers: Training) -> Recipe:
    """The recipe with the user's own schedule and clipping, wherever it works."""
    return numbers.local_rule or numbers.store_rule


def _describe_schedule(numbers: Training) -> str | None:
    schedule = _users_rule(numbers).schedule
    if schedule is None:
        return None
    inner, settings = _taken_apart(schedule.factory)
    inside = ", ".join(f"{key}={value}" for key, value in settings.items())
    return f"{getattr(inner, '__name__', 'custom')}({inside}) per {schedule.per}"


def _clip_text(numbers: Training) -> str | None:
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


# ---------------------------------------------------------------- from run.json

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]


class Recorded(msgspec.Struct):
    """What a replay needs of run.json."""

    discipline: str
    workers: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    batch_size: Count
    accumulate: Count
    epochs: Count
    seed: Annotated[int, msgspec.Meta(ge=0)]
    nonfinite: Literal["stop", "skip"]
    hash_every: Count
    shuffle: bool
    codec: str | None = None
    pull_codec: str | None = None
    optimizer: dict[str, Any] | None = None
    shards: Count = 1
    policies: dict[str, str] = {}
    layout: str | None = None
    threads: Threads = 1
    overlap: bool = False
    drop_last: bool = False
    shares: str | None = None
    numerics: Annotated[int, msgspec.Meta(ge=1)] = 1
    constrain: Any = None


def settings_of(place: RunFolder) -> Recorded:
    """The settings of the run in `place`, or CheckpointError."""
    try:
        return msgspec.convert(place.config(), Recorded)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{place.config_file} is not of a run, or is damaged: {error}"
        ) from None


def recorded_optimizer(config: Recorded, place: RunFolder) -> OptimizerFactory | None:
    """The optimiser that run.json describes, tried on a tensor of its own."""
    described = config.optimizer
    if described is None:
        return None
    named = isinstance(described.get("name"), str)
    if not named or not isinstance(described.get("settings"), dict | None):
        raise CheckpointError(f"{place.config_file} describes no optimiser, or is damaged")
    described.setdefault("settings", None)
    factory = optimizer_from(described)
    assert factory is not None
    try:
        factory([torch.zeros(1, requires_grad=True)])
    except Exception as error:
        raise CheckpointError(
            f"{place.config_file} describes an optimiser that cannot be made: {error}"
        ) from error
    return factory


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


def numerics_of(config: RunConfig) -> int:
    """How numbers are made: as ever, in a run that goes on."""
    if config.numerics is not None:
        return config.numerics
    folder = RunFolder(config.out) if config.resume and config.out is not None else None
    if folder is None or not folder.config_file.exists():
        return NUMERICS
    return int(folder.config().get("numerics", ABSENT["numerics"]))


# ---------------------------------------------------------------- beside each other


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
