"""The hosts themselves: what is cut is silent, what is slow is slow, and nothing stays behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network import hosts as module
from benchmarks.network.hosts import LOCKS, Hosts, ours, processes_in, sweep, until
from tests.cluster.common import ROOT, environment

pytestmark = pytest.mark.cluster

ECHO = """
import socket
with socket.create_server(("192.168.1.5", 7000)) as listening:
    print("ready", flush=True)
    while True:
        wire, _ = listening.accept()
        with wire:
            while some := wire.recv(1 << 16):
                wire.sendall(some)
"""
ASK = """
import socket, sys, time
with socket.create_connection(("192.168.1.5", 7000)) as wire:
    for _ in range(5):
        start = time.perf_counter()
        wire.sendall(b"x")
        wire.recv(1)
        print(time.perf_counter() - start, flush=True)
    count = int(sys.argv[1])
    start = time.perf_counter()
    wire.sendall(bytes(count))
    while count:
        count -= len(wire.recv(1 << 16))
    print(time.perf_counter() - start)
"""
WAIT = "import time; os.write(1, b'.'); time.sleep(1000)"
KILLED = """
import sys, time
from pathlib import Path
from benchmarks.network.hosts import Hosts
with Hosts(2, Path(sys.argv[1]), [0.001]) as hosts:
    process = hosts[2].run("sleep", "1000")
    out = Path(sys.argv[1]) / "out"
    hosts[2].fork(lambda: time.sleep(1000), out, out)
    while len(hosts[2].processes()) < 2:
        time.sleep(0.01)
    print(hosts[1].switch, flush=True)
    time.sleep(1000)
"""


def python(host, program, *words):
    found = host.run(sys.executable, "-c", program, *words, stdout=subprocess.PIPE, text=True)
    return found


def asked(hosts, count):
    """Seconds of a small round trip, and of one with so many bytes."""
    said, _ = python(hosts[2], ASK, str(count)).communicate(timeout=60)
    *trips, whole = map(float, said.split())
    return min(trips), whole


def test_hosts_talk_to_each_other_and_to_nobody_else(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        echo = python(hosts[1], ECHO)
        assert echo.stdout.readline() == "ready\n"
        asked(hosts, 1 << 20)
        run = hosts[1].switch.removesuffix("-0")
        assert len(of_run(run)) == 3  # and the switch
        inside = "print(open('/proc/net/dev').read().count(':'))"  # loopback, and its wire
        assert python(hosts[2], inside).communicate()[0].strip() == "2"
        name = python(hosts[2], "import platform; print(platform.node())").communicate()[0]
        assert name.strip() == "lab2"
        (hosts[2].folder / "shm" / "mine").touch()
        seen = python(hosts[1], "import os; print(os.listdir('/dev/shm'))").communicate()[0]
        assert seen.strip() == "[]"
    assert not of_run(run)
    assert echo.returncode == -signal.SIGKILL


def test_a_forked_process_lives_on_its_host(tmp_path):
    with Hosts(1, tmp_path) as hosts:
        out, complaints = tmp_path / "out", tmp_path / "complaints"

        def tell() -> int:
            import platform

            print(platform.node(), os.getcwd() == str(hosts[1].folder), os.listdir("/dev/shm"))
            print(Path("/proc/net/dev").read_text().count(":"), file=sys.stderr)
            return 7

        assert hosts[1].fork(tell, out, complaints).wait() == 7
        assert out.read_text() == "lab1 True []\n"
        assert complaints.read_text() == "2\n"

        def fail() -> int:
            raise ValueError("on purpose")

        assert hosts[1].fork(fail, out, complaints).wait() == 1
        assert "ValueError: on purpose" in complaints.read_text()


def test_what_is_said_to_one_that_is_cut_off_comes_later(tmp_path):
    """Later, and not never: its system sends it again. Nobody is told that there is no way."""
    with Hosts(2, tmp_path) as hosts:
        assert python(hosts[1], ECHO).stdout.readline() == "ready\n"
        program = ASK.replace("range(5)", "range(10**9)").replace(
            "print(", "time.sleep(0.01), print("
        )
        client = python(hosts[2], program, "0")
        client.stdout.readline()
        hosts[2].cut()
        hosts[2].speaks_in_vain()
        assert len(hosts[1].ports()) == len(hosts[2].ports()) == 1
        hosts[2].heal()
        slowest = 0.0
        while slowest < 0.1:  # a small round trip takes a thousandth of that
            slowest = float(client.stdout.readline())
        hosts[2].tear()
        assert client.wait(60) == 1  # an exception


def test_wires_have_a_rate_and_a_delay(tmp_path):
    with Hosts(2, tmp_path, [0.0, 0.02]) as hosts:
        assert python(hosts[1], ECHO).stdout.readline() == "ready\n"
        hosts[2].limit(8e6)
        trip, whole = asked(hosts, 1_000_000)
        assert trip >= 0.04
        assert whole >= 0.9  # there and back at the same time; less is what may go at once
        hosts[2].kill()  # its wire is none of its processes
        hosts[2].limit(None)
        assert asked(hosts, 1)[0] >= 0.04


def test_a_host_that_is_killed_has_no_processes_left(tmp_path):
    with Hosts(1, tmp_path) as hosts:
        parent = python(hosts[1], "import os; os.fork(); " + WAIT)
        assert [parent.stdout.read(1) for _ in range(2)] == ["."] * 2
        assert len(hosts[1].processes()) == 2
        late = hosts[1].run("sleep", "1000")
        hosts[1].kill()
        assert hosts[1].processes() == []
        assert parent.returncode == late.returncode == -signal.SIGKILL


def test_nothing_is_left_of_a_test_that_is_killed(tmp_path):
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(words, env={**os.environ, **environment()}, cwd=ROOT, stdout=-1) as one:
        switch = one.stdout.readline().decode().strip()
        run = switch.removesuffix("-0")
        namespaces = of_run(run)
        assert len(namespaces) == 3
        assert processes_in(f"{run}-2")
        sweep()  # of one that lives nothing is taken away
        assert namespaces <= ours()
        one.kill()
    until(lambda: not namespaces & ours(), "its watch has removed them")
    until(lambda: not (LOCKS / run).exists(), "and the lock")
    until(lambda: not watches(run), "and is gone")


def test_if_its_watch_is_killed_too_the_next_one_sweeps(tmp_path):
    words = [sys.executable, "-c", KILLED, str(tmp_path / "first")]
    with subprocess.Popen(words, env={**os.environ, **environment()}, cwd=ROOT, stdout=-1) as one:
        run = one.stdout.readline().decode().strip().removesuffix("-0")
        (watch,) = watches(run)
        os.kill(watch, signal.SIGKILL)
        until(lambda: not watches(run), "the watch is dead")
        inside = processes_in(f"{run}-2")
        assert inside
        one.kill()
    assert of_run(run)
    with Hosts(1, tmp_path / "second"):
        assert not of_run(run)
    assert not any(map(lives, inside))
    assert not (LOCKS / run).exists()


def of_run(run: str) -> set[str]:
    """Its namespaces; others may have theirs at the same time."""
    return {name for name in ours() if name.startswith(run)}


def lives(pid: int) -> bool:
    """Whether it has not ended, though perhaps nobody has asked how."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def watches(run: str) -> list[int]:
    """The processes that wait for the end of a run."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if module.__file__.encode() in words and run.encode() in words:
            found.append(int(place.parent.name))
    return found


@pytest.mark.parametrize(
    ("missing", "told"), [("ip", "install iproute2"), ("unshare", "install util-linux")]
)
def test_what_is_missing_is_told(missing, told, monkeypatch):
    found = module.shutil.which
    monkeypatch.setattr(
        module.shutil, "which", lambda name: None if name == missing else found(name)
    )
    assert told in module.why_not.__wrapped__()


def test_who_may_not_make_hosts_is_told(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert module.why_not.__wrapped__() == "network namespaces need root"
