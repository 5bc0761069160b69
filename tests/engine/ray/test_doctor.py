"""`offbeat doctor --cluster`: what is said of the hosts of a Ray cluster, and how they are read."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import doctor as command
from offbeat.engine.hosts.doctor import reach
from offbeat.engine.local.doctor import DoctorPlan, Finding
from offbeat.engine.ray import doctor
from offbeat.engine.ray.cluster import RayCluster, needed
from offbeat.engine.ray.doctor import HostFacts, examine_hosts, here
from offbeat.transport.handshake import Refused
from tests.cli.common import answers
from tests.engine.ray.common import nothing_held

DOCS = Path(__file__).resolve().parents[3] / "docs"
Capture = pytest.CaptureFixture[str]
MINE = {
    "offbeat": "0.1.0", "torch": "2.13.0", "python": "3.11", "instructions": "AVX512",
    "ray": "2.60.0",
}  # fmt: skip
SOUND = HostFacts(
    name="lab1",
    address="192.168.1.5",
    of_store=True,
    free={"CPU": 4.0},
    whole={"CPU": 4.0},
    versions=MINE,
    memory=24_000_000_000,
    round_trip=0.00006,
    bandwidth=1.2e9,
    skew=0.0,
)
OTHER = replace(
    SOUND, name="lab2", address="192.168.1.6", of_store=False, round_trip=0.0004, bandwidth=1.15e8
)
# The cluster that docs/ray.md shows.
SHOWN = [
    SOUND,
    replace(OTHER, memory=6_200_000_000, skew=0.3, free={"CPU": 1.0}),
    replace(
        OTHER,
        name="lab3",
        address="192.168.1.7",
        versions=MINE | {"torch": "2.12.1", "instructions": "AVX2"},
        bandwidth=1.1e7,
        round_trip=0.0213,
        skew=-95.0,
        whole={"CPU": 4.0, "GPU": 1.0},
    ),
]


def found(*hosts: HostFacts, workers: int = 4, model: int | None = None) -> dict[str, Finding]:
    told = examine_hosts(hosts, DoctorPlan(workers, model), MINE)
    return {finding.name: finding for finding in told}


def test_hosts_that_fit_each_other_are_good() -> None:
    told = found(SOUND, OTHER, model=1_000_000)
    assert {finding.state for finding in told.values()} == {"good"}
    assert told["torch"].found == "2.13.0 on every host"
    assert told["links"].found == (
        "115 MB/s on the slowest (lab2), round trips up to 0.4 ms (lab2); an exchange of 1.0 MB "
        "takes up to 0.018 s"
    )


@pytest.mark.parametrize(
    ("change", "name", "state", "remedy"),
    [
        ({"silent": "it is out of memory"}, "hosts", "bad", r"install offbeat\[ray\] there"),
        ({"versions": MINE | {"torch": "2.12.1"}}, "torch", "bad", "torch 2.13.0 on lab2"),
        ({"versions": MINE | {"instructions": "AVX2"}}, "CPU", "good", ""),
        ({"versions": MINE | {"instructions": "DEFAULT"}}, "CPU", "bad", "leave lab2 out"),
        ({"unreached": "timed out"}, "links", "bad", "let the hosts of the cluster through"),
        ({"bandwidth": 1e6}, "links", "warn", "--codec int8"),
        ({"skew": -61.0}, "clocks", "warn", "set the clock of lab2"),
        ({"memory": 4_900_000}, "memory", "bad", "more memory than lab2"),
        ({"memory": 11_000_000}, "memory", "warn", r"2 on lab2 \(ray start --num-cpus\)"),
        ({"memory": 4_000, "whole": {}}, "memory", "good", ""),
        ({"free": {}}, "room", "warn", "-n 4, or wait for the others with --wait 600"),
        ({"free": {}, "whole": {}}, "room", "bad", "-n 4, ask for less"),
        ({"whole": {"CPU": 4.0, "GPU": 2.0}}, "GPUs", "warn", "torch with CUDA on lab2"),
        ({"whole": {"CPU": 4.0, "GPU": 2.0}, "cuda": True}, "GPUs", "good", ""),
    ],
)
def test_what_is_wrong_with_a_host_is_said_with_its_name(
    change: dict[str, Any], name: str, state: str, remedy: str
) -> None:
    told = found(SOUND, replace(OTHER, **change), workers=8, model=1_000_000)
    assert told[name].state == state
    assert re.search(remedy, told[name].remedy)
    assert bool(told[name].remedy) == (state != "good")
    # Nothing else is thought to be wrong because of it.
    assert {other.state for other in told.values() if other.name not in (name, "room")} == {"good"}


def test_processors_that_differ_from_the_launchers_own_are_bad() -> None:
    told = examine_hosts([OTHER], DoctorPlan(1), MINE | {"instructions": "DEFAULT"})
    assert [finding.name for finding in told if finding.state == "bad"] == ["CPU"]


def test_many_hosts_with_one_trouble_are_one_line() -> None:
    odd = [replace(OTHER, name=f"lab{n}", versions=MINE | {"ray": "2.61.0"}) for n in range(2, 9)]
    told = found(SOUND, *odd)["ray"]
    assert told.found == "2.61.0 on lab2, lab3 and 5 more hosts, 2.60.0 here"


def test_the_way_is_measured_over_a_listener_that_wants_the_token() -> None:
    for tls in (False, True):
        with doctor.echoing("127.0.0.1", tls) as dialer:
            way = reach(dialer)
            assert way.encrypted == tls
            assert way.round_trip > 0
            assert way.bandwidth > 0
            with pytest.raises(Refused):
                reach(replace(dialer, token=b"another token of that size"))


@pytest.mark.parametrize("late", [False, True])
def test_a_host_that_does_not_get_through_is_told(late: bool) -> None:
    errors = needed().exceptions

    class Cut:
        exceptions = errors

        def get(self, *asked: Any, timeout: float) -> Any:
            raise errors.GetTimeoutError if late else errors.RaySystemError("no\nroute to host")

    class Host:
        measure = read = property(lambda self: self)

        def remote(self, *what: Any) -> None:
            """Ask, and hear no more of it."""

    told = doctor._measured(Cut(), OTHER, Host(), None)
    assert told.unreached == ("not done within 60 s" if late else "route to host")


# ---------------------------------------------------------------- the command

answer = answers("doctor", "--cluster")


def shown(monkeypatch: pytest.MonkeyPatch, hosts: list[HostFacts]) -> None:
    monkeypatch.setattr(command, "visit", lambda cluster, tls: hosts)
    monkeypatch.setattr(command, "versions_here", lambda: MINE)


def test_the_documentation_shows_what_is_printed(
    ray_cluster: RayCluster, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(monkeypatch, SHOWN)
    code, out, _ = answer(capsys, "-n", 8, "--model-bytes", 102_000_000)
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80
    printed = "\n".join(line.rstrip() for line in out.splitlines())
    assert f"```text\n{printed}\n```" in (DOCS / "ray.md").read_text()


def test_a_warning_is_no_failure(
    ray_cluster: RayCluster, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(monkeypatch, [SOUND, replace(OTHER, skew=61.0)])
    code, out, _ = answer(capsys)
    assert code == 0
    assert out.splitlines()[-1] == "Ready for 4 workers; worth a look: clocks."


def test_the_table_of_the_oddest_hosts_fits_in_80_columns(
    ray_cluster: RayCluster, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = replace(
        SOUND,
        name="a-host-with-a-name-as-clouds-give-\x1b[31mthem",
        address="fd12:3456:789a:0001:0000:0000:0000:0001",
        free={"CPU": 0.25},
        whole={"CPU": 192.0, "GPU": 16.0},
        round_trip=1.234,
        bandwidth=123_456,
        memory=999_900_000_000,
        skew=-12345.6,
    )
    shown(monkeypatch, [odd, replace(OTHER, silent="no answer within 60 s", round_trip=None)])
    code, out, _ = answer(capsys)
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--cluster", "--at", "127.0.0.1:1"], "name one"),
        (["--address", "127.0.0.1:1"], "add --cluster"),
        (["--cluster", "--model-bytes", "0"], "--model-bytes"),
    ],
)
def test_words_that_do_not_go_together(capsys: Capture, words: list[str], remedy: str) -> None:
    code, out, err = answers("doctor")(capsys, *words)
    assert (code, out) == (2, "")
    assert remedy in err


def test_a_machine_of_no_cluster_is_told_how_to_join_one(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.engine.ray.cluster._known", lambda ray: None)
    monkeypatch.setattr(needed(), "is_initialized", lambda: False)
    code, out, err = answer(capsys)
    assert (code, out) == (2, "")
    assert "belongs to no Ray cluster" in err


# ---------------------------------------------------------------- a cluster


def test_every_host_is_read_and_nothing_stays_there(
    ray_cluster: RayCluster, capsys: Capture
) -> None:
    with nothing_held(ray_cluster):
        code, out, err = answer(capsys, "-n", 1, "--json")
    told = json.loads(out)
    assert (code, err) == (int(not told["ready"]), "")
    (host,) = told["hosts"]
    assert host["of_store"]
    assert (host["silent"], host["unreached"]) == ("", "")
    assert host["versions"] == here()
    assert host["round_trip"] > 0
    assert host["bandwidth"] > 0
    assert abs(host["skew"]) < doctor.SKEW
    assert host["memory"] > 0
    assert {finding["state"] for finding in told["findings"]} == {"good"}


def test_a_host_that_cannot_be_read_is_told(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lacking:
        def read(self) -> Any:
            raise ModuleNotFoundError("No module named 'offbeat'")

    monkeypatch.setattr(doctor, "Visitor", Lacking)
    with nothing_held(ray_cluster):
        (host,) = doctor.visit(ray_cluster)
    assert host.silent == "ModuleNotFoundError: No module named 'offbeat'"
    assert host.round_trip is None
