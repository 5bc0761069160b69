"""What a run of real processes came to, in figures and in its folder."""

from offbeat.config.job import Job
from offbeat.engine.local.launcher_messages import RunDone
from offbeat.engine.local.roles import Roles
from offbeat.engine.result import Run
from offbeat.engine.run_session import RunSession, undisturbed
from offbeat.errors import RunError
from offbeat.report.split import layout_figures
from offbeat.report.summary import Tally


def check_settled(done: RunDone, job: Job) -> None:
    """Refuse to call a run finished if not every sample was applied, or given up by design."""
    kinds = ("applied", "dropped", "skipped")
    counted = sum(epoch[kind] for epoch in done.ledger for kind in kinds)
    if counted != job.samples * job.epochs:
        raise RunError(
            f"the run ended at version {done.version} with samples that nobody has trained on; "
            "its last checkpoint is intact: resume it, or look for what has ended its workers"
        )


def write_run(roles: Roles, kept: RunSession, tally: Tally, done: RunDone) -> Run:
    """What the run came to, in its folder too if it has one; a Ctrl-C waits for that."""
    return undisturbed(lambda: _written(roles, kept, tally, done))


def _written(roles: Roles, kept: RunSession, tally: Tally, done: RunDone) -> Run:
    words = done.words.values()
    memory = {"store": sum(done.memory)}
    if len(done.memory) > 1:
        memory["store_largest"] = max(done.memory)
    if done.backup:
        memory["backup"] = done.backup
    for name, key in (("worker", "nbytes"), ("worker_peak", "peak")):
        memory[name] = int(max((word.get(key, 0.0) for word in words), default=0.0))
    kinds = ("input_queue", "reading_hidden", "output_queue", "exchange_hidden")
    told = {kind: [word[kind] for word in words if kind in word] for kind in kinds}
    overlap = {kind: sum(values) / len(values) for kind, values in told.items() if values}
    name = str(roles.job.course)
    summary = tally.summary(name, roles.local.name, done.ledger, memory, done.hash, overlap)
    if any(mine.link for mine in summary.per_worker):  # beside what the store has counted
        summary.wire_bytes += int(sum(word.get("wire", 0.0) for word in words))
    summary.turned_away = done.refused
    summary.emulated = list(roles.local.emulate or ())
    summary.shares = roles.job.shares.told
    summary.layout = layout_figures(roles.content.cut, roles.workers, list(words))
    if summary.layout is not None and roles.local.emulate:  # the prediction is of real speeds
        summary.layout.predicted_seconds = summary.layout.predicted_idle_share = None
    model = roles.tested_into(roles.content.model)
    return kept.write(model, tally.history, summary)
