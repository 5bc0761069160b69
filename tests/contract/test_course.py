"""A discipline that changes while the run goes: the same bits from the log, through every turn."""

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.discipline.course import Course, as_course
from offbeat.log.log import read
from offbeat.log.records import Lost, Turned, Updated
from tests.contract.common import (
    CODECS,
    Records,
    Stop,
    StopAfter,
    assert_same_bits,
    check_run,
    clusters,
    examples,
    problem,
    run,
    scratch,
    seeds,
)

UNEVEN = ob.Cluster.parse("10ms,13ms,31ms")
STAGES = [
    *("bsp", "asp", "ssp:0", "ssp:2", "soft:2", "asp:weigh=inverse", "rennala:2,redo=yes"),
    *("ringmaster:2,redo=yes", "bsp:backup=1,redo=yes"),
]
SUMS = [f"custom:send=accumulated(push=2,fetch=2),gather={one}" for one in ("count", "count(k=2)")]
PERIODS = ["local:3", "local:1"]
SPRINGS = ["easgd:3", "easgd:1"]
CHANGES = ["local:2", "custom:send=change(every=2),gather=count,apply=rule(sgd)"]


def turning(seed: int, turns: int, every: int = 2) -> Course:
    """So many turns, each a few versions after the one before, to anything and at any rate."""
    rng = random.Random(seed)
    version, made = 0, []
    for _ in range(turns):
        version += rng.randrange(1, every + 1)
        made.append(ob.Turn(rng.choice(STAGES), f"v{version}", rng.choice([0.5, 1.0, None])))
    return ob.Switch(rng.choice(STAGES), *made)


def turns_of(records: list[Any]) -> list[Turned]:
    return [record for record in records if isinstance(record, Turned)]


# ---------------------------------------------------------------- identities


@pytest.mark.parametrize("name", ["asp", "bsp", "ssp:1", "soft:2", "ringmaster:2", "local:2"])
@pytest.mark.parametrize("at", ["25%", "v2"])
def test_a_turn_to_the_same_changes_nothing(sim_only, name, at):
    """In virtual time, where the order of two runs is the same."""
    seen, same = Records(), Records()
    what = problem(samples=52)
    fixed = run(sim_only, what, name, cluster=UNEVEN, listeners=[seen])
    turned = run(sim_only, what, f"switch:{name},{name},at={at}", cluster=UNEVEN, listeners=[same])
    assert_same_bits(fixed.model, turned.model)
    assert len(turns_of(same.all)) == 1
    assert [record for record in same.all if not isinstance(record, Turned)] == seen.all


@pytest.mark.parametrize("name", ["asp", "bsp"])
def test_before_a_turn_it_is_as_if_there_were_none(sim_only, name):
    other = "bsp" if name == "asp" else "asp"
    seen, same = Records(), Records()
    what = problem(samples=52)
    run(sim_only, what, name, cluster=UNEVEN, listeners=[seen])
    run(sim_only, what, f"switch:{name},{other},at=50%", cluster=UNEVEN, listeners=[same])
    (turn,) = turns_of(same.all)
    until = same.all.index(turn)
    assert until > 10
    assert same.all[:until] == seen.all[:until]


def test_the_rate_of_a_turn_multiplies_the_optimisers(sim_only):
    """A rate of nothing leaves parameters where they were; half a rate goes half as far."""
    what = problem(samples=24)
    half = run(sim_only, what, "switch:asp,asp,at=v3,rate=0", workers=1, epochs=1, seed=3)
    short = run(sim_only, what, "asp", workers=1, epochs=1, seed=3, listeners=[(seen := Records())])
    assert [u.rate for u in seen.of(Updated)] == [1.0] * 6
    late = run(sim_only, what, "switch:asp,asp,at=v3,rate=0.5", workers=1, epochs=1, seed=3)
    assert len({r.parameter_hash for r in (half, short, late)}) == 3
    stopped = Records()
    run(
        sim_only, what, "switch:asp,asp,at=v3,rate=0", workers=1, epochs=1, seed=3,
        listeners=[stopped], hash_every=1,
    )  # fmt: skip
    hashes = [u.hash for u in stopped.of(Updated)]
    assert len({*hashes[2:]}) == 1
    assert len({*hashes[:3]}) == 3
    assert [u.rate for u in stopped.of(Updated)] == [1.0] * 3 + [0.0] * 3


# ---------------------------------------------------------------- what holds after a turn


def test_after_a_turn_the_new_discipline_holds(sim_only):
    """Free, then in lock-step: what was under way is late by then, and all that follows is not."""
    records = Records()
    run(
        sim_only, problem(samples=120), "switch:asp,bsp,at=40%", cluster=UNEVEN, listeners=[records]
    )
    (turn,) = turns_of(records.all)
    after = [r for r in records.of(Updated) if r.version > turn.version]
    assert {len(r.parts) for r in after[:-1]} == {3}
    assert any(part.staleness for part in after[0].parts)
    assert not any(part.staleness for r in after[1:] for part in r.parts)
    before = [r for r in records.of(Updated) if r.version <= turn.version]
    assert {len(r.parts) for r in before} == {1}
    assert (turn.rate, turn.why) == (3.0, "40 % of the work is done")


def test_slack_is_counted_from_the_turn(sim_only):
    """The fast ones need not wait until the slow one has made up for the past."""
    records = Records()
    run(
        sim_only, problem(samples=200), "switch:asp,ssp:1,at=50%", cluster=ob.Cluster.parse(
            "10ms,10ms,80ms"
        ), listeners=[records],
    )  # fmt: skip
    (turn,) = turns_of(records.all)
    steps = [0, 0, 0]
    first = next(r for r in records.of(Updated) if r.version > turn.version)
    assert first.time - turn.time < 0.02
    for record in records.of(Updated):
        if record.version > turn.version:
            for part in record.parts:
                steps[part.worker] += len(part.leases)
            if record.parts[0].leases[0].epoch == 1 and record.time < 0.9 * records.all[-1].time:
                assert max(steps) - min(steps) <= 2  # slack, and the step under way


def test_workers_are_told_how_many_steps_come_next(sim_only):
    records = Records()
    run(
        sim_only, problem(samples=160), "switch:local:1,local:4,at=v5,local:2,at=v8", workers=2,
        listeners=[records],
    )  # fmt: skip
    steps = {r.version: {len(p.leases) for p in r.parts} for r in records.of(Updated)}
    assert [steps[version] for version in range(1, 10)] == [{1}] * 5 + [{4}] * 3 + [{2}]
    assert [turn.rate for turn in turns_of(records.all)] == [1.0, 1.0]


# ---------------------------------------------------------------- replay and faults


@examples(4)
@given(cluster=clusters(faults=True), seed=seeds, codec=st.sampled_from(CODECS))
def test_replay_through_fifty_random_turns(sim_only, cluster, seed, codec):
    """With workers that come late, stand still, die and come back between them."""
    course = _possible(turning(seed, 50), len(cluster))
    what = problem(samples=96)
    with scratch() as folder:
        out = folder / "run"
        run(
            sim_only, what, course, cluster=cluster, seed=seed, codec=codec, out=out, epochs=6,
            hash_every=1,
        )  # fmt: skip
        records = check_run(out, what, 6)
    made = turns_of(records)
    assert [turn.stage for turn in made] == list(range(1, len(made) + 1))
    assert [turn.discipline for turn in made] == [str(t.discipline) for t in course.turns][
        : len(made)
    ]


def _possible(course: Course, workers: int) -> Course:
    """Without what so few workers cannot do."""

    def fits(one: ob.Discipline) -> ob.Discipline:
        try:
            one.for_workers(workers)
        except ob.ConfigError:
            return ob.ASP()
        return one

    turns = [ob.Turn(fits(turn.to), turn.at, turn.rate) for turn in course.turns]
    return ob.Switch(fits(course.first), *turns)


@pytest.mark.parametrize(
    "stages",
    [SUMS, CHANGES, PERIODS, SPRINGS],
    ids=["sums", "changes", "periods", "springs"],
)
def test_others_that_send_the_same(engine, stages, tmp_path):
    what, one, two = problem(samples=144), *stages
    run(engine, what, f"switch:{one},{two},at=v4,{one},at=v9", cluster=UNEVEN, out=tmp_path / "a")
    assert len(turns_of(check_run(tmp_path / "a", what))) == 2


def test_hosts_obey_a_turn(real, tmp_path):
    what = problem(samples=72)
    run(real, what, "switch:asp,bsp,at=v5,ssp:1,at=70%", workers=2, out=tmp_path / "a")
    assert len(turns_of(check_run(tmp_path / "a", what))) == 2


def test_replicas_of_several_processes_obey_a_turn(local_only, tmp_path):
    what = problem(samples=72)
    run(
        local_only, what, "switch:bsp,asp,at=30%,soft:2,at=60%", workers=2, out=tmp_path / "a",
        layout="pp=2,microbatches=2", shards=2,
    )  # fmt: skip
    assert len(turns_of(check_run(tmp_path / "a", what))) == 2


# ---------------------------------------------------------------- stopped and resumed


@examples(4)
@given(
    cluster=clusters(faults=True, least=2),
    seed=seeds,
    every=st.integers(1, 5),
    stops=st.lists(st.integers(1, 120), min_size=1, max_size=3),
)
def test_stopped_anywhere_and_resumed(sim_only, cluster, seed, every, stops):
    course, what = _possible(turning(seed, 12, 3), len(cluster)), problem(samples=60)
    options: Any = {"cluster": cluster, "seed": seed, "checkpoint_every": every, "epochs": 3}
    with scratch() as folder:
        whole = run(sim_only, what, course, out=folder / "whole", **options)
        out = folder / "stopped"
        for index, records in enumerate(stops):
            with suppress(Stop):
                listeners = [StopAfter(records)]
                run(
                    sim_only,
                    what,
                    course,
                    out=out,
                    resume=index > 0,
                    listeners=listeners,
                    **options,
                )
        again = run(sim_only, what, course, out=out, resume=True, **options)
        logs = [(one / "log.jsonl").read_bytes() for one in (folder / "whole", out)]
        assert logs[0] == logs[1]
        assert again.summary() == whole.summary()
        check_run(out, what, 3)


def test_another_course_is_another_run(sim_only, tmp_path):
    options: Any = {"cluster": UNEVEN, "out": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(Stop):
        run(sim_only, problem(), "switch:bsp,asp,at=25%", listeners=[StopAfter(12)], **options)
    with pytest.raises(ob.CheckpointError, match=r"discipline is switch:bsp,asp,at=50% here"):
        run(sim_only, problem(), "switch:bsp,asp,at=50%", resume=True, **options)


# ---------------------------------------------------------------- a log that was altered


def _doctored(folder: Path, change: Any) -> Path:
    """The same log with its records changed, as a folder of before, which has no checksums."""
    copied = folder.parent / "copy"
    shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("checkpoints"))
    (copied / "manifest.json").unlink()
    config = json.loads((copied / "run.json").read_text())
    del config["run"]
    (copied / "run.json").write_text(json.dumps(config))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    kept = [line for line in lines if "kind" in line]
    (copied / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in change(kept)))
    return copied


def _late(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turn comes after the next update."""
    place = next(i for i, line in enumerate(lines) if line["kind"] == "turn")
    turn = lines.pop(place)
    after = next(i for i in range(place, len(lines)) if lines[i]["kind"] == "update")
    lines.insert(after + 1, turn | {"version": turn["version"] + 1})
    return lines


def _with_turn(**changed: Any) -> Any:
    return lambda lines: [one | changed if one["kind"] == "turn" else one for one in lines]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_late, "the course turns to asp here, and the log does not"),
        (_with_turn(discipline="ssp:3"), "the log turns to ssp:3 at version"),
        (_with_turn(rate=0.9), "with rate 0.9, the course to asp,at=50%"),
        (_with_turn(stage=2), "and the course does not"),
        (lambda lines: [one for one in lines if one["kind"] != "turn"], "turns to asp here"),
    ],
)  # fmt: skip
def test_a_replay_finds_a_turn_that_was_altered(sim_only, change, says, tmp_path):
    what = problem(samples=52)
    run(sim_only, what, "switch:bsp,asp,at=50%", cluster=UNEVEN, out=tmp_path / "run")
    found = ob.replay(_doctored(tmp_path / "run", change), *what)
    assert found.difference is not None
    assert says in found.difference.reason


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"via": "allreduce", "discipline": "switch:bsp,local:1,at=5%"}, "do not send the same"),
        ({"via": "allreduce"}, "no store at which the discipline could change"),
        ({"overlap": True, "discipline": "switch:asp,rennala:2,at=5%"}, "drops what is late"),
        ({"layout": "pp=2,schedule=2bw", "discipline": "switch:asp,rennala:2,at=5%"}, "drops one"),
        ({"discipline": "switch:asp,soft:9,at=5%"}, "cannot gather 9 contributions from 2 workers"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_at_once(local_only, options, says):
    options = {"discipline": "switch:bsp,asp,at=50%", "workers": 2} | options
    with pytest.raises(ob.ConfigError, match=says):
        run(local_only, problem(), **options)


def test_texts_of_a_run_read_back(sim_only, tmp_path):
    text = "switch:bsp,asp:weigh=inverse,at=25%,rate=0.5"
    run(sim_only, problem(), text, workers=2, out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["discipline"] == text
    assert str(as_course(text)) == text
    records = list(read(tmp_path / "run" / "log.jsonl"))
    assert [turn.discipline for turn in turns_of(records)] == ["asp:weigh=inverse"]
    assert not any(isinstance(record, Lost) for record in records)
