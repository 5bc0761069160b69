"""Workers who add up among themselves arrive at the bits that a store arrives at, whatever dies."""

import signal
import socket
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.engine.hosts.members import Members
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.records import Evaluated, Joined, Lost, Updated
from offbeat.transport import allreduce_client as meeting
from offbeat.transport.pieces import pieces_of
from offbeat.transport.tcp_group import TcpGroup
from tests.contract.common import MOMENTUM, Records, Stop, StopAfter, check_run, problem, run
from tests.contract.real import QUICK, AtStep, Gate, Once, WakeLost, level
from tests.contract.test_real_faults import KillServer

ADAM = partial(torch.optim.Adam, lr=0.01)
NAMES = ["bsp", "local:2", "average:2", "bmuf:2,nesterov=yes", "diloco:2", "local:3,state=reset"]
SAMPLES = 30  # with batches of 4 the last one of an epoch is short
VIA: dict[str, Any] = {"via": "allreduce"}


class Odd(nn.Module):
    """Batch-norm statistics, chance, and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.last, self.idle = nn.Linear(4, 2), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.used(inputs))


def _with(what: Any, acts: dict[tuple[int, int], Any], workers: int) -> Any:
    return level("local", what._replace(loss=AtStep(what.loss, acts)), workers)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("workers", "rule"), [(1, ADAM), (2, MOMENTUM), (3, ADAM), (5, MOMENTUM)])
def test_a_store_arrives_at_the_same_bits(real, name, workers, rule, tmp_path):
    """A replay applies the same contributions in a store, and compares every version."""
    what, out = problem(Odd, samples=SAMPLES), tmp_path / "run"
    seen = Records()
    got = run(
        real, what, name, workers=workers, optimizer=rule, out=out, test=what.data,
        listeners=[seen], **VIA,
    )  # fmt: skip
    check_run(out, what)
    last = list(seen.of(Updated))[-1]
    assert got.parameter_hash == last.hash
    assert len(last.parts) <= workers
    assert [record.version for record in seen.of(Evaluated)][-1] == last.version
    assert not any(isinstance(record, Lost) for record in seen.all)


@pytest.mark.parametrize("name", ["bsp", "average:2"])
@pytest.mark.parametrize("per", ["epoch", "version"])
def test_settings_make_no_difference(real, name, per, tmp_path):
    what = problem(samples=26)
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    code: dict[str, Any] = {
        "clip": ob.Clip(norm=0.4),
        "schedule": ob.Schedule(halve, per),
        "groups": lambda model: [{"params": list(model.parameters()), "lr": 0.3}],
    }
    out = tmp_path / "run"
    run(real, what, name, workers=3, out=out, epochs=3, shards=2, accumulate=2, **code, **VIA)
    check_run(out, what, epochs=3, **code)


def test_a_large_model_goes_out_in_pieces_while_backward_runs(real, tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "pieces_of", partial(pieces_of, size=1 << 20))

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 500), nn.Linear(500, 500), nn.Linear(500, 2))

    what, out = problem(wide, samples=20), tmp_path / "run"
    run(real, what, "bsp", workers=3, out=out, hash_every=1, **VIA)
    check_run(out, what)


def test_what_is_not_finite_is_left_out(real, tmp_path):
    """One contribution is skipped, and the mean is that of the others, as a store has it."""
    what, out = problem(samples=SAMPLES), tmp_path / "run"
    inputs, _ = what.data.tensors
    inputs[5] = float("nan")
    got = run(real, what, "bsp", workers=3, out=out, nonfinite="skip", **VIA)
    assert ob.replay(out, *what).check().compared == got.summary().updates
    assert all(0 < epoch["skipped"] <= 4 for epoch in got.summary().ledger)
    assert all(torch.isfinite(t).all() for t in got.model.state_dict().values())


@pytest.mark.parametrize("name", ["bsp", "average:2", "diloco:2"])
@pytest.mark.parametrize(("first", "second"), [("store", "allreduce"), ("allreduce", "store")])
def test_one_goes_on_where_the_other_stopped(real, name, first, second, tmp_path):
    what, folder = problem(Odd, samples=SAMPLES), tmp_path / "run"
    options: dict[str, Any] = {
        "workers": 2, "optimizer": ADAM, "checkpoint_every": 1, "out": folder,
    }  # fmt: skip
    with suppress(Stop):
        run(real, what, name, via=first, listeners=[StopAfter(12)], **options)
    saved = RunFolder(folder).load()
    assert saved is not None
    assert any(path.startswith("store/rule/") for path in saved[0]) or name == "average:2"
    run(real, what, name, via=second, resume=True, **options)
    check_run(folder, what)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("name", ["bsp", "average:2", "diloco:2"])
@pytest.mark.parametrize("victim", [0, 2])
def test_one_that_dies_is_left_out(real, name, victim, tmp_path):
    what = _with(problem(samples=60), {(victim, 2): Once(signal.SIGKILL)}, 3)
    out = tmp_path / "run"
    run(real, what, name, workers=3, optimizer=ADAM, out=out, **VIA)
    records = check_run(out, what)
    assert [r.worker for r in records if isinstance(r, Lost)] == [victim]


@pytest.mark.parametrize("name", ["bsp", "average:2"])
def test_all_may_die(real, name, tmp_path):
    acts = {(worker, 3): Once(signal.SIGKILL) for worker in range(2)}
    what, out = _with(problem(samples=SAMPLES), acts, 2), tmp_path / "run"
    run(real, what, name, workers=2, optimizer=ADAM, out=out, **VIA)
    check_run(out, what)


@pytest.mark.parametrize("name", ["bsp", "local:2"])
def test_one_that_stops_holds_up_nobody_for_ever(real, name, tmp_path):
    what, out = _with(problem(samples=60), {(1, 2): Once(signal.SIGSTOP)}, 3), tmp_path / "run"
    run(real, what, name, workers=3, patience=QUICK, out=out, listeners=[WakeLost()], **VIA)
    records = check_run(out, what)
    assert any(isinstance(record, Lost) and record.worker == 1 for record in records)


class StopsInSum:
    """Stops this process the first time that anything is added up in it."""

    def __init__(self, what: int):
        self.strike = Once(what)

    def __call__(self, total: Any, chunks: Any, shares: Any) -> None:
        self.strike()
        total.zero_()
        for chunk, share in zip(chunks, shares, strict=True):
            total.add_(chunk, alpha=share)


@pytest.mark.parametrize("what_happens", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_struck_while_all_add_up(real, what_happens, tmp_path, monkeypatch):
    """Everybody waits for everybody then; the others add up again without it."""
    monkeypatch.setattr(TcpGroup.add, "__defaults__", (StopsInSum(what_happens),))
    what, out = problem(samples=60), tmp_path / "run"
    run(
        real, what, "bsp", workers=3, patience=1.0, out=out, listeners=[WakeLost()],
        optimizer=ADAM, **VIA,
    )  # fmt: skip
    records = check_run(out, what)
    assert sum(isinstance(record, Lost) for record in records) >= 1


@pytest.mark.parametrize("name", ["bsp", "diloco:2"])
@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_dies_while_it_applies_has_contributed(real, name, victim, tmp_path, monkeypatch):
    """Everybody else has the mean, so its samples count, and its parameters are not looked at."""
    strike, apply = Once(signal.SIGKILL), meeting.AllreduceClient._apply

    def struck(self: Any, order: Any) -> None:
        if self.number == victim and not struck_before.is_open():
            struck_before.open()
            self.slot.incoming[0][0].zero_()  # as a step that is half done
            strike()
        apply(self, order)

    struck_before = Gate()
    monkeypatch.setattr(meeting.AllreduceClient, "_apply", struck)
    what, out = problem(samples=60), tmp_path / "run"
    run(real, what, name, workers=3, optimizer=ADAM, out=out, **VIA)
    records = check_run(out, what)
    first = next(record for record in records if isinstance(record, Updated))
    assert [part.worker for part in first.parts] == [0, 1, 2]
    assert next(record.worker for record in records if isinstance(record, Lost)) == victim


def test_when_all_die_while_they_apply_the_last_checkpoint_counts(real, tmp_path, monkeypatch):
    """Nobody has the parameters then."""
    apply, acts = meeting.AllreduceClient._apply, [Once(signal.SIGKILL), Once(signal.SIGKILL)]
    count = [0]

    def struck(self: Any, order: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            acts[self.number]()
        apply(self, order)

    monkeypatch.setattr(meeting.AllreduceClient, "_apply", struck)
    what, out = problem(samples=SAMPLES), tmp_path / "run"
    got = run(real, what, "bsp", workers=2, optimizer=ADAM, out=out, checkpoint_every=1, **VIA)
    check_run(out, what)
    assert all(epoch["applied"] == SAMPLES for epoch in got.summary().ledger)


@pytest.mark.parametrize("kept", ["folder", "memory"])
def test_a_killed_server_goes_on_from_its_last_checkpoint(real, kept, tmp_path):
    gate, seen = Gate(), Records()
    what = _with(problem(samples=SAMPLES), {(worker, 7): gate.wait for worker in range(2)}, 2)
    out = tmp_path / "run" if kept == "folder" else None
    got = run(
        real, what, "bsp", workers=2, out=out, checkpoint_every=1, optimizer=ADAM,
        listeners=[KillServer(3, gate), seen], **VIA,
    )  # fmt: skip
    assert all(e["applied"] == SAMPLES for e in got.summary().ledger)
    assert all(e["repeated"] == e["missing"] == 0 for e in got.summary().ledger)
    assert Counter(record.worker for record in seen.of(Joined)) == {0: 2, 1: 2}
    if out is not None:
        check_run(out, what)


# ---------------------------------------------------------------- on several hosts


def test_what_goes_between_workers_is_counted():
    """A model that is much larger than all that is said to the store."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3000), nn.Linear(3000, 2))

    what = problem(wide, samples=24)
    slow: Any = {"optimizer": partial(torch.optim.SGD, lr=1e-6), "checkpoint_every": 100}
    told = run("hosts", what, "bsp", workers=2, epochs=6, **slow, **VIA).summary()
    nbytes = sum(p.numel() * p.element_size() for p in what.model.parameters())
    # Each of two sends half of its gradient and half of the sum. The store sends a copy to both in
    # the beginning and at the end, and gets one.
    between = 2 * nbytes * told.updates
    assert told.updates == 18
    assert between + 5 * nbytes < told.wire_bytes < between + 6 * nbytes


def test_a_worker_that_the_others_cannot_reach_is_named(monkeypatch):
    """As behind a router at home: it dials out, and nobody gets in."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setattr(Members, "place", lambda self, host: nowhere)
    with pytest.raises(ob.RunError, match="worker 1 cannot reach worker 0") as raised:
        run("hosts", problem(), "bsp", workers=2, patience=QUICK, **VIA)
    assert "needs workers that reach each other" in str(raised.value)
    assert "bsp makes the same updates over the store" in str(raised.value)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("asp", {}, "use bsp, local, average, bmuf or diloco, or via='store'"),
        ("bsp:backup=1", {}, "does not wait for all"),
        ("easgd", {}, "does not wait for all"),
        ("bsp", {"overlap": True}, "overlap is for contributions on their way to a store"),
        ("bsp", {"codec": "int8"}, "a codec is for contributions"),
        ("bsp", {"via": "ring"}, "via must be one of store, allreduce, not 'ring'"),
    ],
)
def test_what_cannot_meet_is_refused_before_anything_starts(local_only, name, more, says):
    with pytest.raises(ob.ConfigError, match=says.replace("(", r"\(")):
        run(local_only, problem(), name, workers=2, **(VIA | more))


def test_a_simulation_has_no_way_to_meet(sim_only):
    with pytest.raises(ob.ConfigError, match="via is for engine='local'"):
        run(sim_only, problem(), "bsp", workers=2, via="allreduce")
