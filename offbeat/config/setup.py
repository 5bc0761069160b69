"""From what a user asks for to a job: all that can be checked before a run is checked here."""

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from offbeat import codec as codecs
from offbeat.codec import Codec
from offbeat.config.checks import at_least
from offbeat.config.describe import numerics_of
from offbeat.config.devices import Devices, asked_for, devices_of
from offbeat.config.job import Job, Training
from offbeat.config.run_config import Hosts, Local, RunConfig
from offbeat.config.trial import apart, check_single_samples, try_batch
from offbeat.data.loader import makes_batches
from offbeat.data.reader import Reader
from offbeat.data.shares import as_shares
from offbeat.discipline.course import Course, as_course
from offbeat.discipline.discipline import Discipline
from offbeat.errors import ConfigError
from offbeat.model import objective
from offbeat.model.checks import check_copies, check_hooks, check_mode, check_model, check_sparse
from offbeat.model.device import CPU
from offbeat.model.objective import BatchLoss
from offbeat.model.table import ByCount, BySize, ByWeight, Placement, Staged, count, total_bytes
from offbeat.rules.constraint import constraints_of, refuse_rows
from offbeat.rules.updater import Group, Recipe, groups_of, rule_factory
from offbeat.split import one_process as turns
from offbeat.split.plan.cut import Cut
from offbeat.split.plan.resolve import RunAround, resolve
from offbeat.split.tree import batch_size, head, tensors

_HASHED = 128 << 10  # bytes to hash for each update
_MOST = 1_000_000  # workers, before memory for all of them is asked for
_RAREST = 25  # versions at most between two hashes


def make_job(config: RunConfig) -> Job:
    """Check everything that can be checked before a run, and put it together."""
    if config.workers > _MOST:
        raise ConfigError(f"workers must be at most {_MOST:,}, not {config.workers:,}")
    course = as_course(config.discipline)
    filled = course.for_workers(config.workers).first
    model, accumulate = config.model, config.accumulate
    check_model(model)
    if config.loss is not None:
        check_mode(model)
    if config.layout is not None:
        check_hooks(model)
        check_copies(model)
    reader = config.reader()
    reader.check()
    shares = as_shares(config.shares)
    for stage in course.stages:
        shares.check(stage, config.workers)
    if shares.uneven and makes_batches(reader):
        raise ConfigError(
            f"shares={shares} cuts batches of other sizes than the DataLoader makes: leave shares "
            "out, or have it made with batch_size= and a sampler"
        )
    cut = cut_of(config, reader)
    placement = _placement(config.shards)
    job = Job(
        Training(
            model,
            reader,
            config.loss or _unknown,
            *_rules(filled, config),
            placement if cut is None else Staged(cut.groups(), count(placement)),
            config.policies,
            accumulate,
            cut,
            _devices(config, cut),
        ),
        course,
        config.workers,
        config.batch_size * accumulate,
        config.epochs,
        config.seed,
        _codec(config.codec),
        _pull_codec(config, course.first),
        config.nonfinite,
        _hash_every(config.hash_every, model),
        config.drop_last,
        numerics_of(config),
        shares,
    )
    _check_constraints(job)
    _check_devices(job)
    job.check()
    _check_length(job)
    check_single_samples(job, config.loss)
    return job


def try_step(job: Job, here: bool = True) -> None:
    """Try one step of a worker, and refuse what would come out otherwise than in PyTorch.

    Workers that compute on other machines have their devices there, and not `here`.
    """
    numbers = job.content
    size = min(job.batch_size // numbers.accumulate, job.samples)
    device = numbers.devices.of(0) if here else CPU
    found = try_batch(numbers.model, numbers.reader, numbers.loss, size, device)
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


def cut_of(config: RunConfig, reader: Reader) -> Cut | None:
    """How each replica is split, if it is."""
    if config.layout is None:
        return None
    clip, size, model = config.clip, config.batch_size, config.model
    around = RunAround(
        as_course(config.discipline),
        size,
        config.accumulate,
        isinstance(config.loss, BatchLoss),
        config.codec is not None,
        clip is not None and clip.norm is not None,
        config.nonfinite == "skip",
        config.optimizer,
        apart,
    )
    inputs = partial(_inputs, reader, size)
    if config.loss is None:
        inputs = partial(_guessed, reader, size, model)
    cut = resolve(config.layout, model, around, inputs)
    if cut.shards is not None:
        sample = inputs()
        piece = head(sample, -(-batch_size(sample) // cut.layout.pieces))
        apart(partial(turns.check, cut, model, piece), type(None))
    return cut


def _devices(config: RunConfig, cut: Cut | None) -> Devices:
    elsewhere = isinstance(config.engine, Hosts)
    each = 1 if cut is None else cut.layout.pp * cut.layout.tp
    return (asked_for if elsewhere else devices_of)(config.device, config.workers, each)


def _check_devices(job: Job) -> None:
    """Refuse what computes in the memory of the store, which is the CPU's."""
    cut, devices = job.content.cut, job.content.devices
    if not devices.kinds:
        return
    if job.discipline.send.in_place:
        raise ConfigError(
            f"under {job.discipline} workers write the store's own memory, which is on the CPU: "
            "use asp, or leave device out"
        )
    if cut is not None and cut.layout.asynchronous:
        raise ConfigError(
            f"schedule={cut.layout.schedule} computes on parameters where they come in, which is "
            "on the CPU: use schedule=1f1b, or leave device out"
        )


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


def _rules(discipline: Discipline, config: RunConfig) -> tuple[Recipe, Recipe | None]:
    """The store's rule, and the worker's own where it makes local steps.

    Schedule, clipping and groups belong to the user's optimiser, wherever that works.
    """
    optimizer: Any = config.optimizer
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
    groups = groups_of(config.model, config.groups)
    limits = constraints_of(config.constrain, config.model)
    if limits and (discipline.pairs or discipline.send.in_place):
        raise ConfigError(
            f"a constraint holds after each update of the store, and under {discipline} workers "
            "change parameters by themselves: use asp or ssp, or leave constrain out"
        )
    mine: dict[str, Any] = {"schedule": config.schedule, "clip": config.clip}
    mine["constraints"] = limits
    if not discipline.steps_locally:
        rule = rule_factory(discipline, optimizer)
        return Recipe(rule, groups, **mine, users=not discipline.brings_rule), None
    if optimizer is None:
        raise ConfigError(
            f"{discipline} makes local steps: pass optimizer=partial(torch.optim.SGD, lr=0.1)"
        )
    plain: tuple[Group, ...] = ((tuple(name for names, _ in groups for name in names), {}),)
    if discipline.send.in_place:  # the store has nothing to apply
        nothing = Recipe(partial(torch.optim.SGD, lr=0.0), plain, users=False)
        return nothing, Recipe(optimizer, groups, **mine)
    store = Recipe(rule_factory(discipline, None), plain, constraints=limits, users=False)
    return store, Recipe(optimizer, groups, **mine)


def _check_constraints(job: Job) -> None:
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


def _pull_codec(config: RunConfig, discipline: Discipline) -> Codec | None:
    """How pulls are packed, where that can be: a worker then has not quite what the store has."""
    codec = _codec(config.pull_codec)
    if codec is None:
        return None
    why = ""
    if discipline.pairs or discipline.send.in_place:
        why = f"under {discipline} nobody pulls from the store"
    elif discipline.weigh.elementwise:
        why = f"{discipline} compares with the parameters that were pulled"
    elif count(_placement(config.shards)) > 1:
        why = "with several shards nobody has all of a pull"
    elif isinstance(config.engine, Local) and config.engine.via != "store":
        why = "workers that add up among themselves pull once"
    if why:
        raise ConfigError(f"{why}: leave pull_codec out")
    return codec


def _codec(value: Codec | str | None) -> Codec | None:
    codec = codecs.parse(value) if isinstance(value, str) else value
    return None if isinstance(codec, codecs.Plain) else codec


def _check_length(job: Job) -> None:
    """Say before the run if a schedule of fixed length will not last, or will not be over."""
    recipe = job.content.local_rule or job.content.store_rule  # the user's own
    if recipe.schedule is None:
        return
    own = dict(job.content.model.named_parameters())
    groups = [{**told, "params": [own[name] for name in names]} for names, told in recipe.groups]
    rule = recipe.factory(groups)
    length = getattr(recipe.schedule.factory(rule), "total_steps", None)
    per = recipe.schedule.per
    expected = {
        "epoch": job.epochs,
        "version": expected_updates(job.course, job.workers, _batches(job)),
        "progress": _batches(job),
    }[per]
    if isinstance(length, int) and not expected <= length <= expected * 5 / 4 + job.workers:
        about = f"about {expected}" if per == "version" else expected
        units = {"epoch": "epochs", "version": "versions", "progress": "batches"}[per]
        what = "its last rate holds from there on" if length < expected else "it will not be over"
        warnings.warn(
            f"the schedule has {length} steps and this run {about} {units}, so {what}: pass "
            f"total_steps={expected} to last as long as the run",
            stacklevel=2,
        )


def _batches(job: Job) -> int:
    return job.leases().progress(job.epochs * job.samples)


def expected_updates(course: Course, workers: int, batches: int) -> int:
    """About how many updates a run makes of so many batches, if nobody is lost."""
    return course.for_workers(workers).versions(batches, workers)
