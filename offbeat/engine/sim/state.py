"""A simulation from its beginning to its end, and what it writes down to go on where it was."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from torch import Tensor

from offbeat.config.run_config import Simulated
from offbeat.data.lease import Lease
from offbeat.engine.bring_up import ReadyRun
from offbeat.engine.result import Run
from offbeat.engine.session import Session
from offbeat.engine.signals import stopped_by
from offbeat.engine.sim.network_simulation import simulation
from offbeat.engine.sim.simulation import Simulation
from offbeat.log.records import Part
from offbeat.model.table import Flat, fill, named, under
from offbeat.worker.contribution import Contribution


def tensors_of(sim: Simulation) -> dict[str, Tensor]:
    """Every tensor of store, workers and contributions that wait for others."""
    store = sim.store
    found = {f"store/{k}": t for k, t in store.parameters.state().items()}
    found |= {f"pulled/{k}": t for k, t in store.parameters.pulls.state().items()}
    for number, worker in sim.workers.items():
        found |= {f"worker/{number}/{k}": t for k, t in worker.tensors().items()}
    for index, one in enumerate(store.gathered):
        prefix = f"gathered/{index}"
        if one.payload is not None:
            found |= named(f"{prefix}/payload/", one.unpacked())
        found |= {f"{prefix}/statistics/{k}": t for k, t in one.statistics.items()}
        found |= {f"{prefix}/updater/{k}": t for k, t in one.updater.items()}
    return found


def meta_of(sim: Simulation) -> dict[str, Any]:
    """Everything else, as JSON."""
    store = sim.store
    return {
        "sim": sim.meta(),
        "store": store.state(),
        "parameters": store.parameters.meta(),
        "gathered": [{"part": one.part, "absent": sorted(one.absent)} for one in store.gathered],
    }


def restore(sim: Simulation, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Put a fresh simulation into the state that was written down."""
    store = sim.store
    store.load(meta["store"])
    store.parameters.load(under("store/", tensors), meta["parameters"])
    store.parameters.pulls.load(under("pulled/", tensors), store.parameters.flats)
    sim.load_meta(meta["sim"])
    for number, saved in meta["sim"]["workers"].items():
        worker = sim.job.make_worker_here(store, int(number), saved["incarnation"])
        worker.load(under(f"worker/{number}/", tensors), saved)
        sim.workers[int(number)] = worker
    sim.catch_up_waiting()
    store.gathered = [
        _contribution(sim, under(f"gathered/{index}/", tensors), saved)
        for index, saved in enumerate(meta["gathered"])
    ]


def _contribution(
    sim: Simulation, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> Contribution:
    part = msgspec.convert(saved["part"], Part)
    part.leases = [Lease(*msgspec.to_builtins(lease)) for lease in part.leases]
    payload = [Flat(table) for table in sim.store.parameters.tables]
    fill(payload, under("payload/", tensors))
    return Contribution(
        part,
        payload or None,
        absent=frozenset(saved["absent"]),
        statistics=under("statistics/", tensors),
        updater=under("updater/", tensors),
    )


def drive(sim: Simulation, session: Session, ended: Callable[[], bool] = lambda: False) -> None:
    """Step by step to the end, or until Ctrl-C or SIGTERM, or until it has `ended` before."""

    def snapshot() -> tuple[Any, Any]:
        return tensors_of(sim), meta_of(sim)

    with session.interruptible():
        while sim.step():
            session.between(sim.now, snapshot)
            if session.stopping is not None or ended():
                if session.folder is not None:
                    session.save(snapshot)
                if session.stopping is not None:
                    raise stopped_by(session.stopping)
                return


def simulate(
    run: ReadyRun,
    ended: Callable[[], bool] = lambda: False,
    after: Callable[[Simulation], None] = lambda _: None,
) -> Run:
    """A whole run in virtual time; what a script does `after` the last step belongs to it."""
    assert isinstance(run.config.engine, Simulated)
    with run.session() as session:
        store = session.store
        sim = simulation(run.job, run.config.engine.cluster, store)
        if run.kept.saved is None:
            sim.start()
        else:
            with run.kept.restoring():
                restore(sim, *run.kept.saved)
                session.restore(run.kept.saved[1])
        with run.job.content.devices.single.entered():
            drive(sim, session, ended)
            after(sim)
        session.last_test(sim.now)
        held = max((worker.nbytes for worker in sim.workers.values()), default=0)
        return run.finish(store, "sim", held)
