"""How contributions meet: in a store, or among the workers, and what the second asks for."""

from offbeat.config.job import Job
from offbeat.config.run_config import VIA
from offbeat.errors import ConfigError
from offbeat.log.log import Log
from offbeat.log.records import Part
from offbeat.model.table import Entry, Flat, Table
from offbeat.transport.allreduce_client import AllreduceClient
from offbeat.worker.contribution import Contribution
from offbeat.worker.send import GradientSender
from offbeat.worker.worker import NumberWorker, Worker

STORE, ALLREDUCE = VIA


def check_allreduce(job: Job, overlap: bool) -> None:
    """Refuse what cannot be done without a store that holds parameters."""
    discipline = job.discipline
    send, gather = discipline.send, discipline.gather
    if job.course.turns:
        raise ConfigError(
            f"via='allreduce' has no store at which the discipline could change, and {job.course} "
            "changes it: use via='store'"
        )
    if not gather.barrier or gather.backup or not send.summable:
        raise ConfigError(
            f"via='allreduce' adds up one contribution of every worker, and {discipline} does not "
            "wait for all of them: use bsp, local, average, bmuf or diloco, or via='store'"
        )
    if not discipline.weigh.constant:
        raise ConfigError(
            "via='allreduce' has no stale contributions to weigh: leave weigh out, or use "
            "via='store'"
        )
    if job.content.cut is not None:
        raise ConfigError(
            "via='allreduce' adds up whole replicas, and a layout splits them: leave one of them "
            "out"
        )
    for what, given in (("overlap", overlap), ("a codec", job.codec is not None)):
        if given:
            raise ConfigError(
                f"{what} is for contributions on their way to a store: leave it out, or use "
                "via='store'"
            )


def rule_table(job: Job) -> Table:
    """The state of the rule that every worker applies, learnt from one step."""
    parameters = job.make_parameters()
    nothing = [Flat(flat.table) for flat in parameters.flats]
    parameters.update([Contribution(Part(0, 1, 0, 0, [], 1), nothing)])
    return Table.of(
        [
            Entry(path, tuple(tensor.shape), tensor.dtype, "shared")
            for updater in parameters.updaters
            for path, tensor in updater.tensors_of_state().items()
        ]
    )


def updater_table(job: Job) -> Table:
    """The local optimiser's state where the workers average it, learnt from one step."""
    if not job.discipline.send.averages_state:
        return Table.of([])
    state = job.make_worker(job.make_store(Log()), 0, 1).sender.learn_state()
    return Table.of([Entry(k, tuple(t.shape), t.dtype, "averaged") for k, t in state.items()])


def listening(worker: Worker, client: AllreduceClient, whole: bool) -> Worker:
    """Let gradients go to the others while they are made, if a batch is computed as a `whole`."""
    assert isinstance(worker, NumberWorker)
    if isinstance(worker.sender, GradientSender) and whole:
        client.listen(worker.sender.stream)
    return worker
