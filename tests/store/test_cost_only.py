"""Parameters that do nothing answer whatever a store, an engine and a checkpoint ask of them."""

import inspect

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.config.job import CostJob, CostOnly
from offbeat.data.lease import Lease
from offbeat.discipline.course import as_course
from offbeat.engine.sim.simulation import Simulation
from offbeat.engine.sim.state import meta_of, restore, tensors_of
from offbeat.log.log import Log
from offbeat.log.records import Part
from offbeat.store.cost_only import CostOnlyParameters
from offbeat.store.parameters import Parameters
from offbeat.worker.contribution import Contribution

NOTHING = Contribution(Part(0, 1, 0, 0, [Lease(0, 0, 4)], 4))


def test_nothing_is_applied_and_nothing_is_held() -> None:
    made = CostOnlyParameters(100)
    made.enter(3)
    made.remember(3, 7)
    made.wait(NOTHING)
    made.keep(NOTHING)
    assert made.update([NOTHING, NOTHING]) == 1.0
    made.advance(8, 1, 4)
    made.forget(3)
    assert (made.pull_bytes, made.updater_bytes, made.nbytes, made.nbytes_each()) == (
        100,
        0,
        0,
        [0],
    )
    assert (made.of(3), made.tables, made.buffers, made.updater_state) == ([], [], [], {})
    assert (made.digest(), made.digest_sum(), made.finite()) == ("", 0, True)
    assert not made.averages.entries


def test_there_is_nothing_to_save_and_a_model_stays_as_it_is() -> None:
    made, model = CostOnlyParameters(), nn.Linear(2, 2)
    before = model.weight.detach().clone()
    assert made.state() == made.meta() == {}
    made.load({"parameters/weight": torch.zeros(2, 2)}, {})
    made.begin(model)
    assert made.export(model) is model
    assert torch.equal(model.weight, before)


def test_no_call_of_real_parameters_reaches_for_what_is_not_there() -> None:
    """What is not answered here must do with empty lists, or be about steps, which never come."""
    steps = {"live", "prepare", "norms", "shrink", "multiply", "finish", "as_before", "copy"}
    public = {n for n, f in inspect.getmembers(Parameters, inspect.isfunction) if n[0] != "_"}
    own = {name for name in public if name in vars(CostOnlyParameters)}
    rest = {"give", "refresh", "finite", "export", "unlearnt", "holds", "begin_with", "nbytes_each"}
    assert public == own | steps | rest


@pytest.mark.parametrize(
    "name", ["asp", "bsp", "soft:2", "average:2", "gossip", "easgd:2", "asp:dc"]
)
def test_a_cost_only_run_goes_on_from_a_checkpoint(name: str) -> None:
    def begun() -> Simulation:
        job = CostJob(CostOnly(1000, 64), as_course(name), 3, 4, 1)
        return Simulation(job, ob.Cluster.read("10ms,20ms,35ms"), job.make_store(Log()))

    whole, first, second = begun(), begun(), begun()
    whole.start()
    while whole.step():
        pass
    first.start()
    for _ in range(12):
        first.step()
    restore(second, tensors_of(first), meta_of(first))
    while second.step():
        pass
    assert (second.now, second.store.version) == (whole.now, whole.store.version)
    assert second.store.leases.ledger.summary() == whole.store.leases.ledger.summary()
