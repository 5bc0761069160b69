"""Whether a schedule of fixed length fits a run, told before it begins."""

import warnings

from offbeat.config.job import Job


def check_length(job: Job) -> None:
    """Say before the run if a schedule of fixed length will not last, or will not be over."""
    recipe = job.content.local_rule or job.content.store_rule  # the user's own
    if recipe.schedule is None:
        return
    own = dict(job.content.model.named_parameters())
    groups = [{**told, "params": [own[name] for name in names]} for names, told in recipe.groups]
    rule = recipe.factory(groups)
    length = getattr(recipe.schedule.factory(rule), "total_steps", None)
    per = recipe.schedule.per
    expected = job.epochs if per == "epoch" else _versions(job)
    if isinstance(length, int) and not expected <= length <= expected * 5 / 4 + job.workers:
        about = expected if per == "epoch" else f"about {expected}"
        what = "its last rate holds from there on" if length < expected else "it will not be over"
        warnings.warn(
            f"the schedule has {length} steps and this run {about} {per}s, so {what}: pass "
            f"total_steps={expected} to last as long as the run",
            stacklevel=2,
        )


def _versions(job: Job) -> int:
    """About how many updates a run makes, if nobody is lost."""
    filled = job.discipline.for_workers(job.workers)
    together, steps = filled.gather.together(job.workers), filled.send.local_steps
    rest = 0 if job.drop_last else job.batch_size - 1
    leases = job.epochs * ((job.samples + rest) // job.batch_size)
    return -(-leases // (together * steps))
