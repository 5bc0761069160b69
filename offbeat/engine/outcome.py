"""What a local run came to, added up from what its processes said at the end."""

from offbeat.engine.crew import Crew
from offbeat.engine.orders import Done
from offbeat.errors import RunError
from offbeat.job import Job
from offbeat.kept import Kept, undisturbed
from offbeat.report.split import layout_figures
from offbeat.report.summary import Tally
from offbeat.run import Run


def check_settled(done: Done, job: Job) -> None:
    """Refuse to call a run finished if not every sample was applied, or given up by design."""
    kinds = ("applied", "dropped", "skipped")
    counted = sum(epoch[kind] for epoch in done.ledger for kind in kinds)
    if counted != job.samples * job.epochs:
        raise RunError(
            f"the run ended at version {done.version} with samples that nobody has trained on; "
            "its last checkpoint is intact: resume it, or look for what has ended its workers"
        )


def write_run(crew: Crew, kept: Kept, tally: Tally, done: Done) -> Run:
    """What the run came to, in its folder too if it has one; a Ctrl-C waits for that."""
    return undisturbed(lambda: _written(crew, kept, tally, done))


def _written(crew: Crew, kept: Kept, tally: Tally, done: Done) -> Run:
    words = done.words.values()
    memory = {"store": sum(done.memory)}
    if len(done.memory) > 1:
        memory["store_largest"] = max(done.memory)
    for name, key in (("worker", "nbytes"), ("worker_peak", "peak")):
        memory[name] = int(max((word.get(key, 0.0) for word in words), default=0.0))
    kinds = ("input_queue", "reading_hidden", "exchange_hidden")
    told = {kind: [word[kind] for word in words if kind in word] for kind in kinds}
    overlap = {kind: sum(values) / len(values) for kind, values in told.items() if values}
    name = str(crew.job.discipline)
    summary = tally.summary(name, "local", done.ledger, memory, done.hash, overlap)
    summary.emulated = list(crew.local.emulate or ())
    summary.layout = layout_figures(crew.content.cut, crew.workers, list(words))
    if summary.layout is not None and crew.local.emulate:  # the prediction is of real speeds
        summary.layout.predicted_seconds = summary.layout.predicted_idle_share = None
    model = crew.tested_into(crew.content.model)
    return kept.write(model, tally.history, summary)
