"""Runs on hosts that share links, with times worked out by hand; numbers are exact in binary."""

import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.config.job import CostJob, CostOnly
from offbeat.discipline.course import Course, as_course
from offbeat.discipline.discipline import Discipline
from offbeat.engine.sim.compute_times import Constant, Exponential
from offbeat.engine.sim.network_simulation import NetworkSimulation, simulation
from offbeat.engine.sim.simulation import Simulation
from offbeat.engine.sim.state import meta_of, restore, tensors_of
from offbeat.log.log import Log
from offbeat.log.records import Entry, Joined, Lost, Updated
from offbeat.report.summary import Summary, Tally
from tests.contract.common import (
    NAMES,
    Stop,
    StopAfter,
    check_run,
    examples,
    named,
    optimizer_for,
    paces,
    problem,
    run,
    scratch,
    seeds,
)
from tests.engine.sim.test_simulation import Watch


class Case:
    """A cost-only run of `samples` single-sample steps."""

    def __init__(self, discipline: Discipline, cluster: ob.Cluster, samples: int, nbytes: int = 0):
        self.watch, self.tally = Watch(), Tally(len(cluster))
        log = Log()
        log.listeners += [self.watch, self.tally]
        job = CostJob(CostOnly(nbytes, samples), Course(discipline), len(cluster), 1, 1)
        self.store = job.make_store(log)
        self.sim = simulation(job, cluster, self.store)

    def run(self) -> Summary:
        self.sim.start()
        while self.sim.step():
            pass
        return self.tally.summary("", "", self.store.leases.ledger.summary(), {}, "")


def on(host: str, seconds: float = 1.0, **rest: Any) -> ob.Machine:
    return ob.Machine(Constant(seconds), host=host, **rest)


def cluster(
    machines: list[ob.Machine],
    hosts: list[ob.Host],
    store: tuple[float, float] | ob.StoreLink = (math.inf, math.inf),
    regions: tuple[ob.Region, ...] = (),
    patience: float = 100.0,
    apply: float = 0.0,
) -> ob.Cluster:
    link = store if isinstance(store, ob.StoreLink) else ob.StoreLink(*store)
    network = ob.Network(tuple(hosts), link, regions, goodput=1.0)
    return ob.Cluster(tuple(machines), apply=apply, patience=patience, network=network)


# ---------------------------------------------------------------- shared links


def test_three_hosts_that_push_at_once_take_three_times_as_long() -> None:
    times = {}
    for count in (1, 3):
        hosts = [ob.Host(f"lab{n}", up=96.0, down=96.0) for n in range(count)]
        machines = [on(host.name) for host in hosts]
        case = Case(ob.BSP(), cluster(machines, hosts, (96.0, math.inf)), count, nbytes=48)
        made = case.run()
        times[count] = case.watch.times(Updated)
        # half a second for the pull, over each host's own link; then the pushes
        assert [w.communication for w in made.per_worker] == [0.5 + 0.5 * count] * count
    assert times == {1: [2.0], 3: [3.0]}


def test_as_measured_on_real_hosts() -> None:
    """102 MB at 1 Gbit/s: 0.857 s were measured alone, and 2.54 to 2.56 s with three at once."""
    text = 'store = {in = "1Gbit/s"}\n' + "".join(
        f'[[host]]\nname = "lab{n}"\nup = "1Gbit/s"\n[[worker]]\nhost = "lab{n}"\n'
        'compute = "100ms"\n'
        for n in range(3)
    )
    three = ob.estimate(ob.Cluster.from_toml_text(text), "bsp", steps=1, model_bytes=102_000_000)
    assert three.seconds - 0.1 == pytest.approx(2.55, rel=0.02)
    alone = ob.estimate(
        ob.Cluster.from_toml_text(text.split('[[host]]\nname = "lab1"')[0]),
        "bsp", steps=1, model_bytes=102_000_000,
    )  # fmt: skip
    assert alone.seconds - 0.1 == pytest.approx(0.857, rel=0.02)


def test_workers_on_a_host_share_its_link_both_ways() -> None:
    hosts = [ob.Host("lab", up=32.0, down=64.0, latency=0.25)]
    case = Case(ob.BSP(), cluster([on("lab"), on("lab")], hosts), 2, nbytes=32)
    made = case.run()
    # two pulls at 32 bytes a second each, two pushes at 16, and the latency both ways
    assert case.watch.times(Updated) == [1.0 + 0.25 + 1.0 + 2.0 + 0.25]
    assert [w.communication for w in made.per_worker] == [3.5, 3.5]


def test_goodput_is_what_is_left_of_a_bandwidth() -> None:
    network = ob.Network((ob.Host("lab", up=64.0, down=64.0),), goodput=0.5)
    made = Case(ob.ASP(), ob.Cluster((on("lab"),), network=network), 1, nbytes=32).run()
    assert made.seconds == 1.0 + 1.0 + 1.0
    assert ob.Network().goodput == 0.95


@pytest.mark.parametrize(("connections", "seconds"), [(1, 4.0), (4, 1.0), (100, 0.5)])
def test_a_window_a_round_trip_and_connection(connections: int, seconds: float) -> None:
    far = ob.Host("far", up=128.0, latency=0.25, window=8.0, connections=connections)
    made = Case(ob.ASP(), cluster([on("far")], [far]), 1, nbytes=64).run()
    down = 64 / (16 * connections)
    assert made.seconds == 0.25 + down + 1.0 + seconds + 0.25


def test_a_worker_beside_the_store_uses_no_link() -> None:
    hosts = [ob.Host("here", up=16.0, down=16.0, latency=5.0), ob.Host("there")]
    link = ob.StoreLink(host="here")
    case = Case(ob.ASP(), cluster([on("here"), on("there", 0.5)], hosts, link), 3, nbytes=16)
    case.run()
    # the other one's bytes go over the link of the host that the store is on, and it takes
    # 1 s to pull, half a second to compute and 1 s to push
    assert [(r.time, r.parts[0].worker) for r in case.watch.seen if isinstance(r, Updated)] == [
        (1.0, 0), (2.0, 0), (2.5, 1),
    ]  # fmt: skip


def test_a_worker_on_no_host_shares_the_link_of_the_store_alone() -> None:
    own = ob.Machine(Constant(1.0), bandwidth=32.0, latency=0.5)
    case = Case(
        ob.BSP(), cluster([own, on("lab")], [ob.Host("lab")], (32.0, math.inf)), 2, nbytes=16
    )
    case.run()
    # lab pulls at once and pushes from 1 to 1.5; the other pulls 1 s, and pushes from 2 on
    assert case.watch.times(Updated) == [2.0 + 0.5 + 0.5]


def test_only_the_store_may_have_a_link() -> None:
    machines = (ob.Machine(Constant(1.0)), ob.Machine(Constant(1.0)))
    network = ob.Network(store=ob.StoreLink(32.0, 64.0), goodput=1.0)
    case = Case(ob.BSP(), ob.Cluster(machines, network=network), 2, nbytes=32)
    case.run()
    assert case.watch.times(Updated) == [1.0 + 1.0 + 2.0]


def test_a_trace_changes_the_bandwidth_while_something_is_under_way() -> None:
    trace = (ob.Share(0.5, 0.25), ob.Share(2.0, 0.0), ob.Share(3.0, 1.0))
    host = ob.Host("lab", down=32.0, trace=trace)
    made = Case(ob.ASP(), cluster([on("lab")], [host]), 1, nbytes=64).run()
    # 16 bytes in the first half second, 12 until 2, none until 3, and the other 36 at 32
    assert made.seconds == 3.0 + 36 / 32 + 1.0


def test_a_pause_stops_what_its_worker_sends() -> None:
    hosts = [ob.Host("lab", up=32.0)]
    machines = [on("lab", pauses=(ob.Pause(1.5, 2.0),)), on("lab")]
    case = Case(ob.ASP(), cluster(machines, hosts), 2, nbytes=32)
    made = case.run()
    # both send at 16 bytes a second until 1.5; then the other has the link for itself
    assert case.watch.times(Updated) == [1.5 + 24 / 32, 3.5 + 24 / 32]
    assert [w.communication for w in made.per_worker] == [1.25, 1.25]


# ---------------------------------------------------------------- outages


def test_an_outage_stops_what_is_under_way_and_it_goes_on_in_the_middle() -> None:
    host = ob.Host("lab", up=48.0, down=48.0, outages=(ob.Outage(2.5, 2.0),))
    case = Case(ob.ASP(), cluster([on("lab")], [host], patience=3.0), 2, nbytes=48)
    made = case.run()
    # pull until 1, compute until 2, push half, wait for 2 s, push the other half
    assert case.watch.times(Updated) == [5.0, 8.0]
    assert made.per_worker[0].communication == 4.0 + 2.0
    assert (made.lost, made.refused, made.per_worker[0].joins) == (0, 0, 1)


def test_a_worker_computes_on_while_its_host_is_cut_off() -> None:
    host = ob.Host("lab", outages=(ob.Outage(0.5, 1.0),))
    # local steps: the second one's samples have come with the first one's
    case = Case(ob.LocalSGD(2), cluster([on("lab")], [host], patience=3.0), 2)
    case.run()
    assert case.watch.times(Updated) == [2.0]


def test_an_outage_beyond_patience_costs_what_was_under_way() -> None:
    host = ob.Host("far", outages=(ob.Outage(1.5, 4.25),))
    machines = [ob.Machine(Constant(1.0)), on("far")]
    case = Case(ob.BSP(), cluster(machines, [host], patience=1.0), 8)
    made = case.run()
    # 1: both; the other is given up at 2.5, and joins when its host is back
    assert case.watch.times(Updated) == [1.0, 2.5, 3.5, 4.5, 5.5, 6.75]
    assert case.watch.times(Lost) == [2.5]
    assert case.watch.times(Joined) == [0.0, 0.0, 5.75]
    assert made.refused == 0
    assert made.ledger[0]["applied"] == 8


def test_one_that_still_computes_when_it_is_reached_again_finds_out_afterwards() -> None:
    host = ob.Host("far", up=1.0, outages=(ob.Outage(1.0, 3.0),))
    machines = [ob.Machine(Constant(1.0)), on("far", 8.0)]
    case = Case(ob.ASP(), cluster(machines, [host], patience=1.0), 12, nbytes=4)
    case.run()
    assert case.watch.times(Lost) == [2.0]
    # it sends nothing of what is refused anyway, which would take 4 s
    assert case.watch.times(Joined) == [0.0, 0.0, 8.0]


def test_a_worker_that_waits_for_others_may_be_cut_off() -> None:
    hosts = [ob.Host("a", outages=(ob.Outage(1.5, 1.0),)), ob.Host("b")]
    case = Case(ob.BSP(), cluster([on("a"), on("b", 2.0)], hosts, patience=2.0), 4)
    made = case.run()
    # b's push at 2 lets both go on; the answer reaches a at 2.5
    assert case.watch.times(Updated) == [2.0, 4.0]
    assert made.per_worker[0].communication == 0.5
    assert made.lost == 0


def test_what_the_store_has_lying_there_is_no_sign_of_life() -> None:
    hosts = [ob.Host("a", outages=(ob.Outage(1.5, 9.0),))]
    machines = [on("a"), ob.Machine(Constant(1.0))]
    case = Case(ob.BSP(), cluster(machines, hosts, patience=2.0, apply=1.0), 6)
    case.run()
    # the pushes that came at 1 are applied at 2 and 3; a is given up at 3.5 all the same
    assert case.watch.times(Lost) == [3.5]


def test_a_region_is_cut_off_together() -> None:
    hosts = [ob.Host(name, up=32.0) for name in "abc"]
    north = ob.Region("north", ("a", "b"), outages=(ob.Outage(1.5, 1.0),))
    machines = [on(name) for name in "abc"]
    case = Case(ob.ASP(), cluster(machines, hosts, regions=(north,)), 3, nbytes=32)
    case.run()
    assert case.watch.times(Updated) == [2.0, 3.0, 3.0]


def test_outages_of_host_region_and_store_are_one() -> None:
    hosts = (
        ob.Host("a", outages=(ob.Outage(1.0, 2.0), ob.Outage(8.0, 1.0))),
        ob.Host("s", outages=(ob.Outage(4.0, 1.0),)),
        ob.Host("b", trace=(ob.Share(3.5, 0.0), ob.Share(4.5, 1.0)), up=1.0, down=1.0),
    )
    regions = (ob.Region("r", ("a", "b"), outages=(ob.Outage(2.5, 1.5),)),)
    network = ob.Network(hosts, ob.StoreLink(host="s"), regions)
    a, s, b = hosts
    assert network.outages(a) == ((1.0, 5.0), (8.0, 9.0))
    assert network.outages(b) == ((2.5, 5.0),)
    assert network.outages(s) == ((4.0, 5.0),)


# ---------------------------------------------------------------- failures


def test_a_host_fails_with_all_its_workers() -> None:
    host = ob.Host("lab", failures=(ob.Failure(1.5, 2.0),))
    machines = [on("lab"), on("lab"), ob.Machine(Constant(1.0))]
    case = Case(ob.BSP(), cluster(machines, [host], patience=1.0), 12)
    made = case.run()
    assert case.watch.times(Updated)[:3] == [1.0, 2.5, 4.5]
    assert case.watch.times(Lost) == [2.5, 2.5]
    assert case.watch.times(Joined) == [0.0, 0.0, 0.0, 3.5, 3.5]
    assert made.ledger[0]["applied"] == 12


def test_a_failure_takes_along_what_was_under_way() -> None:
    hosts = [ob.Host("a", up=32.0, failures=(ob.Failure(1.5),)), ob.Host("b", up=32.0)]
    machines = [on("a"), on("b")]
    case = Case(ob.ASP(), cluster(machines, hosts, (32.0, math.inf), patience=1.0), 2, nbytes=32)
    case.run()
    # both push at 16 bytes a second until 1.5, then b has the store's link for itself
    assert case.watch.times(Updated) == [2.25, 2.25 + 0.25 + 1.0 + 1.0]


def test_a_region_fails_together_and_nobody_joins_a_host_that_is_down() -> None:
    hosts = [ob.Host("a"), ob.Host("b"), ob.Host("c")]
    north = ob.Region("north", ("a", "b"), failures=(ob.Failure(1.5, 4.0),))
    machines = [
        on("a", failures=(ob.Failure(1.25, 1.0),)),  # would be back at 2.25
        on("b", joins_at=2.0),
        on("c"),
    ]
    case = Case(ob.ASP(), cluster(machines, hosts, regions=(north,), patience=0.5), 12)
    case.run()
    joined = [(r.time, r.worker) for r in case.watch.seen if isinstance(r, Joined)]
    assert sorted(joined) == [(0.0, 0), (0.0, 2), (5.5, 0), (5.5, 1)]


# ---------------------------------------------------------------- what holds whatever happens

FAULTY = (
    ob.Machine(Exponential(0.02), latency=0.003, pauses=(ob.Pause(0.1, 0.2),)),
    ob.Machine(Constant(0.03), failures=(ob.Failure(0.15, 0.1), ob.Failure(0.5, 0.1))),
    ob.Machine(Constant(0.02), joins_at=0.05, pauses=(ob.Pause(0.2, 0.01),)),
    ob.Machine(Exponential(0.05), latency=0.02),
)
DISCIPLINES = (
    *("bsp", "bsp:backup=1", "soft:2", "ssp:2", "asp", "downpour:2,3", "asup", "local:4"),
    *("easgd:3", "async-local:4", "fedbuff:2,every=2"),
)


def records_of(described: ob.Cluster, discipline: str) -> list[Entry]:
    watch = Watch()
    ob.estimate(
        described, discipline, steps=12, batch_size=2, model_bytes=10**6, seed=3, listeners=[watch]
    )
    return watch.seen


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("apply", [0.0, 0.002])
def test_endless_links_are_as_none(discipline: str, apply: float) -> None:
    alone = ob.Cluster(FAULTY, apply=apply, patience=0.15)
    hosts = tuple(
        ob.Host(f"lab{number}", latency=machine.latency) for number, machine in enumerate(FAULTY)
    )
    machines = tuple(
        ob.Machine(**vars(machine) | {"latency": 0.0, "host": f"lab{number}"})
        for number, machine in enumerate(FAULTY)
    )
    shared = ob.Cluster(machines, apply=apply, patience=0.15, network=ob.Network(hosts))
    assert records_of(shared, discipline) == records_of(alone, discipline)


@pytest.mark.parametrize("discipline", ["bsp", "asp", "local:4", "easgd:3"])
def test_a_host_for_each_worker_is_a_link_for_each_worker(discipline: str) -> None:
    """The same times but for rounding, where nobody shares anything."""
    rates = (1e7, 3e7, 5e7)
    own = tuple(ob.Machine(Constant(0.02), bandwidth=rate, latency=0.001) for rate in rates)
    hosts = tuple(
        ob.Host(f"lab{n}", up=rate, down=rate, latency=0.001) for n, rate in enumerate(rates)
    )
    machines = tuple(ob.Machine(Constant(0.02), host=host.name) for host in hosts)
    network = ob.Network(hosts, goodput=1.0)
    one = records_of(ob.Cluster(own), discipline)
    two = records_of(ob.Cluster(machines, network=network), discipline)
    assert [type(record) for record in one] == [type(record) for record in two]
    assert [r.time for r in one] == pytest.approx([r.time for r in two], rel=1e-9)


TROUBLED = ob.Cluster(
    (
        ob.Machine(Exponential(0.02), host="a", pauses=(ob.Pause(0.1, 0.2),)),
        ob.Machine(Exponential(0.03), host="a", failures=(ob.Failure(0.15, 0.1),)),
        ob.Machine(Constant(0.02), host="b", joins_at=0.05),
        ob.Machine(Constant(0.02), host="b"),
        ob.Machine(Exponential(0.04), bandwidth=1e8, latency=0.001),
    ),
    apply=0.0005,
    patience=0.15,
    network=ob.Network(
        (
            ob.Host("a", up=2e7, down=4e7, latency=0.002, outages=(ob.Outage(0.2, 0.1),)),
            ob.Host(
                "b", up=3e7, down=3e7, latency=0.01, window=1e5, connections=4,
                trace=(ob.Share(0.1, 0.3), ob.Share(0.3, 0.0), ob.Share(0.31, 0.7)),
                failures=(ob.Failure(1.0, 0.3),),
            ),
        ),
        ob.StoreLink(5e7, 6e7),
        (ob.Region("all", ("a", "b"), outages=(ob.Outage(0.6, 0.3),)),),
    ),
)  # fmt: skip


def troubled(discipline: str) -> tuple[NetworkSimulation, Watch]:
    watch, log = Watch(), Log()
    log.listeners.append(watch)
    workers = len(TROUBLED)
    job = CostJob(CostOnly(10**6, workers * 24), as_course(discipline), workers, 2, 1, seed=3)
    made = simulation(job, TROUBLED, job.make_store(log))
    assert isinstance(made, NetworkSimulation)
    return made, watch


def plain(sim: Simulation) -> Any:
    return msgspec.json.decode(msgspec.json.encode(meta_of(sim)))


@pytest.mark.parametrize("discipline", ["bsp", "ssp:2", "asp", "local:4", "easgd:3"])
def test_one_that_is_written_down_at_any_moment_goes_on_to_the_bit(discipline: str) -> None:
    whole, seen = troubled(discipline)
    whole.start()
    saved, written = [], []
    alive = True
    while alive:
        saved.append(msgspec.json.encode((meta_of(whole), len(seen.seen))))
        written.append(tensors_of(whole))
        alive = whole.step()
    moving = 0
    for state, tensors in list(zip(saved, written, strict=True))[::7]:
        meta, before = msgspec.json.decode(state)
        moving += bool(meta["sim"]["network"]["transfers"])
        again, watch = troubled(discipline)
        restore(again, tensors, meta)
        while again.step():
            pass
        assert watch.seen == seen.seen[before:]
        assert plain(again) == plain(whole)
    assert moving > 10


RATES = st.sampled_from([math.inf, 1e5, 2e4, 5e3])


@st.composite
def shared_clusters(draw: st.DrawFn) -> ob.Cluster:
    """Workers on one to three hosts, with faults of all kinds; the first host never fails."""
    hosts = []
    for number in range(draw(st.integers(1, 3))):
        latency = draw(st.sampled_from([0.0, 0.001, 0.02]))
        outages = [
            ob.Outage(0.02 + 0.3 * index, draw(st.sampled_from([0.005, 0.03, 0.15])))
            for index in range(draw(st.integers(0, 2)))
        ]
        back = draw(st.sampled_from([None, 0.02, 0.2]))
        fails = number > 0 and draw(st.booleans())
        hosts.append(
            ob.Host(
                f"lab{number}", draw(RATES), draw(RATES), latency,
                1e3 if latency and draw(st.booleans()) else math.inf,
                outages=tuple(outages), failures=(ob.Failure(0.07, back),) if fails else (),
            )
        )  # fmt: skip
    there = [draw(st.integers(0, len(hosts) - 1)) for _ in range(draw(st.integers(0, 2)))]
    machines = []
    for place in [*range(len(hosts)), *there]:
        pauses = draw(st.sampled_from([(), (ob.Pause(0.01, 0.03),), (ob.Pause(0.04, 0.15),)]))
        machines.append(ob.Machine(draw(paces()), pauses=pauses, host=f"lab{place}"))
    if draw(st.booleans()):
        machines.append(ob.Machine(draw(paces()), bandwidth=draw(RATES)))
    region = ob.Region("all", tuple(host.name for host in hosts), (ob.Outage(0.11, 0.05),))
    network = ob.Network(
        tuple(hosts),
        ob.StoreLink(draw(RATES), draw(RATES)),
        (region,) if draw(st.booleans()) else (),
    )
    return ob.Cluster(
        tuple(machines),
        draw(st.sampled_from([0.0, 0.004])),
        draw(st.sampled_from([0.02, 0.1])),
        network,
    )


@pytest.mark.parametrize("name", NAMES)
@examples(4)
@given(
    described=shared_clusters(),
    seed=seeds,
    stops=st.lists(st.integers(1, 60), min_size=1, max_size=2),
)
def test_every_sample_once_replayed_and_resumed_whatever_the_links(
    name: str, described: ob.Cluster, seed: int, stops: list[int]
) -> None:
    what, discipline = problem(samples=26), named(len(described))[name]
    options = {"cluster": described, "seed": seed, "optimizer": optimizer_for(discipline)}
    with scratch() as folder:
        whole = run("sim", what, discipline, out=folder / "whole", **options)
        check_run(folder / "whole", what)
        for index, records in enumerate(stops):
            with contextlib.suppress(Stop):
                run(
                    "sim", what, discipline, out=folder / "again", resume=index > 0,
                    listeners=[StopAfter(records)], checkpoint_every=3, **options,
                )  # fmt: skip
        again = run("sim", what, discipline, out=folder / "again", resume=True, **options)
        assert again.parameter_hash == whole.parameter_hash
        logs = [(folder / name / "log.jsonl").read_bytes() for name in ("whole", "again")]
        assert logs[0] == logs[1]
