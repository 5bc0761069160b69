"""Cluster files with hosts, links and regions: what they mean, and what they refuse."""

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat as ob
from offbeat.compare.speeds import Simulated
from offbeat.engine.sim.cluster import Cluster
from offbeat.engine.sim.compute_times import Constant
from offbeat.errors import ConfigError


def refused(*parts: str) -> Any:
    """Expect a ConfigError whose message has all of `parts`, in this order."""
    return pytest.raises(ConfigError, match="(?s)" + ".*".join(re.escape(part) for part in parts))


EVERYTHING = """
patience = "3s"
goodput = 0.9

[store]
in = "50000000bit/s"
out = "1Gbit/s"
host = "lab0"

[[host]]
name = "lab0"
up = "100Mbit/s"
down = "100Mbit/s"

[[host]]
name = "lab1"
up = "50000000bit/s"
down = 1e6
latency = "20ms"
window = "64KiB"
connections = 4
outages = [{at = "2s", lasting = "2s"}]
failures = [{at = "1m", returns_after = "5s"}, {at = "2m"}]
trace = "trace:lab1.txt"

[[host]]
name = "lab2"
up = "1MB/s"
trace = [{at = "10s", share = 0.25}, {at = "20s", share = 1}]

[[region]]
name = "north"
hosts = ["lab1", "lab2"]
outages = [{at = "30s", lasting = "1s"}]
failures = [{at = "5m"}]

[[worker]]
host = "lab1"
compute = "100ms"
count = 2

[[worker]]
host = "lab2"
compute = "normal:20ms,2ms"

[[worker]]
compute = "20ms"
bandwidth = "1MB/s"
"""


def test_every_key(tmp_path: Any) -> None:
    (tmp_path / "lab1.txt").write_text("# hour by hour\n0 0.5\n\n1m 0  # away\n2m 1\n")
    (tmp_path / "all.toml").write_text(EVERYTHING)
    read = Cluster.from_toml(tmp_path / "all.toml")
    far = ob.Host(
        "lab1",
        6.25e6,
        1e6,
        0.02,
        65536.0,
        4,
        (ob.Outage(2.0, 2.0),),
        (ob.Failure(60.0, 5.0), ob.Failure(120.0)),
        (ob.Share(0.0, 0.5), ob.Share(60.0, 0.0), ob.Share(120.0, 1.0)),
    )
    hosts = (
        ob.Host("lab0", 1.25e7, 1.25e7),
        far,
        ob.Host("lab2", 1e6, trace=(ob.Share(10.0, 0.25), ob.Share(20.0, 1))),
    )
    north = ob.Region("north", ("lab1", "lab2"), (ob.Outage(30.0, 1.0),), (ob.Failure(300.0),))
    network = ob.Network(hosts, ob.StoreLink(6.25e6, 1.25e8, "lab0"), (north,), 0.9)
    assert read.network == network
    assert [machine.host for machine in read.machines] == ["lab1", "lab1", "lab2", ""]
    assert far.most == 65536 * 4 / 0.04
    assert Cluster.from_toml_text(read.to_toml()) == read


def test_the_least_that_a_file_may_say() -> None:
    read = Cluster.from_toml_text('[[host]]\nname = "a"\n[[worker]]\nhost = "a"\ncompute = 1\n')
    assert read.network == ob.Network((ob.Host("a"),))
    assert read.network.goodput == 0.95
    assert (read.network.hosts[0].up, read.network.hosts[0].most) == (math.inf, math.inf)
    assert read.to_toml() == (
        'apply = "0s"\npatience = "5s"\n'
        '\n[[host]]\nname = "a"\n\n[[worker]]\ncompute = "1s"\nhost = "a"\n'
    )
    assert not Cluster.equal(2).network
    assert "host" not in Cluster.equal(2).to_toml()


NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=4)
RATES = st.floats(1e-300, math.inf, exclude_min=True)
TIMES = st.floats(0, 1e8)


@st.composite
def networks(draw: st.DrawFn) -> ob.Network:
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    outages = st.sampled_from([(), (ob.Outage(1.0, 0.3),), (ob.Outage(3.0, 1.0), ob.Outage(9, 1))])
    failures = st.sampled_from([(), (ob.Failure(0.1, 0.7), ob.Failure(5.0))])
    hosts = []
    for name in names:
        latency = draw(TIMES)
        window = draw(st.floats(1.0, math.inf)) if latency else math.inf
        trace = (ob.Share(draw(TIMES), 0.0), ob.Share(2e8, 1 / 3)) if draw(st.booleans()) else ()
        hosts.append(
            ob.Host(
                name, draw(st.floats(1e-300, 1e300)), draw(RATES), latency, window,
                draw(st.integers(1, 99)), draw(outages), draw(failures), trace,
            )
        )  # fmt: skip
    on = draw(st.sampled_from(["", names[0]])) if not hosts[0].failures else ""
    apart = names[1:] if on else names
    regions = ()
    if apart and draw(st.booleans()):
        regions = (ob.Region(draw(NAMES), tuple(apart), draw(outages), draw(failures)),)
    link = ob.StoreLink(draw(RATES), draw(RATES), on)
    return ob.Network(tuple(hosts), link, regions, draw(st.floats(0.01, 1)))


@settings(deadline=None, max_examples=50)
@given(network=networks())
def test_every_network_survives_its_toml(network: ob.Network) -> None:
    machines = tuple(ob.Machine(Constant(1.0), host=host.name) for host in network.hosts)
    cluster = Cluster((*machines, ob.Machine(Constant(2.0), 1e6)), network=network)
    assert Cluster.from_toml_text(cluster.to_toml()) == cluster


def test_other_machines_keep_the_hosts_that_they_are_on() -> None:
    hosts = tuple(ob.Host(name, up=1e6) for name in "abs")
    regions = (ob.Region("one", ("a",)), ob.Region("two", ("a", "b")))
    machines = tuple(ob.Machine(Constant(1.0), host=name) for name in "ab")
    cluster = Cluster(machines, network=ob.Network(hosts, ob.StoreLink(host="s"), regions))
    less = cluster.with_machines(machines[1:])
    assert [host.name for host in less.network.hosts] == ["b", "s"]
    assert less.network.regions == (ob.Region("two", ("b",)),)
    speeds = Simulated(cluster, straggler=3.0)
    assert speeds.of(1).network.hosts == (hosts[0], hosts[2])
    assert speeds.of(2).machines[1] == ob.Machine(Constant(3.0), host="b")


HOST = '[[host]]\nname = "lab0"\nup = "1MB/s"\n'
WORKER = '[[worker]]\nhost = "lab0"\ncompute = "20ms"\n'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            HOST + '[[worker]]\nhost = "lab1"\ncompute = 1\n' + WORKER,
            ('c.toml: worker 0 is on host "lab1" (did you mean', "lab0", 'write a [[host]] table'),
        ),
        (WORKER, ('worker 0 is on host "lab0", and there is no such host', 'name = "lab0"')),
        (
            HOST + '[[worker]]\ncompute = "20ms"\n',
            ('nobody is on host lab0: give a worker host = "lab0", or leave the host out',),
        ),
        (HOST + HOST + WORKER, ("there are 2 hosts with the name lab0; give each",)),
        (
            HOST + WORKER + 'bandwidth = "1MB/s"',
            ("worker 1: a worker on host lab0 talks over the link of that host; leave out",),
        ),
        (HOST + WORKER + 'latency = "1ms"', ("worker 1: a worker on host lab0", "leave out")),
        (HOST + WORKER + "[[worker]]\nhost = 3\ncompute = 1", ("worker 2: host: must be text",)),
        ("[[host]]\nup = 1\n" + WORKER, ('host 1: the key "name" is missing', 'name = "lab0"')),
        ('[[host]]\nname = ""\n' + WORKER, ("host 1: the name of a host must be printable text",)),
        (HOST + 'dwon = "1MB/s"\n' + WORKER, ('host 1: unknown key "dwon"', "did you mean 'down'")),
        (HOST + "down = 0\n" + WORKER, ("host 1: down: a bandwidth must be above zero",)),
        (HOST + 'down = "fast"\n' + WORKER, ('host 1: down: "fast" is no bandwidth', "1Gbit/s")),
        (HOST + "latency = -1\n" + WORKER, ("host 1: latency: a duration must be zero or more",)),
        (
            HOST + 'window = "4MB"\n' + WORKER,
            ("host 1: the window of host lab0 limits nothing", "write a latency"),
        ),
        (HOST + 'window = "wide"\n' + WORKER, ('host 1: window: "wide" is no size', "64KiB")),
        (HOST + 'window = 0\nlatency = 1\n' + WORKER, ("host 1: a window must be above zero",)),
        (
            HOST + "connections = 0\n" + WORKER,
            ("host 1: connections must be a whole number of at least 1, got 0",),
        ),
        (
            HOST + 'outages = [{at = 1, lasting = 3}, {at = "2s", lasting = 1}]\n' + WORKER,
            ("host 1: the outage at 2s begins before the one at 1s is over; leave out or move",),
        ),
        (
            HOST + "outages = [{at = 1}]\n" + WORKER,
            ('host 1: outages 1: the key "lasting" is missing; write lasting = "20ms"',),
        ),
        (HOST + "failures = [{at = 1}, {at = 2}]\n" + WORKER, ("the failure at 2s begins before",)),
        (HOST + "trace = 3\n" + WORKER, ("host 1: trace: must be a list", "trace:FILE")),
        (
            HOST + "trace = [{at = 1}]\n" + WORKER,
            ('host 1: trace: step 1: the key "share" is missing; write share = 0.5',),
        ),
        (
            HOST + "trace = [{at = 1, share = 2}]\n" + WORKER,
            ("host 1: trace: a share must lie between 0 and 1, got 2",),
        ),
        (
            HOST + "trace = [{at = 2, share = 1}, {at = 1, share = 1}]\n" + WORKER,
            ("host 1: the trace goes back from 2s to 1s; write its times in order",),
        ),
        (
            HOST + "trace = [{at = 2, share = 0}]\n" + WORKER,
            ("host 1: the trace ends at 2s with share = 0", "never comes back; add a time"),
        ),
        (
            '[[host]]\nname = "lab0"\ntrace = [{at = 2, share = 0.5}]\n' + WORKER,
            ("host lab0 has a share of an endless bandwidth; write up and down",),
        ),
        (HOST + 'trace = "trace:gone"\n' + WORKER, ("host 1: trace: cannot read", "gone")),
        ('[store]\nin = "slow"\n' + HOST + WORKER, ('store: in: "slow" is no bandwidth',)),
        ("[store]\ninn = 1\n" + HOST + WORKER, ('store: unknown key "inn"', "did you mean 'in'")),
        (
            '[store]\nhost = "lab9"\n' + HOST + WORKER,
            ('the store is on host "lab9"', "write a [[host]] table"),
        ),
        (
            '[store]\nhost = "lab0"\n' + HOST + "failures = [{at = 1}]\n" + WORKER,
            ("the store is on host lab0, which fails", "put the store on another host"),
        ),
        (
            HOST + WORKER + '[[region]]\nname = "north"\nhosts = ["lab7"]\n',
            ('region north has host "lab7"', "write a [[host]] table"),
        ),
        (
            HOST + WORKER + '[[region]]\nname = "north"\nhosts = []\n',
            ('region 1: region north has no hosts; write hosts = ["lab0", "lab1"]',),
        ),
        (HOST + WORKER + '[[region]]\nname = "north"\n', ('region 1: the key "hosts" is missing',)),
        (
            HOST + WORKER + '[[region]]\nname = "north"\nhosts = ["lab0", "lab0"]\n',
            ("region north names host lab0 2 times; name it once",),
        ),
        ("goodput = 0\n" + HOST + WORKER, ("goodput must be above 0 and at most 1, got 0",)),
        ("goodput = 1.5\n" + HOST + WORKER, ("goodput must be above 0 and at most 1, got 1.5",)),
        ("host = 3\n" + WORKER, ("c.toml: host: must be a list of tables",)),
    ],
)  # fmt: skip
def test_errors_name_the_place_and_the_remedy(tmp_path: Any, text: str, parts: Any) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with refused(*parts) as caught:
        Cluster.from_toml(path)
    assert str(path) in str(caught.value)


def test_a_line_of_a_trace_that_cannot_be_read(tmp_path: Any) -> None:
    (tmp_path / "c.toml").write_text(HOST + 'trace = "trace:t.txt"\n' + WORKER)
    for line, says in (("1s", '"1s" must be a time and a share'), ("1s x", '"x" is no share')):
        (tmp_path / "t.txt").write_text(f"0 1\n{line}\n")
        with refused("host 1: trace: ", "t.txt, line 2: ", says):
            Cluster.from_toml(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: ob.Network(hosts=("lab0",)), ("'lab0' is no host; write Host(",)),
        (lambda: ob.Network(store="lab0"), ("'lab0' is no link of a store; write StoreLink(",)),
        (lambda: ob.Region("north", "lab0"), ('are a list; write hosts = ["lab0"]',)),
        (
            lambda: Cluster(Cluster.equal(1).machines, network="lab.toml"),
            ("'lab.toml' is no network; write Network(hosts=...)",),
        ),
    ],
)
def test_what_values_refuse(make: Any, parts: tuple[str, ...]) -> None:
    with refused(*parts):
        make()
