"""A simulation step by step, and what it writes down to go on exactly where it was."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from torch import Tensor

from offbeat.contribution import Contribution
from offbeat.engine.sim import Simulation
from offbeat.lease import Lease
from offbeat.log import Part
from offbeat.session import Session
from offbeat.signals import stopped_by
from offbeat.store.table import Flat, fill, named, under


def tensors_of(sim: Simulation) -> dict[str, Tensor]:
    """Every tensor of store, workers and contributions that wait for others."""
    store = sim.store
    found: dict[str, Tensor] = {}
    if store.parameters is not None:
        found |= {f"store/{k}": t for k, t in store.parameters.state().items()}
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
        "parameters": store.parameters.meta() if store.parameters else {},
        "gathered": [{"part": one.part, "absent": sorted(one.absent)} for one in store.gathered],
    }


def restore(sim: Simulation, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Put a fresh simulation into the state that was written down."""
    store = sim.store
    store.load(meta["store"])
    if store.parameters is not None:
        store.parameters.load(under("store/", tensors), meta["parameters"])
    sim.load_meta(meta["sim"])
    for number, saved in meta["sim"]["workers"].items():
        worker = sim.job.make_worker(store, int(number), saved["incarnation"])
        worker.load(under(f"worker/{number}/", tensors), saved)
        sim.workers[int(number)] = worker
    store.gathered = [
        _contribution(sim, under(f"gathered/{index}/", tensors), saved)
        for index, saved in enumerate(meta["gathered"])
    ]


def _contribution(
    sim: Simulation, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> Contribution:
    part = msgspec.convert(saved["part"], Part)
    part.leases = [Lease(*msgspec.to_builtins(lease)) for lease in part.leases]
    payload = None
    if sim.store.parameters is not None:
        payload = [Flat(table) for table in sim.store.parameters.tables]
        fill(payload, under("payload/", tensors))
    return Contribution(
        part,
        payload,
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
