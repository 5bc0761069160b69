"""Several split replicas under every discipline: exact ledgers, replays to the bit, staleness."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offbeat as ob
from offbeat.log.records import Pulled, Updated
from tests.contract.common import NAMES, Problem, assert_same_bits, check_run, named, problem, run
from tests.contract.real import AtStep, Gate, OpenWhen

SPLIT = "pp=2,microbatches=2,split=3"


def net() -> nn.Module:
    """Batch norm and dropout on both sides of the cut."""
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3),
        nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 2),
    )  # fmt: skip


def parts_of(records: list[Any], worker: int | None = None) -> list[Any]:
    found = [part for r in records if isinstance(r, Updated) for part in r.parts]
    return [part for part in found if worker is None or part.worker == worker]


# ---------------------------------------------------------------- every discipline


@pytest.mark.parametrize("name", NAMES)
def test_two_replicas_of_two_stages(local_only, name, tmp_path):
    what, out = problem(net, samples=60), tmp_path / "run"
    got = run(
        local_only, what, named(2)[name], workers=2, layout=SPLIT, out=out, hash_every=1,
        batch_size=8, test=what.data,
    )  # fmt: skip
    records = check_run(out, what)
    assert got.history.tests[-1].version == got.summary().updates
    joined = {part.worker for part in parts_of(records)}
    assert joined <= {0, 1}
    for part in parts_of(records):
        assert part.loss is not None


def flows(discipline: ob.Discipline) -> bool:
    filled = discipline.for_workers(2)
    return filled.send.each_gradient and not filled.drops


FLOWING = [name for name in NAMES if flows(named(2)[name])]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, ("stash", "2bw")[i % 2]) for i, name in enumerate(FLOWING)]
    + [("bsp", "2bw"), ("ssp", "stash")],
)
def test_two_replicas_with_several_batches_under_way(local_only, name, schedule, tmp_path):
    what, out = problem(net, samples=60), tmp_path / "run"
    layout = f"pp=2,schedule={schedule},microbatches=2,split=3"
    run(
        local_only,
        what,
        named(2)[name],
        workers=2,
        layout=layout,
        out=out,
        hash_every=1,
        batch_size=8,
    )
    records = check_run(out, what)
    worker = next(p.worker for p in parts_of(records) if p.sequence == 2)
    assert any(part.staleness >= 1 for part in parts_of(records, worker))


@pytest.mark.parametrize("name", ["downpour", "local", "easgd", "diloco", "bsp-backup"])
def test_asynchronous_schedules_refuse_what_they_cannot_do(name):
    what = problem(net)
    with pytest.raises(ob.ConfigError, match="schedule=1f1b"):
        run(
            "local", what, named(2)[name], workers=2,
            layout="pp=2,schedule=2bw,microbatches=2,split=3",
        )  # fmt: skip


# ---------------------------------------------------------------- unequal replicas


class Held(AtStep):
    """The last stage of worker 1 waits at a gate before its second batch."""

    def __init__(self, loss: Any, gate: Gate):
        super().__init__(loss, {})
        self.gate = gate

    def __call__(self, *batch: Any) -> Any:
        if Path("/proc/self/comm").read_text().strip() == "offbeat 1.1":
            self.steps += 1
            if self.steps == 3:  # the first microbatch of it
                self.gate.wait()
        return self.loss(*batch)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_replica_three_times_slower(local_only, schedule, tmp_path):
    """Emulated, and once held up until the other has gone on by more than chance could explain."""
    what, out, gate = problem(net, samples=192), tmp_path / "run", Gate()
    layout = f"pp=2,schedule={schedule},microbatches=2,split=3"

    def far(record: Any) -> bool:
        return isinstance(record, Updated) and record.version >= 9

    run(
        local_only, what._replace(loss=Held(what.loss, gate)), "asp", workers=2, layout=layout,
        emulate=[0.004, 0.012], out=out, hash_every=1, batch_size=8,
        listeners=[OpenWhen(gate, far)],
    )  # fmt: skip
    records = check_run(out, what)
    count = Counter(part.worker for part in parts_of(records))
    assert min(count[0], count[1]) > 0
    assert max(part.staleness for part in parts_of(records, 1)) >= 6
    for record in records:
        if isinstance(record, Updated):
            for part in record.parts:
                assert part.staleness == record.version - 1 - part.base


# ---------------------------------------------------------------- the simulator


@pytest.mark.parametrize("name", ["bsp", "asp-dc", "downpour", "diloco", "easgd"])
def test_a_simulated_run_is_repeated_and_replayed_to_the_bit(sim_only, name, tmp_path):
    what, out = problem(net, samples=60), tmp_path / "run"
    how: dict[str, Any] = {
        "layout": SPLIT,
        "cluster": "10ms,30ms",
        "hash_every": 1,
        "batch_size": 8,
    }
    one = run(sim_only, what, named(2)[name], out=out, **how)
    other = run(sim_only, what, named(2)[name], **how)
    assert one.parameter_hash == other.parameter_hash
    assert_same_bits(one.model, other.model)
    check_run(out, what)


def test_a_simulated_run_with_a_layout_is_resumed_to_the_same_bits(sim_only, tmp_path):
    what, out = problem(net, samples=60), tmp_path / "run"
    how: dict[str, Any] = {
        "layout": SPLIT,
        "cluster": "10ms,30ms",
        "hash_every": 1,
        "batch_size": 8,
    }
    whole = run(sim_only, what, "asp", **how)

    class Enough(Exception):
        pass

    class After(ob.Listener):
        def see(self, record: Any) -> None:
            if isinstance(record, Updated) and record.version == 9:
                raise Enough

    with pytest.raises(Enough):
        run(sim_only, what, "asp", out=out, checkpoint_every=4, listeners=[After()], **how)
    again = run(sim_only, what, "asp", out=out, checkpoint_every=4, resume=True, **how)
    assert again.parameter_hash == whole.parameter_hash
    check_run(out, what)


# ---------------------------------------------------------------- several batches under way


def alone(schedule: str, pp: int, pieces: int, out: Any, samples: int = 48) -> list[Any]:
    """One worker's records; one epoch, so that no batch waits for the last of another."""
    what = deep(samples)
    layout = f"pp={pp},schedule={schedule},microbatches={pieces},split=count"
    run("local", what, "asp", workers=1, layout=layout, out=out, epochs=1, hash_every=1)
    return check_run(out, what, epochs=1)


def deep(samples: int) -> Problem:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
        )

    return problem(make, samples=samples)


@pytest.mark.parametrize(
    ("schedule", "pp", "pieces", "under_way"),
    [
        ("stash", 2, 1, 2),
        ("stash", 3, 1, 3),
        ("stash", 4, 1, 4),
        ("stash", 4, 2, 3),
        ("2bw", 2, 2, 2),
        ("2bw", 4, 4, 2),
    ],
)
def test_staleness_is_exactly_one_less_than_what_is_under_way(
    local_only, schedule, pp, pieces, under_way, tmp_path
):
    layout = ob.Layout(pp=pp, schedule=schedule, microbatches=pieces)
    assert layout.under_way == under_way
    parts = parts_of(alone(schedule, pp, pieces, tmp_path / "run"))
    assert [part.staleness for part in parts] == [
        min(index, under_way - 1) for index in range(len(parts))
    ]


def test_2bw_never_has_more_than_two_versions_in_use(local_only, tmp_path):
    records = alone("2bw", 3, 4, tmp_path / "run")
    pulls = {r.version: index for index, r in enumerate(records) if isinstance(r, Pulled)}
    for record in records:
        if isinstance(record, Updated):
            (part,) = record.parts
            # Between the pull of its base and its arrival, at most one other version was pulled.
            later = [v for v in pulls if part.base < v < record.version]
            assert len(later) <= 1
    assert max(part.staleness for part in parts_of(records)) == 1
