"""The digest of a run: its figures against the bare log, its bounds, and folders not to trust."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.errors import CheckpointError
from offbeat.log import files as logfile
from offbeat.log.log import decode, read
from offbeat.log.records import Evaluated, Linked, Measured, Part, Updated
from offbeat.recipes import recipe
from offbeat.report import digest as module
from offbeat.report.digest import CURVE, EVENTS, SEGMENTS, RunDigest, digest
from offbeat.report.recount import Recount
from offbeat.report.summary import Step, Tally, thinned
from tests.contract.common import SGD, clusters, examples, problem, recount, scratch, seeds

SETTINGS = {
    "discipline": "asp",
    "engine": "sim",
    "workers": 2,
    "batch_size": 4,
    "epochs": 1,
    "samples": 64,
}


def folder(path: Path, lines: list[Any], **settings: Any) -> Path:
    """A run folder as somebody might have written it."""
    path.mkdir(exist_ok=True)
    (path / "run.json").write_text(json.dumps(SETTINGS | settings))
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (path / "log.jsonl").write_text("".join(f"{line}\n" for line in text))
    return path


def part(worker: int = 0, sequence: int = 0, **given: Any) -> dict[str, Any]:
    start = 4 * sequence
    leases = [[0, start, start + 4]]
    return {
        "worker": worker,
        "incarnation": 1,
        "sequence": sequence,
        "base": 0,
        "leases": leases,
        "samples": 4,
    } | given


def update(time: float, *parts: dict[str, Any], version: int = 1) -> dict[str, Any]:
    return {"kind": "update", "time": time, "version": version, "parts": list(parts)}


# ---------------------------------------------------------------- against the bare log


def bare(path: Path, target: float) -> dict[str, Any]:
    """The figures of a run from the lines of its log, with nothing of offbeat."""
    lines = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    updates = [line for line in lines if line["kind"] == "update"]
    parts = [p for u in updates for p in u["parts"]]
    spent = parts + [line["part"] for line in lines if line["kind"] == "drop"]
    rests = [line for line in lines if line["kind"] == "rest"]
    seconds = max(line["time"] for line in lines)
    wait = sum(p.get("wait", 0) for p in spent + rests)
    busy = wait + sum(p.get("compute", 0) + p.get("communication", 0) for p in spent + rests)
    tests = [line for line in lines if line["kind"] == "test"]

    def kept(following: list[dict[str, Any]]) -> bool:
        """Whether the first of these tests is at the target, and the mean with the next two."""
        found = [t["accuracy"] for t in following[:3]]
        return min(found[0], sum(found) / len(found)) >= target

    ideal = 0.0
    for worker in {p["worker"] for p in spent}:
        mine = [p for p in spent if p["worker"] == worker]
        ideal += sum(p["samples"] for p in mine) / sum(p["compute"] for p in mine)
    return {
        "samples_per_second": sum(p["samples"] for p in parts) / seconds,
        "time_to": next((t["time"] for n, t in enumerate(tests) if kept(tests[n:])), None),
        "staleness_mean": sum(p.get("staleness", 0) for p in parts) / len(parts),
        "staleness_max": max(p.get("staleness", 0) for p in parts),
        "wait_share": wait / busy,
        "bytes_sent": sum(p["bytes"] for p in spent),
        "bytes_received": sum(p["bytes"] for p in lines if p["kind"] == "pull"),
        "updates": len(updates),
        "seconds": seconds,
        "accuracy": tests[-1]["accuracy"],
        "ideal": ideal,
    }


@pytest.mark.parametrize("discipline", ["bsp", "ssp:1", "asp"])
@pytest.mark.parametrize("engine", ["sim", "local"])
def test_figures_agree_with_the_bare_log(engine: str, discipline: str, tmp_path: Path) -> None:
    digits = recipe("digits", hidden=32)
    times = ["1ms", "1ms", "4ms"]
    speeds: dict[str, Any] = {"cluster": ",".join(times)} if engine == "sim" else {"workers": 3}
    if engine == "local":
        speeds["emulate"] = times
    run = ob.train(
        digits.model, digits.data, digits.loss, discipline=discipline,
        optimizer=digits.optimizer, batch_size=8, epochs=1, test=digits.test,
        evaluate_every=480, engine=engine, out=tmp_path / "run", **speeds,
    )  # fmt: skip
    found = digest(tmp_path / "run")
    target = 0.3
    plain = bare(tmp_path / "run", target)
    assert plain["time_to"] is not None
    assert found.time_to(target) == plain.pop("time_to")
    assert found.ideal == pytest.approx(plain.pop("ideal"))
    counted = {name: getattr(found.summary, name) for name in plain}
    assert counted == pytest.approx(plain)
    assert found.summary == run.summary()
    assert found.virtual is (engine == "sim")
    assert found.finished
    assert found.tests == run.history.tests
    assert found.losses == run.history.steps


@examples(20)
@given(
    clusters(faults=True, least=2), st.sampled_from(["asp", "bsp", "bsp:backup=1", "soft:2"]), seeds
)
def test_the_summary_is_the_one_of_the_run(cluster: ob.Cluster, name: str, seed: int) -> None:
    with scratch() as path:
        out = path / "run"
        run = ob.train(
            *problem(),
            discipline=name,
            optimizer=SGD,
            cluster=cluster,
            batch_size=3,
            seed=seed,
            out=out,
        )
        found = digest(out)
        assert found.summary == run.summary()
        counts = recount(list(read(out / "log.jsonl")), 24, 1)
        assert [{k: n for k, n in c.items() if k != "skipped"} for c in found.summary.ledger] == [
            counts[0]
        ]
        rejoined = sum(max(0, worker.joins - 1) for worker in found.summary.per_worker)
        kinds = [event.kind for event in found.events]
        assert kinds.count("joined") == rejoined
        assert kinds.count("lost") == found.summary.lost
        assert kinds.count("refused") == found.summary.refused


@examples(30)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans()), max_size=12))
def test_the_ledger_counts_ranges_as_if_sample_by_sample(
    leases: list[tuple[int, int, bool]],
) -> None:
    ledger, times, dropped = Recount(20, 1), [0] * 20, 0
    for start, length, applied in leases:
        if sum(times) + dropped + length >= 20:
            break  # an epoch that is complete is closed
        ledger.settle([ob_lease(start, start + length)], "applied" if applied else "dropped")
        dropped += 0 if applied else length
        for position in range(start, start + length) if applied else ():
            times[position] += 1
    once, more = times.count(1), sum(n > 1 for n in times)
    expected = {
        "applied": once,
        "repeated": more,
        "missing": 20 - once - more - dropped,
        "dropped": dropped,
        "skipped": 0,
    }
    assert ledger.counts() in ([expected], [])


def ob_lease(start: int, stop: int) -> Any:
    return (0, start, stop)


# ---------------------------------------------------------------- runs of other kinds


def test_hogwild(tmp_path: Path) -> None:
    run = ob.train(
        *problem(),
        discipline="hogwild",
        optimizer=SGD,
        workers=2,
        batch_size=3,
        out=tmp_path / "run",
        engine="local",
    )
    found = digest(tmp_path / "run")
    assert found.summary == run.summary()
    assert {s.kind for s in found.segments} >= {"compute"}


def test_a_script(tmp_path: Path) -> None:
    inputs, target = problem().data.tensors
    script = tmp_path / "train.py"
    script.write_text(
        "import offbeat as ob, torch\n"
        "from functools import partial\n"
        f"data = torch.utils.data.TensorDataset(torch.tensor({inputs.tolist()}),"
        f" torch.tensor({target.tolist()}))\n"
        "with ob.join() as run:\n"
        "    model = run.replica(torch.nn.Linear(3, 2))\n"
        "    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1))\n"
        "    for x, y in run.batches(data, batch_size=4):\n"
        "        torch.nn.functional.mse_loss(model(x), y).backward()\n"
        "        optimizer.step(); optimizer.zero_grad()\n"
    )
    from offbeat.engine.script import Script
    from offbeat.engine.sim.cluster import Cluster
    from offbeat.engine.sim.scripts import simulate_script

    out = tmp_path / "run"
    run = simulate_script(
        Script(script, []), Cluster.read("10ms,40ms"), {"discipline": "asp", "out": str(out)}
    )
    found = digest(out)
    assert found.summary == run.summary()
    assert found.batch_size == 4
    assert found.summary.samples == 24
    assert found.losses == []  # this script does not tell
    assert found.summary.train_loss is None


# ---------------------------------------------------------------- a run that goes on


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ob.train(
        *problem(), discipline="ssp:1", optimizer=SGD, cluster="10ms,40ms", batch_size=3, out=out
    )
    whole = digest(out)
    log = (out / "log.jsonl").read_bytes()
    (out / "summary.json").unlink()
    head, *lines = log.splitlines(keepends=True)
    for count in range(len(lines) + 1):
        (out / "log.jsonl").write_bytes(head + b"".join(lines[:count]) + b'{"kind":"upd')
        found = digest(out)
        assert not found.finished
        records = decode(b"".join(lines[:count]))
        assert found.summary.updates == sum(isinstance(r, Updated) for r in records)
        assert found.window[1] == found.summary.seconds
    assert found.summary.samples == whole.summary.samples
    assert found.segments == whole.segments
    assert found.summary.parameter_hash == whole.summary.parameter_hash
    (out / "log.jsonl").unlink()
    assert digest(out).summary.updates == 0


def test_an_emulated_run_is_marked_before_its_end(tmp_path: Path) -> None:
    assert digest(folder(tmp_path, [], emulate=[0.1, 0.2])).summary.emulated == [0.1, 0.2]
    assert digest(folder(tmp_path, [], emulate=None)).summary.emulated == []


def test_shares_are_those_of_the_description(tmp_path: Path) -> None:
    assert digest(folder(tmp_path, [], shares="1,3")).summary.shares == "1,3"
    assert digest(folder(tmp_path, [])).summary.shares == ""


def test_nothing_has_happened(tmp_path: Path) -> None:
    found = digest(folder(tmp_path, []))
    assert (found.ideal, found.speeds, found.segments, found.window) == (None, [], [], (0.0, 0.0))


# ---------------------------------------------------------------- not to be trusted


@pytest.mark.parametrize("key", sorted(SETTINGS))
def test_a_description_that_lacks_something_is_named(key: str, tmp_path: Path) -> None:
    path = folder(tmp_path, [])
    config = {name: value for name, value in SETTINGS.items() if name != key}
    (path / "run.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"run\.json.*{key}"):
        digest(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '{"workers": ', "[" * 100_000, '{"workers": "<script>"}', "\xff"]
)
def test_a_description_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    path = folder(tmp_path, [])
    (path / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"run\.json"):
        digest(path)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no run\.json"):
        digest(tmp_path)


@pytest.mark.parametrize("workers", [0, -1, 10**12, "2", 2.5])
def test_a_number_of_workers_that_cannot_be(workers: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="workers"):
        digest(folder(tmp_path, [], workers=workers))


HOSTILE = [
    {"kind": "join", "time": 1, "worker": 2, "incarnation": 1, "clock": 0},
    {"kind": "pull", "time": 1, "worker": -1, "version": 0},
    {"kind": "push", "time": 1, "worker": 10**30, "incarnation": 1, "sequence": 0, "leases": []},
    {"kind": "lost", "time": 1, "worker": 9, "incarnation": 1, "leases": []},
    {"kind": "refuse", "time": 1, "worker": -9, "incarnation": 1, "sequence": 0},
    {"kind": "rest", "time": 1, "worker": 2},
    {"kind": "rest", "time": 1, "worker": 0, "wait": 1e300},
    {"kind": "pull", "time": 1, "worker": 0, "version": 0, "bytes": 10**40},
    {"kind": "pull", "time": 1e300, "worker": 0, "version": 0},
    {"kind": "pull", "time": -1, "worker": 0, "version": 0},
    {"kind": "test", "time": 1, "version": 10**30, "samples": 1, "loss": 1},
    {"kind": "drop", "time": 1, "version": 1, "part": part(worker=7)},
    update(1, part(worker=7)),
    update(1, part(worker=-1)),
    update(1, part(samples=10**40)),
    update(1, part(staleness=10**400)),
    update(1, part(compute=1e308)),
    update(1, part(leases=[[0, 0, 65]])),
    update(1, part(leases=[[0, -4, 4]])),
    update(1, part(leases=[[1, 0, 4]])),
    update(1, part(leases=[[10**30, 0, 4]])),
    update(1, part(leases=[[0, 4, 4]])),
    update(1, part(version=1, leases=[[0, 4]])),
    '{"kind":"rest","time":NaN,"worker":0}',
    '{"kind":"rest","time":1e999,"worker":0}',
    '{"kind":"other","time":1}',
    "",
    {"kind": "wire", "time": 1, "worker": 2},
    {"kind": "wire", "time": 1, "worker": 0, "sent": -1},
    {"kind": "wire", "time": 1, "worker": 0, "large_received": 1 << 60},
    {"kind": "wire", "time": 1, "worker": 0, "sent_in": -1.0},
    {"kind": "wire", "time": 1, "worker": 0, "round_trip": 1e300},
    {"kind": "link", "time": 1, "worker": 0, "host": "h", "round_trip": -1, "connections": 1},
]


@pytest.mark.parametrize("line", HOSTILE)
def test_a_record_that_cannot_be_is_named(line: Any, tmp_path: Path) -> None:
    good = {"kind": "join", "time": 0, "worker": 0, "incarnation": 1, "clock": 0}
    with pytest.raises(CheckpointError, match=r"log\.jsonl line 2"):
        digest(folder(tmp_path, [good, line, good]))


def test_what_is_merely_odd_yields_a_digest_that_can_be_written(tmp_path: Path) -> None:
    """Times that jump back, contributions without a pull, losses beyond all bounds."""
    lines = [
        update(5, part(loss=1e308), part(1, 1, loss=1e308)),
        {"kind": "pull", "time": 2, "worker": 0, "version": 1},
        {"kind": "lost", "time": 1, "worker": 1, "incarnation": 1, "leases": []},
        {"kind": "push", "time": 3, "worker": 1, "incarnation": 4, "sequence": 9, "leases": []},
        update(4, part(1, 2, compute=-3.0, wait=-1.0, communication=-1.0), version=2),
        update(9, part(0, 3, compute=1e9, wait=1e9), version=2),
        {"kind": "test", "time": 9, "version": 2, "samples": 8, "loss": None},
    ]
    found = digest(folder(tmp_path / "<script>", lines))
    assert found.name == "<script>"
    assert ordered(found)
    again = msgspec.json.decode(msgspec.json.encode(found), type=RunDigest)
    assert again == found


def test_a_damaged_summary_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path, [])
    (path / "summary.json").write_text('{"memory": {"store": "much"}}')
    with pytest.raises(CheckpointError, match=r"summary\.json"):
        digest(path)


def test_of_the_summary_only_what_the_log_lacks_is_believed(tmp_path: Path) -> None:
    path = folder(tmp_path, [update(2, part())])
    lies = {"samples": 10**6, "accuracy": 1.0, "seconds": 0.1, "discipline": "<b>", "workers": 9}
    told = {"memory": {"store": 3}, "parameter_hash": "ab", "overlap": {"push": 0.5}}
    (path / "summary.json").write_text(json.dumps(lies | told))
    summary = digest(path).summary
    assert (summary.samples, summary.accuracy, summary.seconds) == (4, None, 2.0)
    assert (summary.memory, summary.parameter_hash, summary.overlap) == tuple(told.values())


# ---------------------------------------------------------------- bounds


def ordered(found: RunDigest) -> bool:
    """Whether the segments of each worker follow each other within the window."""
    begin, end = found.window
    last: dict[int, float] = {}
    for segment in found.segments:
        if not last.get(segment.worker, begin) <= segment.start < segment.end <= end:
            return False
        last[segment.worker] = segment.end
    return True


def long_log(path: Path, updates: int, workers: int = 4) -> None:
    """Free-running workers of which one is four times slower, in lines as a run writes them."""
    clocks, speeds = [0.0] * workers, [0.01] * (workers - 1) + [0.04]
    steps = [0] * workers
    versions = [0] * workers
    with open(path, "w") as file:
        for worker in range(workers):
            file.write(
                f'{{"kind":"join","time":0.0,"worker":{worker},"incarnation":1,"clock":0}}\n'
                f'{{"kind":"pull","time":0.0,"worker":{worker},"version":0,"bytes":800}}\n'
            )
        for version in range(1, updates + 1):
            worker = min(range(workers), key=lambda w: (clocks[w] + speeds[w], w))
            clocks[worker] += speeds[worker]
            time, start = clocks[worker], 4 * (version - 1)
            file.write(
                f'{{"kind":"update","time":{time},"version":{version},"parts":[{{"worker":{worker},'
                f'"incarnation":1,"sequence":{steps[worker]},"base":{versions[worker]},'
                f'"leases":[[0,{start},{start + 4}]],"samples":4,"weight":1.0,'
                f'"staleness":{version - 1 - versions[worker]},"bytes":800,'
                f'"compute":{speeds[worker]},"loss":{1 / version}}}],"rate":1.0,'
                f'"hash":"{"0123456789abcdef" * 4}"}}\n'
                f'{{"kind":"pull","time":{time},"worker":{worker},"version":{version},"bytes":800}}\n'
            )
            steps[worker] += 1
            versions[worker] = version
            if version % 100 == 0:
                file.write(
                    f'{{"kind":"test","time":{time},"version":{version},"samples":{4 * version},'
                    f'"loss":{1 / version},"accuracy":{version / updates}}}\n'
                )


def test_a_long_log_gives_a_small_digest(tmp_path: Path) -> None:
    updates = 100_000
    path = folder(tmp_path, [], workers=4, samples=4 * updates)
    long_log(path / "log.jsonl", updates)
    found = digest(path)
    assert found.summary.updates == updates
    assert found.summary.ledger[0]["applied"] == 4 * updates
    assert len(msgspec.json.encode(found)) < 1_000_000
    assert CURVE / 2 < len(found.tests) <= CURVE
    assert CURVE / 2 < len(found.losses) <= CURVE
    assert len(found.speeds) == module.SPEEDS
    assert found.losses[0].loss == 1.0
    assert found.losses[-1].version == updates
    assert found.time_to(0.5) == pytest.approx(found.summary.seconds / 2, rel=0.02)
    assert SEGMENTS / 2 < len(found.segments) <= SEGMENTS
    assert ordered(found)
    begin, end = found.window
    assert begin == pytest.approx(found.summary.seconds / 2)
    assert {s.kind for s in found.segments} == {"compute"}
    for worker in range(4):  # without a gap: they never stand still
        mine = sum(s.end - s.start for s in found.segments if s.worker == worker)
        assert mine == pytest.approx(end - begin)
    for speed in found.speeds:
        assert speed.samples_per_second == pytest.approx(found.ideal, rel=0.02)


def test_speeds_add_up_to_the_samples(tmp_path: Path) -> None:
    for updates in (1, 3, 10, 57, 1000):
        path = folder(tmp_path, [], workers=4, samples=4 * updates)
        long_log(path / "log.jsonl", updates)
        found = digest(path)
        times = [0.0, *(speed.time for speed in found.speeds)]
        total = sum(
            s.samples_per_second * (s.time - before)
            for s, before in zip(found.speeds, times, strict=False)
        )
        assert total == pytest.approx(4 * updates)
        assert times[-1] == pytest.approx(found.summary.seconds)
        assert len(found.speeds) <= max(1, updates // module.PER_SPEED)


def test_a_long_last_line_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "TAIL", 16)
    lines = [update(float(t), part(sequence=t), version=t) for t in range(8)]
    found = digest(folder(tmp_path, lines))
    assert found.speeds[-1].time == pytest.approx(7.0)


def test_events_are_bounded(tmp_path: Path) -> None:
    refuse = {"kind": "refuse", "worker": 0, "incarnation": 1, "sequence": 0}
    found = digest(folder(tmp_path, [refuse | {"time": t} for t in range(EVENTS + 50)]))
    assert [e.time for e in found.events] == list(range(EVENTS))
    assert found.summary.refused == EVENTS + 50


@examples(50)
@given(st.lists(st.floats(-10, 10), max_size=60), st.integers(4, 20))
def test_a_thinned_curve_keeps_its_ends_and_extremes(losses: list[float], most: int) -> None:
    steps = [Step(float(i), i, i, loss) for i, loss in enumerate(losses)]
    thin = thinned(steps, most, lambda step: step.loss)
    assert len(thin) <= most
    assert thin == steps or len(steps) > most
    assert [s.version for s in thin] == sorted({s.version for s in thin})
    if steps:
        assert (thin[0], thin[-1]) == (steps[0], steps[-1])
        kept = [s.loss for s in thin]
        assert (min(kept), max(kept)) == (min(losses), max(losses))


def test_records_have_the_fields_that_these_tests_write() -> None:
    line = json.dumps(update(1.0, part())).encode()
    record = decode(line)[0]
    assert isinstance(record, Updated)
    assert isinstance(record.parts[0], Part)
    assert not isinstance(record, Evaluated)


def test_figures_of_processes_are_worked_out_again(tmp_path: Path) -> None:
    mine = {"steps": 10, "busy": 0.1, "total": 0.2, "nbytes": 8, "idle_share": 0.0}
    told = {"layout": "pp=2", "processes": 2, "seconds": 9.0, "per_process": [mine, mine]}
    place = folder(tmp_path, [update(1.0, part())])
    (place / "summary.json").write_text(json.dumps({"layout": told}))
    found = digest(place).summary.layout
    assert found is not None
    assert found.seconds == pytest.approx(0.02)
    assert found.idle_share == pytest.approx(0.5)
    told["per_process"] = [mine, mine | {"busy": 1e300}]
    (place / "summary.json").write_text(json.dumps({"layout": told}))
    found = digest(place).summary.layout
    assert found is not None
    assert found.seconds is None


# ---------------------------------------------------------------- links


def link(time: float, worker: int = 0, host: str = "lab2") -> dict[str, Any]:
    more = {"host": host, "round_trip": 0.5, "connections": 4}
    return {"kind": "link", "time": time, "worker": worker, **more}


def wire(time: float, **given: Any) -> dict[str, Any]:
    return {"kind": "wire", "time": time, "worker": 0, **given}


def test_what_links_have_measured_adds_up(tmp_path: Path) -> None:
    lines = [
        link(0),
        wire(1, round_trip=0.02, sent=1000, received=2000, large_sent=600, sent_in=2.0),
        update(2, part()),
        wire(9, round_trip=0.04, sent=10, large_sent=1400, sent_in=2.0, large_received=50,
             received_in=0.5),
    ]  # fmt: skip
    summary = digest(folder(tmp_path, lines)).summary
    mine = summary.per_worker[0].link
    assert mine is not None
    assert (mine.host, mine.sent, mine.received) == ("lab2", 1010, 2000)
    assert mine.round_trip == pytest.approx(0.03)
    assert (mine.up, mine.down, mine.transfers) == (500.0, 100.0, 4.5)
    assert summary.per_worker[1].link is None
    assert summary.wire_bytes == 3010
    assert summary.seconds == 2.0  # the last figures come when all is over


def test_a_log_from_before_links_were_measured_is_read(tmp_path: Path) -> None:
    path = folder(tmp_path, [link(0), update(2, part())])
    (path / "summary.json").write_text('{"wire_bytes": 77, "turned_away": 3}')
    summary = digest(path).summary
    mine = summary.per_worker[0].link
    assert mine is not None
    assert (mine.host, mine.round_trip, mine.sent) == ("lab2", 0.5, 0)
    assert (summary.wire_bytes, summary.turned_away) == (77, 3)


def test_what_a_tally_goes_back_to_has_links_of_its_own() -> None:
    tally = Tally(1)
    tally.see(Linked(0.0, 0, "lab2", 0.5, 4))
    kept = tally.copy()
    tally.see(Measured(1.0, 0, 0.02, 100, 50))
    (mine,) = kept.figures
    assert mine.link is not None
    assert (mine.link.sent, mine.link.round_trip) == (0, 0.5)
    kept.see(Measured(1.0, 0, 0.04))
    assert mine.link.round_trip == 0.04
