"""The timeline: no moment twice, nothing left out, and waits that name who ended them."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.data.lease import Lease
from offbeat.log.log import read
from offbeat.log.records import Admitted, Dropped, Joined, Lost, Part, Pulled, Rested, Updated
from offbeat.report.digest import digest
from offbeat.report.timeline import Segment, Timeline, Window
from tests.contract.common import SGD, Records, clusters, examples, problem, scratch, seeds

NAMES = ["bsp", "ssp:1", "asp", "local:4", "easgd:2", "soft:2", "bsp:backup=1"]
DOWNPOUR = ["downpour:push=2,fetch=3", "downpour:push=3,fetch=2"]


def sums(segments: list[Segment], kind: str, worker: int) -> float:
    return sum(s.end - s.start for s in segments if (s.worker, s.kind) == (worker, kind))


def in_order(segments: list[Segment]) -> bool:
    last: dict[int, float] = defaultdict(float)
    for segment in segments:
        if not last[segment.worker] <= segment.start < segment.end:
            return False
        last[segment.worker] = segment.end
    return True


def simulated(cluster: ob.Cluster, name: str, seed: int, out: Path) -> None:
    rule: dict[str, Any] = {} if name.startswith("downpour") else {"optimizer": SGD}
    ob.train(*problem(), discipline=name, cluster=cluster, batch_size=2, seed=seed, out=out, **rule)


@examples(60)
@given(clusters(late=True, least=2), st.sampled_from(NAMES + DOWNPOUR), seeds)
def test_every_second_of_a_simulation_is_shown_once(
    cluster: ob.Cluster, name: str, seed: int
) -> None:
    with scratch() as path:
        simulated(cluster, name, seed, path / "run")
        found = digest(path / "run")
        records = list(read(path / "run" / "log.jsonl"))
    assert in_order(found.segments)
    for worker, figures in enumerate(found.summary.per_worker):
        assert sums(found.segments, "compute", worker) == pytest.approx(figures.compute, abs=1e-9)
        told = pytest.approx(figures.communication, abs=1e-9)
        assert sums(found.segments, "exchange", worker) == told
        # The last wait of all is told by nobody any more.
        assert sums(found.segments, "wait", worker) >= figures.wait - 1e-9
    moved = moves(records)
    for segment in found.segments:
        if segment.kind == "wait":
            assert segment.whom is not None
            assert segment.whom != segment.worker
            assert segment.end in moved[segment.whom]
        else:
            assert segment.whom is None


def moves(records: list[Any]) -> dict[int, set[float]]:
    """When each worker did something that can release others."""
    found: dict[int, set[float]] = defaultdict(set)
    for record in records:
        parts = record.parts if isinstance(record, Updated) else []
        parts = [record.part] if isinstance(record, Dropped) else parts
        who = [part.worker for part in parts]
        who += [record.worker] if isinstance(record, Admitted | Lost | Rested) else []
        for worker in who:
            found[worker].add(record.time)
    return found


@examples(40)
@given(clusters(faults=True, least=2), st.sampled_from(NAMES + DOWNPOUR), seeds)
def test_what_a_lost_worker_computed_in_vain_is_left_out(
    cluster: ob.Cluster, name: str, seed: int
) -> None:
    with scratch() as path:
        simulated(cluster, name, seed, path / "run")
        found = digest(path / "run")
    assert in_order(found.segments)
    for worker, figures in enumerate(found.summary.per_worker):
        assert sums(found.segments, "compute", worker) == pytest.approx(figures.compute, abs=1e-9)
        assert sums(found.segments, "exchange", worker) <= figures.communication + 1e-9


@pytest.mark.parametrize("name", ["bsp", "ssp:1", "asp", "local:4", "easgd:2", "soft:2"])
def test_real_workers(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ob.train(
        *problem(samples=48), discipline=name, optimizer=SGD, workers=2, batch_size=2,
        emulate=["1ms", "4ms"], engine="local", out=out,
    )  # fmt: skip
    found = digest(out)
    assert in_order(found.segments)
    for worker, figures in enumerate(found.summary.per_worker):
        assert sums(found.segments, "compute", worker) == pytest.approx(figures.compute, abs=1e-6)
    waits = [s for s in found.segments if s.kind == "wait"]
    assert all(s.whom == 1 - s.worker for s in waits)
    if name != "ssp:1":  # there it depends on how steady the machine is
        assert bool(waits) is (name in ("bsp", "local:4"))


def test_the_fast_wait_for_the_slow(tmp_path: Path) -> None:
    simulated(ob.Cluster.read("10ms,10ms,40ms"), "bsp", 0, tmp_path / "run")
    found = digest(tmp_path / "run")
    waits = [s for s in found.segments if s.kind == "wait"]
    assert {(s.worker, s.whom) for s in waits} == {(0, 2), (1, 2)}
    assert all(s.end - s.start == pytest.approx(0.03) for s in waits)
    begun = [(s.worker, s.kind, s.start) for s in found.segments if s.start < 0.01]
    assert begun == [(0, "compute", 0.0), (1, "compute", 0.0), (2, "compute", 0.0)]


# ---------------------------------------------------------------- records by hand


def shown(records: list[Any], virtual: bool = False, workers: int = 2) -> list[tuple[Any, ...]]:
    timeline = Timeline(workers, virtual, 100)
    for record in records:
        timeline.see(record)
    segments, _ = timeline.cut(max(record.time for record in records))
    return [
        (s.worker, s.kind, round(s.start, 6), round(s.end, 6), s.whom)
        for s in segments
        if s.worker == 0
    ]


def part(worker: int, sequence: int, **seconds: float) -> Part:
    return Part(worker, 1, sequence, 0, [Lease(0, 0, 4)], 4, bytes=100, **seconds)  # type: ignore[arg-type]


def test_an_exchange_is_divided_by_bytes() -> None:
    seen = shown([
        Joined(0.0, 0, 1, 0),
        Pulled(0.0, 0, 0, bytes=300),
        Updated(1.0, 1, [part(0, 0, compute=0.6, communication=0.4)]),
    ])  # fmt: skip
    expected = [("exchange", 0, 0.3), ("compute", 0.3, 0.9), ("exchange", 0.9, 1)]
    assert seen == [(0, kind, start, end, None) for kind, start, end in expected]


def test_computing_ahead_goes_on_past_the_pull() -> None:
    """The next step is under way while the store deals with the last."""
    ahead = [Lease(0, 0, 4)]
    seen = shown([
        Joined(0.0, 0, 1, 0),
        Updated(1.0, 1, [part(0, 0)]),
        Pulled(1.2, 0, 1, ahead, bytes=100),
        Updated(2.0, 2, [part(0, 1, compute=0.9, communication=0.3)]),
    ])  # fmt: skip
    assert seen[-2:] == [(0, "compute", 1.0, 1.9, None), (0, "exchange", 1.9, 2.0, None)]


def test_one_that_computed_ahead_waits_only_afterwards() -> None:
    seen = shown([
        Joined(0.0, 0, 1, 0),
        Joined(0.0, 1, 1, 0),
        Admitted(1.0, 0, 1, 0, []),
        Updated(1.8, 1, [part(0, 0), part(1, 0)]),
        Pulled(1.9, 0, 1, [Lease(0, 0, 4)]),
        Updated(2.0, 2, [part(0, 1, compute=0.5, wait=0.4, communication=0.1)]),
    ])  # fmt: skip
    assert seen[-3:] == [
        (0, "compute", 1.0, 1.5, None),
        (0, "wait", 1.5, 1.9, 1),
        (0, "exchange", 1.9, 2.0, None),
    ]


def test_a_loss_ends_a_wait() -> None:
    seen = shown([
        Joined(0.0, 0, 1, 0),
        Joined(0.0, 1, 1, 0),
        Pulled(0.0, 0, 0),
        Pulled(0.0, 1, 0),
        Admitted(1.0, 0, 1, 0, []),
        Lost(5.0, 1, 1, []),
        Updated(5.0, 1, [part(0, 0, compute=1.0)]),
        Pulled(5.0, 0, 1),
        Updated(6.0, 2, [part(0, 1, compute=1.0, wait=4.0)]),
    ])  # fmt: skip
    assert seen == [
        (0, "compute", 0.0, 1.0, None),
        (0, "wait", 1.0, 5.0, 1),
        (0, "compute", 5.0, 6.0, None),
    ]


def test_a_pause_is_neither_work_nor_waiting() -> None:
    seen = shown([
        Joined(0.0, 0, 1, 0),
        Pulled(0.0, 0, 0, bytes=100),
        Updated(9.0, 1, [part(0, 0, compute=1.0, communication=2.0)]),
    ], virtual=True)  # fmt: skip
    expected = [("exchange", 0, 1), ("compute", 1, 2), ("exchange", 8, 9)]
    assert seen == [(0, kind, start, end, None) for kind, start, end in expected]


def test_rest_is_not_shown() -> None:
    seen = shown([
        Joined(0.0, 0, 1, 0),
        Rested(1.0, 0),
        Pulled(7.0, 0, 1),
        Updated(8.0, 1, [part(0, 0, compute=1.0)]),
    ])  # fmt: skip
    assert seen == [(0, "compute", 7.0, 8.0, None)]


def test_a_moment_at_the_store_is_no_wait_for_anybody() -> None:
    records: list[Any] = [
        Joined(0.0, 0, 1, 0),
        Joined(0.0, 1, 1, 0),
        Updated(0.5, 1, [part(1, 0)]),
        Updated(1.0, 2, [part(0, 0, compute=1.0)]),
        Pulled(1.1, 0, 2),
        Updated(2.1, 3, [part(0, 1, compute=1.0, wait=0.1)]),
    ]
    assert shown(records)[1] == (0, "exchange", 1.0, 1.1, None)
    assert shown(records, virtual=True)[1] == (0, "wait", 1.0, 1.1, None)


# ---------------------------------------------------------------- windows


def test_a_window_has_all_that_happened_in_it() -> None:
    """Also what a slow worker tells long after the window was full."""
    window = Window(10.0, 5)
    for step in range(30):
        window.add([Segment(0, "compute", float(step), step + 1.0)], step + 1.0)
    window.add([Segment(1, "compute", 0.0, 30.0)], 30.0)
    segments, (start, end) = window.cut(30.0)
    assert (start, end) == (10.0, 14.0)
    assert len(segments) == 5
    assert segments[-1] == Segment(1, "compute", 10.0, 14.0)
    assert sums(segments, "compute", 0) == end - start


def test_more_workers_than_segments() -> None:
    window = Window(0.0, 3)
    window.add([Segment(worker, "compute", 0.0, 1.0) for worker in range(9)], 1.0)
    segments, covered = window.cut(1.0)
    assert [s.worker for s in segments] == [0, 1, 2]
    assert covered == (0.0, 1.0)


@examples(20)
@given(clusters(least=2), st.sampled_from(["bsp", "ssp:1", "asp"]), st.integers(16, 40), seeds)
def test_a_window_agrees_with_the_whole(
    cluster: ob.Cluster, name: str, most: int, seed: int
) -> None:
    seen = Records()
    ob.estimate(cluster, name, steps=20, model_bytes=100, seed=seed, listeners=[seen])
    end = max(record.time for record in seen.all)
    whole, part_of = (Timeline(len(cluster), True, n, end / 2) for n in (10**6, most))
    for record in seen.all:
        whole.see(record)
        part_of.see(record)
    everything, _ = whole.cut(end)
    segments, (begin, until) = part_of.cut(end)
    assert len(segments) <= most
    assert in_order(segments)
    assert begin == end / 2
    inside = [s for s in everything if s.end > begin and s.start < until]
    clipped = [(s.worker, s.kind, max(s.start, begin), min(s.end, until)) for s in inside]
    assert [(s.worker, s.kind, s.start, s.end) for s in segments] == clipped
