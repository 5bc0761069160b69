"""A callback's calls: values that agree with the log, means that leave nothing out, and an end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.data.lease import Lease
from offbeat.log.log import read
from offbeat.log.records import Dropped, Joined, Lost, Part, Refused, Updated
from offbeat.track import callback as module
from tests.contract.real import held_at
from tests.track.common import Memory, StopAt, small_run


class Store:
    """As much of a store as a listener reads."""

    def __init__(self, workers: int, applied: int = 0):
        self.cells = np.zeros((8, workers), dtype=np.int64)
        self.applied, self.given_up = applied, 0


class Clock:
    """Real time that only moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(module, "monotonic", lambda: self.now)


def update(version: int, *, time: float | None = None, **part: Any) -> Updated:
    values = {"worker": 0, "samples": 4, "loss": 1.0, "staleness": 0} | part
    base = version - 1 - values["staleness"]
    leases = [Lease(0, 0, values["samples"])]
    made = Part(incarnation=1, sequence=version, base=base, leases=leases, **values)
    return Updated(float(version) if time is None else time, version, [made])


@pytest.mark.parametrize("engine", ["sim", "local"])
@pytest.mark.parametrize("sync", ["asp", "bsp", "local:2"])
def test_every_update_is_told_with_the_numbers_of_the_log(
    engine: str, sync: str, tmp_path: Path
) -> None:
    memory = Memory()
    run = small_run(memory, sync=sync, engine=engine, out=tmp_path / "run")
    records = [r for r in read(tmp_path / "run" / "log.jsonl") if isinstance(r, Updated)]
    assert [u.version for u in memory.updates] == [r.version for r in records]
    assert [u.time for u in memory.updates] == [r.time for r in records]
    samples = 0
    for told, record in zip(memory.updates, records, strict=True):
        samples += sum(part.samples for part in record.parts)
        loss = sum((part.loss or 0.0) * part.samples for part in record.parts)
        assert told.samples == samples
        assert told.updates == 1
        assert told.loss == pytest.approx(loss / sum(part.samples for part in record.parts))
        assert told.staleness == np.mean([part.staleness for part in record.parts])
    assert [(t.samples, t.accuracy) for t in memory.tests] == [
        (t.samples, t.accuracy) for t in run.history.tests
    ]
    assert [epoch.epoch for epoch in memory.epochs] == [0, 1]
    assert memory.epochs[-1].samples == run.summary().samples
    assert sorted(e.worker for e in memory.events if e.kind == "join") == [0, 1, 2]
    (end,) = memory.ends
    assert end.finished
    for name in ("samples", "updates", "staleness_mean", "wait_share", "loss", "seconds"):
        assert getattr(end.summary, name) == getattr(run.summary(), name)


def test_what_workers_waited_is_told_of_each() -> None:
    memory = Memory(every=1000)  # one reading of the whole run, at its end
    run = small_run(memory, sync="bsp")
    (told,) = memory.updates
    assert told.waiting == pytest.approx(run.summary().wait_share, abs=0.05)
    fast, also_fast, slow = told.waiting_by_worker
    assert fast is not None
    assert slow is not None
    assert fast == also_fast
    assert fast > 0.5 > slow
    assert told.samples_per_second == pytest.approx(run.summary().samples_per_second)


@given(
    losses=st.lists(st.floats(0, 10), min_size=1, max_size=20),
    every=st.integers(1, 7),
    data=st.data(),
)
def test_means_leave_nothing_out(losses: list[float], every: int, data: st.DataObject) -> None:
    memory = Memory(every)
    memory.begin(Store(2), 1000)
    sizes = [data.draw(st.integers(1, 9)) for _ in losses]
    stale = [data.draw(st.integers(0, 5)) for _ in losses]
    for i, (loss, size, tau) in enumerate(zip(losses, sizes, stale, strict=True), 1):
        memory.see(update(i, samples=size, loss=loss, staleness=tau))
    memory.end()
    told = memory.updates
    assert sum(u.updates for u in told) == len(losses)
    assert all(u.updates == every for u in told[:-1])
    steps = np.diff([0, *(u.samples for u in told)])
    total = sum(u.loss * n for u, n in zip(told, steps, strict=True) if u.loss is not None)
    assert total == pytest.approx(sum(x * n for x, n in zip(losses, sizes, strict=True)))
    assert sum(u.staleness * u.updates for u in told) == pytest.approx(sum(stale))


def test_at_most_so_many_calls_in_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    memory = Memory(every=None)
    memory.begin(Store(1), 1000)
    for version in range(1, 101):
        memory.see(update(version))
        clock.now += 0.01
    assert len(memory.updates) == 10  # in one second, at 0.1 s each
    assert memory.updates[0].updates == 1  # the first comes at once
    clock.now += 1
    memory.idle()
    assert memory.updates[-1].version == 100
    before = len(memory.updates)
    memory.idle()
    memory.end()
    assert len(memory.updates) == before  # nothing is told twice


def test_the_pause_begins_when_a_slow_receiver_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Slow(Memory):
        def on_update(self, update: ob.track.Update) -> None:
            super().on_update(update)
            clock.now += 5.0

    memory = Slow(every=None)
    memory.begin(Store(1), 1000)
    memory.see(update(1))
    memory.see(update(2))
    assert len(memory.updates) == 1


def test_events_say_what_happened_in_words() -> None:
    memory = Memory()
    memory.begin(Store(4), 1000)
    memory.see(Joined(0.0, 3, 2, 0))
    memory.see(Lost(1.0, 3, 2, [Lease(0, 0, 4), Lease(0, 8, 12)]))
    memory.see(Refused(2.0, 3, 2, 5))
    memory.see(Dropped(3.0, 7, update(1, worker=1).parts[0]))
    memory.see(Dropped(4.0, 7, update(1, worker=2).parts[0], redo=True))
    assert [event.kind for event in memory.events] == ["join", "lost", "refuse", "drop", "drop"]
    assert [event.text for event in memory.events] == [
        "worker 3 joined, for the 2nd time",
        "worker 3 was lost; 8 samples are issued again",
        "a contribution of worker 3, given up before, was refused",
        "a contribution of worker 1 came late; 4 samples were dropped",
        "a contribution of worker 2 came late; 4 samples are issued again",
    ]


def test_skipped_parts_and_unknown_losses_do_not_count() -> None:
    memory = Memory(every=2)
    memory.begin(Store(1), 1000)
    memory.see(update(1, loss=None))
    memory.see(update(2, skipped=True, loss=99.0))
    (told,) = memory.updates
    assert (told.samples, told.loss) == (4, None)


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_a_run_that_fails_ends_its_callbacks_once(engine: str) -> None:
    memory = Memory()
    with pytest.raises(RuntimeError, match="on purpose"):
        small_run(memory, StopAt(5, RuntimeError("on purpose")), engine=engine)
    memory.end()
    (end,) = memory.ends
    assert not end.finished
    assert memory.updates[-1].version == 5


def test_an_error_in_a_callback_ends_the_run_and_the_callback() -> None:
    class Bad(Memory):
        def on_update(self, update: ob.track.Update) -> None:
            super().on_update(update)
            raise ValueError("mine")

    bad = Bad(every=None)
    with pytest.raises(ValueError, match="mine"):
        small_run(bad)
    assert len(bad.ends) == 1


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_a_run_that_goes_on_counts_on(engine: str, tmp_path: Path) -> None:
    out, first, second = tmp_path / "run", Memory(), Memory()
    stop = StopAt(20, RuntimeError("on purpose"))
    with held_at(20), pytest.raises(RuntimeError):
        small_run(stop, first, engine=engine, out=out, checkpoint_every=4)
    run = small_run(second, engine=engine, out=out, checkpoint_every=4, resume=True)
    assert second.updates[0].version > 1
    assert second.updates[-1].version == run.summary().updates
    # What real workers pushed before the first record was read here may count twice.
    most = 0 if engine == "sim" else 96 - 4 * (second.updates[0].version - 1)
    assert 0 <= second.updates[-1].samples - 96 <= most
    assert second.ends[0].finished


def test_a_server_that_went_back_is_counted_from_where_it_is() -> None:
    memory, store = Memory(), Store(1)
    memory.begin(store, 1000)
    for version in range(1, 6):
        memory.see(update(version))
    store.applied = 8
    memory.see(update(3))
    assert [u.samples for u in memory.updates] == [4, 8, 12, 16, 20, 12]


def test_whoever_knows_what_went_before_is_believed() -> None:
    memory = Memory()
    memory.describe({}, applied=40)
    memory.begin(Store(1, applied=52), 1000)  # the server is three updates ahead
    memory.see(update(11))
    assert memory.updates[0].samples == 44


def test_only_what_was_seen_is_finished() -> None:
    memory = Memory()
    memory.begin(Store(1, applied=1000), 1000)
    memory.see(update(1))
    memory.end()
    assert not memory.ends[0].finished


def test_settings_come_with_the_beginning() -> None:
    memory = Memory()
    memory.describe({"discipline": "ssp:3", "seed": 4})
    memory.begin(Store(2), 30)
    (begin,) = memory.begun
    assert (begin.workers, begin.samples) == (2, 30)
    assert begin.settings == {"discipline": "ssp:3", "seed": 4}
    memory.end()
    assert memory.ends[0].summary.discipline == "ssp:3"


def test_every_is_checked_before_the_run() -> None:
    with pytest.raises(ob.ConfigError, match="at least 1, not 0"):
        small_run(Memory(every=0))


def test_five_lines_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    class Printer(ob.Callback):
        def on_epoch(self, epoch: ob.track.Epoch) -> None:
            print(epoch.epoch, epoch.samples)

    small_run(Printer(), sync="bsp")
    assert capsys.readouterr().out == "0 48\n1 96\n"
