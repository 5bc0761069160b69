"""Compute times: text forms, distributions, and paces that do not remember."""

import copy
import math
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config.units import bandwidth, duration
from offbeat.engine.sim.compute_times import (
    ComputeTimes,
    Constant,
    Exponential,
    LogNormal,
    Normal,
    Trace,
    distribution,
)
from offbeat.errors import ConfigError

RANDOM = [Normal(0.02, 0.002), LogNormal(0.02, 0.3), Exponential(0.02)]


def refused(*parts: str):
    """Expect a ConfigError whose message has all of `parts`, in this order."""
    return pytest.raises(ConfigError, match="(?s)" + ".*".join(re.escape(part) for part in parts))


# ---------------------------------------------------------------- durations and bandwidths


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("250us", 0.00025),
        ("1.5s", 1.5),
        ("2m", 120.0),
        ("0.5", 0.5),
        (" 3 ms ", 0.003),
        (".5s", 0.5),
        ("2e1ms", 0.02),
        (0.25, 0.25),
        (3, 3.0),
        (0, 0.0),
        (np.float32(0.5), 0.5),
    ],
)
def test_duration(text, seconds):
    assert duration(text) == seconds
    assert type(duration(text)) is float


@pytest.mark.parametrize("text", ["", "ms", "20 minutes", "1.2.3s", "20MS", "inf", "nan", "1h"])
def test_text_that_is_no_duration(text):
    with refused(f'"{text}" is no duration', 'write for example "20ms"'):
        duration(text)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("-1s", "zero or more"),
        (-0.5, "zero or more"),
        (math.inf, "finite"),
        (math.nan, "finite"),
        ("1e999s", "finite"),
        (True, "a number"),
        (None, "a number"),
        (10**400, "a number"),
        ([1], "a number"),
    ],
)
def test_durations_out_of_range(value, complaint):
    with refused("duration", complaint, "write seconds"):
        duration(value)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100MB/s", 1e8),
        ("1GB/s", 1e9),
        ("1Gbit/s", 1.25e8),
        ("8kbit/s", 1e3),
        ("5KB/s", 5e3),
        ("7B/s", 7.0),
        ("2.5 MB/s", 2.5e6),
        ("1000", 1000.0),
        (12, 12.0),
        ("inf", math.inf),
        (math.inf, math.inf),
    ],
)
def test_bandwidth(text, rate):
    assert bandwidth(text) == rate


@pytest.mark.parametrize(
    "value", ["100mb/s", "fast", "", "1GB", "0MB/s", "-1GB/s", 0, -5, math.nan]
)
def test_bandwidths_refused(value):
    with refused("bandwidth", 'write for example "100MB/s"'):
        bandwidth(value)


def test_a_bandwidth_that_is_no_number_is_refused():
    with refused("a bandwidth must be a number, got True"):
        bandwidth(True)


# ---------------------------------------------------------------- distributions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20ms", Constant(0.02)),
        (0.02, Constant(0.02)),
        ("normal:20ms,2ms", Normal(0.02, 0.002)),
        ("normal: 20ms, 2ms", Normal(0.02, 0.002)),
        ("lognormal:20ms,0.3", LogNormal(0.02, 0.3)),
        ("exponential:20ms", Exponential(0.02)),
        ([0.01, "20ms"], Trace((0.01, 0.02))),
        (Exponential(1.0), Exponential(1.0)),
    ],
)
def test_reading_a_distribution(text, value):
    assert distribution(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Constant(0.02), "20ms"),
        (Normal(0.02, 0.0), "normal:20ms,0s"),
        (LogNormal(1.5, 0.3), "lognormal:1.5s,0.3"),
        (Exponential(0.00025), "exponential:250us"),
        (Trace((1.0, 2.0)), "trace of 2"),
    ],
)
def test_writing_a_distribution(value, text):
    assert str(value) == text


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("normal:20ms", ('"normal:20ms" must give mean and std', 'write "normal:20ms,2ms"')),
        ("exponential:1s,2s", ("must give mean;", 'write "exponential:20ms"')),
        ("norml:20ms,2ms", ('"norml" is no distribution', "did you mean 'normal'", "trace:FILE")),
        ("lognormal:20ms,x", ('"x" is no number', "0.3")),
        ("lognormal:20ms,300ms", ('"300ms" is no number', "0.3")),
        ("normal:0,1ms", ("the mean of a compute time must be above zero",)),
        ("normal:1s,-1s", ("zero or more",)),
        ("0ms", ("the seconds of a compute time must be above zero",)),
        ("quick", ('"quick" is no duration',)),
        ([], ("a trace needs at least one compute time",)),
        ([0.1, 0], ("time 2 of a trace must be above zero",)),
        (None, ("a duration must be a number, got None",)),
    ],
)
def test_distributions_refused(value, parts):
    with refused(*parts):
        distribution(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant("20ms"),
        lambda: Constant(math.inf),
        lambda: Normal(math.nan, 0.1),
        lambda: Normal(0.1, math.inf),
        lambda: LogNormal(0.0, 0.1),
        lambda: LogNormal(0.1, -0.1),
        lambda: LogNormal(0.1, 11),
        lambda: LogNormal(0.1, math.nan),
        lambda: LogNormal(0.1, "wide"),
        lambda: Exponential(-1.0),
        lambda: Trace(()),
        lambda: Trace((0.1, math.nan)),
    ],
)
def test_distributions_check_their_numbers(make):
    with refused("write"):
        make()


def draws(value, count=200_000):
    return value.draw(np.random.default_rng(7), count)


@pytest.mark.parametrize(
    ("value", "mean", "std"),
    [
        (Normal(0.02, 0.002), 0.02, 0.002),
        (LogNormal(0.02, 0.3), 0.02 * math.exp(0.045), None),
        (Exponential(0.02), 0.02, 0.02),
        (Constant(0.02), 0.02, 0.0),
        (Trace((1.0, 3.0)), 2.0, 1.0),
    ],
)
def test_means_and_deviations(value, mean, std):
    if std is None:
        std = mean * math.sqrt(math.exp(value.sigma**2) - 1)
    times = draws(value)
    assert times.mean() == pytest.approx(mean, rel=0.01)
    assert times.std() == pytest.approx(std, rel=0.02, abs=1e-12)


def test_the_median_of_a_lognormal():
    assert np.median(draws(LogNormal(0.02, 1.0))) == pytest.approx(0.02, rel=0.02)


def test_a_wide_normal_never_falls_below_its_floor():
    times = draws(Normal(1.0, 5.0))
    assert times.min() == 0.01
    assert (times == 0.01).mean() == pytest.approx(0.42, abs=0.01)


@pytest.mark.parametrize("value", [*RANDOM, Constant(0.02), Trace((0.01, 0.03))])
def test_slowed_stretches_every_time(value):
    np.testing.assert_allclose(draws(value.slowed(4), 1000), 4 * draws(value, 1000), rtol=1e-12)
    assert type(value.slowed(4)) is type(value)


def test_a_trace_from_a_file(tmp_path):
    (tmp_path / "times.txt").write_text("0.01\n\n# warm now\n20ms  # slow\n")
    assert distribution("trace:times.txt", tmp_path) == Trace((0.01, 0.02))


def test_a_trace_names_the_line_that_is_wrong(tmp_path):
    path = tmp_path / "times.txt"
    path.write_text("0.01\noops\n")
    with refused(f'{path}, line 2: "oops" is no duration'):
        Trace.read(path)
    path.write_text("0.01\n0\n")
    with refused(f"{path}: time 2 of a trace must be above zero"):
        Trace.read(path)
    path.write_text("# nothing\n")
    with refused(f"{path}: a trace needs at least one"):
        Trace.read(path)
    with refused("cannot read", "absent.txt", "No such file"):
        distribution("trace:absent.txt", tmp_path)


# ---------------------------------------------------------------- paces


@settings(deadline=None, max_examples=25)
@given(
    value=st.sampled_from(RANDOM),
    seed=st.integers(0, 2**64 - 1),
    worker=st.integers(0, 10_000),
    steps=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
)
def test_a_pace_does_not_remember(value, seed, worker, steps):
    used = ComputeTimes(value, seed, worker)
    seen = [used[step] for step in steps]
    assert seen == [ComputeTimes(value, seed, worker)[step] for step in steps]


def test_a_pace_survives_copying_and_pickling_midway():
    pace = ComputeTimes(LogNormal(0.02, 0.3), 1, 2)
    ahead = [pace[step] for step in range(600)]
    for other in (copy.deepcopy(pace), pickle.loads(pickle.dumps(pace))):
        assert [other[step] for step in range(600)] == ahead


def test_seed_worker_and_block_each_change_the_times():
    seen = set()
    for seed in range(3):
        for worker in range(3):
            pace = ComputeTimes(Exponential(0.02), seed, worker)
            seen |= {pace[step] for step in range(512)}
    assert len(seen) == 9 * 512


@pytest.mark.parametrize("value", RANDOM)
def test_paces_keep_the_distribution_over_workers_and_steps(value):
    paces = [ComputeTimes(value, 3, worker) for worker in range(50)]
    times = np.array([[pace[step] for step in range(512)] for pace in paces])
    expected = draws(value)
    assert times.mean() == pytest.approx(expected.mean(), rel=0.03)
    assert times.std() == pytest.approx(expected.std(), rel=0.05)
    # Independent workers: no pair moves together more than chance allows.
    correlations = np.corrcoef(times) - np.eye(len(paces))
    assert np.abs(correlations).max() < 0.25


def test_a_pace_returns_plain_floats():
    for value in (*RANDOM, Constant(1), Trace((0.5,))):
        assert type(ComputeTimes(value, 0, 0)[300]) is float


def test_known_times_need_no_generator(monkeypatch):
    def forbidden(*_arguments, **_named):
        raise AssertionError("a generator was made")

    monkeypatch.setattr(np.random, "Philox", forbidden)
    assert [ComputeTimes(Constant(0.02), 0, 5)[step] for step in (0, 1, 10**9)] == [0.02] * 3
    trace = ComputeTimes(Trace((0.1, 0.2, 0.3)), 0, 5)
    assert [trace[step] for step in range(7)] == [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1]
    with pytest.raises(AssertionError, match="a generator was made"):
        ComputeTimes(Exponential(1.0), 0, 0)[0]


def test_one_generator_serves_a_whole_block(monkeypatch):
    made = []
    philox = np.random.Philox

    def counted(**named):
        made.append(named)
        return philox(**named)

    monkeypatch.setattr(np.random, "Philox", counted)
    pace = ComputeTimes(Exponential(1.0), 0, 0)
    for step in range(512):
        pace[step]
    assert len(made) == 2


@pytest.mark.parametrize("value", [Constant(1.0), Exponential(1.0)])
def test_a_pace_has_no_negative_steps(value):
    with pytest.raises(IndexError, match="count from 0, got -1"):
        ComputeTimes(value, 0, 0)[-1]


@pytest.mark.parametrize(("seed", "worker"), [(-1, 0), (0, -1), (2**64, 0), (0.5, 0)])
def test_a_pace_refuses_odd_seeds(seed, worker):
    with refused("of a pace must be a whole number from 0"):
        ComputeTimes(Constant(1.0), seed, worker)
