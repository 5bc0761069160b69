"""The description of a simulated cluster: values, TOML, and what it refuses."""

import dataclasses
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.engine.sim.cluster import Cluster, Failure, Machine, Pause
from offbeat.engine.sim.compute_times import (
    Constant,
    Exponential,
    LogNormal,
    Normal,
    Trace,
    distribution,
)
from offbeat.errors import ConfigError


def refused(*parts: str):
    """Expect a ConfigError whose message has all of `parts`, in this order."""
    return pytest.raises(ConfigError, match="(?s)" + ".*".join(re.escape(part) for part in parts))


# ---------------------------------------------------------------- machines and clusters


def test_the_defaults_of_a_machine():
    machine = Machine(Constant(0.02))
    assert (machine.bandwidth, machine.latency, machine.joins_at) == (math.inf, 0.0, 0.0)
    assert (machine.pauses, machine.failures) == ((), ())


def test_faults_are_put_in_order():
    machine = Machine(
        Constant(1.0),
        pauses=[Pause(5.0, 1.0), Pause(1.0, 2.0)],
        failures=[Failure(9.0), Failure(2.0, 3.0)],
    )
    assert machine.pauses == (Pause(1.0, 2.0), Pause(5.0, 1.0))
    assert machine.failures == (Failure(2.0, 3.0), Failure(9.0, None))
    assert [pause.until for pause in machine.pauses] == [3.0, 6.0]
    assert [failure.until for failure in machine.failures] == [5.0, math.inf]


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: Pause(-1.0, 1.0), ("start of a pause", "zero or more")),
        (lambda: Pause(1.0, 0.0), ("length of a pause", "above zero")),
        (lambda: Failure(math.inf), ("time of a failure", "finite")),
        (lambda: Failure(1.0, 0.0), ("until a failed worker returns", "above zero")),
        (lambda: Machine("20ms"), ("must be a distribution, got '20ms'", "Constant(0.02)")),
        (lambda: Machine(Constant(1.0), bandwidth=0.0), ("bandwidth must be above zero",)),
        (lambda: Machine(Constant(1.0), latency=-1.0), ("latency", "zero or more")),
        (lambda: Machine(Constant(1.0), overhead=-1.0), ("overhead", "zero or more")),
        (lambda: Machine(Constant(1.0), joins_at=math.nan), ("joins", "finite")),
        (
            lambda: Machine(Constant(1.0), pauses=(Pause(1.0, 2.0), Pause(2.0, 1.0))),
            ("the pause at 2s begins before the one at 1s is over", "move one"),
        ),
        (
            lambda: Machine(Constant(1.0), failures=(Failure(1.0), Failure(2.0))),
            ("the failure at 2s begins before the one at 1s is over",),
        ),
        (
            lambda: Machine(Constant(1.0), failures=(Failure(1.0, 1.0),), joins_at=1.5),
            ("the failure at 1s comes before the worker joins at 1.5s", "write a later time"),
        ),
        (lambda: Cluster(()), ("at least one worker", "[[worker]]")),
        (lambda: Cluster((Constant(1.0),)), ("machine 0 of the cluster", "write Machine(")),
        (lambda: Cluster((Machine(Constant(1.0)),), apply=-1.0), ("apply",)),
        (lambda: Cluster((Machine(Constant(1.0)),), patience=0.0), ("patience", "above zero")),
        (lambda: Cluster.equal(0), ("workers must be a whole number from 1", "got 0")),
        (lambda: Cluster.equal(True), ("workers must be a whole number", "got True")),
        (lambda: Cluster.with_straggler(4, slower=0.5), ("slower must be 1 or more",)),
        (lambda: Cluster.with_straggler(4, slower=math.inf), ("slower must be 1 or more",)),
        (lambda: Cluster.parse(""), ('worker 1 of "": "" is no duration',)),
        (lambda: Cluster.parse("20ms,,1s"), ('worker 2 of "20ms,,1s": "" is no duration',)),
        (lambda: Cluster.parse("20ms,normal:1s"), ('worker 2 of "', "must give mean and std")),
    ],
)
def test_what_machines_and_clusters_refuse(make, parts):
    with refused(*parts):
        make()


def test_equal():
    cluster = Cluster.equal(3, compute="normal:20ms,2ms")
    assert cluster.machines == (Machine(Normal(0.02, 0.002)),) * 3
    assert len(cluster) == 3
    assert (cluster.apply, cluster.patience) == (0.0, 5.0)
    assert Cluster.equal(1).machines[0].compute == Constant(0.02)


def test_with_straggler():
    computes = [machine.compute for machine in Cluster.with_straggler(3).machines]
    assert computes == [Constant(0.02), Constant(0.02), Constant(0.08)]
    alone = Cluster.with_straggler(1, slower=2, compute=Exponential(1.0))
    assert [machine.compute for machine in alone.machines] == [Exponential(2.0)]


def test_parse():
    assert Cluster.parse("20ms,20ms,20ms,80ms") == Cluster.with_straggler(4)
    mixed = Cluster.parse("20ms, normal:20ms,2ms, exponential:1s,lognormal:1s,0.5, 3s")
    assert [machine.compute for machine in mixed.machines] == [
        Constant(0.02),
        Normal(0.02, 0.002),
        Exponential(1.0),
        LogNormal(1.0, 0.5),
        Constant(3.0),
    ]


def test_values_are_frozen_and_hashable():
    cluster = Cluster.equal(2)
    assert hash(cluster) == hash(Cluster.equal(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.apply = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.machines[0].compute.seconds = 1.0


# ---------------------------------------------------------------- TOML

EVERYTHING = """
apply = "1ms"
patience = 2.5

[[worker]]
compute = "20ms"
count = 2

[[worker]]
compute = "trace:times.txt"
overhead = "3ms"
bandwidth = "100MB/s"
latency = "500us"
joins_at = 3
pauses = [{at = "10s", lasting = "1s"}]
failures = [{at = 20, returns_after = "1m"}, {at = 100}]
"""


def test_from_toml(tmp_path):
    folder = tmp_path / "described"
    folder.mkdir()
    (folder / "times.txt").write_text("0.1\n0.2\n")
    (folder / "cluster.toml").write_text(EVERYTHING)
    usual = Machine(Constant(0.02))
    late = Machine(
        Trace((0.1, 0.2)),
        bandwidth=1e8,
        latency=0.0005,
        pauses=(Pause(10.0, 1.0),),
        failures=(Failure(20.0, 60.0), Failure(100.0)),
        joins_at=3.0,
        overhead=0.003,
    )
    expected = Cluster((usual, usual, late), apply=0.001, patience=2.5)
    assert Cluster.from_toml(folder / "cluster.toml") == expected
    assert Cluster.from_toml(str(folder / "cluster.toml")) == expected


def test_to_toml_is_pleasant_to_read():
    cluster = Cluster(
        (
            *Cluster.equal(3).machines,
            Machine(LogNormal(0.08, 0.3), 1e8, 0.002, (Pause(1.0, 0.5),), (Failure(3.0),), 0.25),
        ),
        apply=0.001,
    )
    assert cluster.to_toml() == (
        'apply = "1ms"\npatience = "5s"\n'
        '\n[[worker]]\ncompute = "20ms"\ncount = 3\n'
        '\n[[worker]]\ncompute = "lognormal:80ms,0.3"\n'
        "bandwidth = 100000000.0  # bytes a second\n"
        'latency = "2ms"\njoins_at = "250ms"\n'
        'pauses = [{at = "1s", lasting = "500ms"}]\nfailures = [{at = "3s"}]\n'
    )


def test_workers_that_are_apart_keep_their_places():
    cluster = Cluster.parse("1s,2s,1s,1s")
    assert Cluster.from_toml_text(cluster.to_toml()) == cluster


TIMES = st.floats(0, 1e8)  # several of them are added up
POSITIVE = st.floats(1e-300, 1e8)
DISTRIBUTIONS = st.one_of(
    st.builds(Constant, POSITIVE),
    st.builds(Normal, POSITIVE, TIMES),
    st.builds(LogNormal, POSITIVE, st.floats(0, 10)),
    st.builds(Exponential, POSITIVE),
    st.builds(Trace, st.lists(POSITIVE, min_size=1, max_size=4).map(tuple)),
)


@st.composite
def machines(draw):
    joins_at = draw(TIMES)
    # Whole steps after joining keep faults apart, at odd floats all the same.
    lasting, later = draw(st.floats(1e-3, 1.0)), draw(st.booleans())
    return Machine(
        draw(DISTRIBUTIONS),
        draw(st.floats(1e-300, math.inf, exclude_min=True)),
        draw(TIMES),
        tuple(Pause(joins_at + 3 * i, lasting) for i in range(draw(st.integers(0, 2)))),
        (Failure(joins_at, lasting), Failure(joins_at + 2)) if later else (),
        joins_at,
        overhead=draw(TIMES),
    )


@settings(deadline=None, max_examples=50)
@given(
    cluster=st.builds(
        Cluster,
        st.lists(machines(), min_size=1, max_size=3).map(lambda some: (*some, some[-1])),
        apply=TIMES,
        patience=POSITIVE,
    )
)
def test_every_cluster_survives_its_toml(cluster):
    assert Cluster.from_toml_text(cluster.to_toml()) == cluster


@settings(deadline=None, max_examples=50)
@given(value=st.one_of(DISTRIBUTIONS).filter(lambda value: not isinstance(value, Trace)))
def test_every_string_form_reads_back(value):
    assert distribution(str(value)) == value


WORKER = '[[worker]]\ncompute = "20ms"\n'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("aply = 1\n" + WORKER, ('c.toml: unknown key "aply"', "did you mean 'apply'")),
        ("colour = 1\n" + WORKER, ('unknown key "colour"; there are apply, patience, worker',)),
        (
            WORKER + WORKER + 'bandwith = "1GB/s"',
            ('c.toml: worker 2: unknown key "bandwith"', "did you mean 'bandwidth'"),
        ),
        (
            WORKER + "pauses = [{at = 1, lasting = 1}, {at = 5, lastin = 1}]",
            ('c.toml: worker 1: pauses 2: unknown key "lastin"', "did you mean 'lasting'"),
        ),
        (WORKER + "pauses = [{at = 1}]", ('worker 1: pauses 1: the key "lasting" is missing',)),
        (
            WORKER + "failures = [{returns_after = 1}]",
            ('worker 1: failures 1: the key "at" is missing', "write at ="),
        ),
        (WORKER + "failures = 3", ("worker 1: failures: must be a list of tables, got 3",)),
        (
            WORKER + "failures = [3]",
            ("failures 1: must be a table with the keys at, returns_after, got 3",),
        ),
        ("worker = 3", ("c.toml: worker: must be a list of tables, got 3",)),
        ("apply = 0\npatience = = 3", ("c.toml: not valid TOML", "line 2", "correct that line")),
        ("", ("c.toml: a cluster needs at least one worker", "[[worker]]")),
        ("[[worker]]\ncount = 2", ('worker 1: the key "compute" is missing', 'compute = "20ms"')),
        ("patience = 0\n" + WORKER, ("c.toml: patience must be above zero",)),
        ("patience = inf\n" + WORKER, ("c.toml: patience: a duration must be finite",)),
        ("apply = -1\n" + WORKER, ("c.toml: apply: a duration must be zero or more",)),
        (WORKER + "latency = -0.1", ("worker 1: latency: a duration must be zero or more",)),
        (WORKER + "joins_at = nan", ("worker 1: joins_at: a duration must be finite",)),
        (WORKER + "bandwidth = 0", ("worker 1: bandwidth: a bandwidth must be above zero",)),
        (
            WORKER + "count = 0",
            ("worker 1: count: the number of workers must be a whole number from 1",),
        ),
        (WORKER + "count = 2.0", ("must be a whole number", "got 2.0")),
        (
            WORKER + "count = 1000000\n" + WORKER,
            (
                "c.toml: a cluster has at most 1000000",
                "smaller counts",
            ),
        ),
        ('[[worker]]\ncompute = "soon"', ('worker 1: compute: "soon" is no duration',)),
        ("[[worker]]\ncompute = {mean = 1}", ("worker 1: compute: a duration must be a number",)),
        ('[[worker]]\ncompute = "trace:gone"', ("worker 1: compute: cannot read", "gone")),
        (
            WORKER + "joins_at = 2\npauses = [{at = 1, lasting = 1}]",
            ("c.toml: worker 1: the pause at 1s comes before the worker joins at 2s",),
        ),
        (
            WORKER + "failures = [{at = 1, returns_after = 0}]",
            ("worker 1: failures 1: the time until a failed worker returns must be above zero",),
        ),
    ],
)
def test_errors_name_the_place_and_the_remedy(tmp_path, text, parts):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with refused(*parts) as caught:
        Cluster.from_toml(path)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with refused("cannot read", "absent.toml", "No such file", "existing file"):
        Cluster.from_toml(tmp_path / "absent.toml")
    with refused("cannot read", "directory"):
        Cluster.from_toml(tmp_path)
    (tmp_path / "odd.toml").write_bytes(b"apply = '\xff'")
    with refused("cannot read", "odd.toml", "not text in UTF-8"):
        Cluster.from_toml(tmp_path / "odd.toml")


def test_errors_in_text_without_a_file():
    with refused('worker 1: the key "compute" is missing'):
        Cluster.from_toml_text("[[worker]]")
