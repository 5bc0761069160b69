"""The page's server: who is let in, what comes, and that nothing of it stays."""

import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import offbeat as ob
from offbeat.errors import ConfigError
from offbeat.watch import Watch, feed
from offbeat.watch.serve import KNOWN, PROVE, STRANGERS, Guard, Visitors
from tests.contract.common import problem, run
from tests.engine.local.common import nothing_left
from tests.watch.common import fake_store, going, gone, join, part, pull, update


@pytest.fixture
def watch() -> Iterator[Watch]:
    one = Watch("a run", file=io.StringIO())
    one.begin(fake_store(), 100)
    try:
        yield one
    finally:
        one.end()


class Caller:
    """Asks the server of a page."""

    def __init__(self, address: str):
        parts = urlsplit(address)
        assert parts.hostname
        assert parts.port
        self.host, self.port, self.path = parts.hostname, parts.port, parts.path

    def ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        line = http.client.HTTPConnection(self.host, self.port, timeout=60)
        line.request(method, path, headers=headers)
        return line.getresponse(), line

    def status(self, path: str, method: str = "GET", **headers: str) -> int:
        answer, line = self.ask(path, method, **headers)
        answer.read()
        line.close()
        return answer.status


def pictures(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


# ---------------------------------------------------------------- who is let in


def test_the_page_and_its_parts_are_served_to_whoever_has_the_token(watch: Watch) -> None:
    assert watch.address
    caller = Caller(watch.address)
    for name, kind in (("", "text/html"), ("page.css", "text/css"), ("page.js", "text/javascript")):
        answer, line = caller.ask(caller.path + name)
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith(kind)
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert "Server" not in answer.headers
        answer.read()
        line.close()
    assert caller.status(caller.path.rstrip("/")) == 308
    assert caller.status(caller.path, Host=f"localhost:{caller.port}") == 200


@pytest.mark.parametrize(
    "path",
    ["/", "", "/events", "/page.js", "/x/", "/wrong-token/events", "//", "/../", "/%00/", "/é/"],
)
def test_without_the_token_nothing_is_there(watch: Watch, path: str) -> None:
    assert watch.address
    with socket.create_connection(("127.0.0.1", Caller(watch.address).port), timeout=60) as line:
        host = f"127.0.0.1:{Caller(watch.address).port}"
        line.sendall(f"GET {path or '/'} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answer = line.recv(4096)
    assert answer.split(b" ")[1] in (b"404", b"400")
    assert watch.address.split("/")[3].encode() not in answer


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t + "A", lambda t: t.swapcase()])
def test_nearly_the_token_is_not_the_token(watch: Watch, change: Any) -> None:
    assert watch.address
    caller = Caller(watch.address)
    token = caller.path.strip("/")
    assert caller.status(f"/{change(token)}/events") == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost", "127.0.0.1:1", ""]
)
def test_a_wrong_host_is_refused_in_spite_of_the_token(watch: Watch, host: str) -> None:
    assert watch.address
    caller = Caller(watch.address)
    for path in ("", "events"):
        assert caller.status(caller.path + path, Host=host.format(port=caller.port)) in (400, 403)


def test_a_second_host_is_refused(watch: Watch) -> None:
    assert watch.address
    caller = Caller(watch.address)
    hosts = f"Host: 127.0.0.1:{caller.port}\r\nHost: evil.example\r\n"
    with socket.create_connection(("127.0.0.1", caller.port), timeout=60) as line:
        line.sendall(f"GET {caller.path} HTTP/1.1\r\n{hosts}\r\n".encode())
        assert line.recv(4096).split(b" ")[1] in (b"400", b"403")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_whoever_wants_more_than_to_read_is_refused(watch: Watch, method: str) -> None:
    assert watch.address
    caller = Caller(watch.address)
    assert caller.status(caller.path, method) == 405


# ---------------------------------------------------------------- who keeps others out


def test_idle_connections_take_no_place_of_those_with_the_token(watch: Watch) -> None:
    assert watch.address
    caller = Caller(watch.address)
    with ExitStack() as idle:
        lines = [
            idle.enter_context(socket.create_connection((caller.host, caller.port), timeout=60))
            for _ in range(STRANGERS + 8)
        ]
        for line in lines[::2]:  # and those that never come to the point
            line.sendall(b"GET /")
        for _ in range(3):
            assert caller.status(caller.path) == 200
        assert lines[0].recv(10) == b""  # the first of too many


def test_one_without_the_token_is_sent_away_with_its_answer(watch: Watch) -> None:
    assert watch.address
    answer, line = Caller(watch.address).ask("/wrong/")
    assert answer.status == 404
    assert answer.headers["Connection"] == "close"
    line.close()


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Any]] = []

    def later(self, seconds: float, action: Any) -> "Clock":
        one = Clock()
        one.due = [(self.now + seconds, action)]
        self.due.append((self.now + seconds, one))
        return one

    def cancel(self) -> None:
        self.due = []

    def pass_to(self, now: float) -> None:
        self.now = now
        for at, timer in self.due:
            if at <= now:
                for _, action in timer.due:
                    action()
                timer.cancel()


def test_a_connection_has_a_while_to_show_the_token() -> None:
    clock, closed = Clock(), list[int]()
    visitors = Visitors(clock.later)
    for port in range(4):
        visitors.came(("127.0.0.1", port), partial(closed.append, port))
        clock.pass_to(clock.now + PROVE / 8)
    assert visitors.proved(("127.0.0.1", 1))
    visitors.left(("127.0.0.1", 2))
    clock.pass_to(PROVE)
    assert closed == [0]
    clock.pass_to(10 * PROVE)
    assert closed == [0, 3]
    assert visitors.known == {("127.0.0.1", 1)}
    assert not visitors.strangers


def test_of_too_many_without_the_token_the_first_one_goes() -> None:
    closed = list[int]()
    visitors = Visitors(Clock().later)
    for port in range(STRANGERS + 2):
        visitors.came(("127.0.0.1", port), partial(closed.append, port))
    assert closed == [0, 1]


def test_there_are_so_many_places_for_those_with_the_token() -> None:
    visitors = Visitors(Clock().later)
    for port in range(KNOWN):
        assert visitors.proved(("127.0.0.1", port))
    assert not visitors.proved(("127.0.0.1", KNOWN))
    assert visitors.proved(("127.0.0.1", 0))  # it has one already
    visitors.left(("127.0.0.1", 7))
    assert visitors.proved(("127.0.0.1", KNOWN))


def test_no_file_but_its_own_is_served(watch: Watch) -> None:
    assert watch.address
    caller = Caller(watch.address)
    for path in ("serve.py", "../serve.py", "%2e%2e/serve.py", "/etc/passwd", "page.html"):
        assert caller.status(caller.path + path) == 404


def test_it_listens_on_loopback_alone(watch: Watch) -> None:
    assert watch.address
    port = Caller(watch.address).port
    listening = [
        line.split()[1].split(":")
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert [host for host, at in listening if int(at, 16) == port] == ["0100007F"]
    with pytest.raises(ConnectionRefusedError):  # another address of the same machine
        socket.create_connection(("127.0.0.2", port), timeout=60).close()


@pytest.mark.parametrize("client", [("10.0.0.5", 5000), ("::1", 5000), None])
def test_a_request_from_elsewhere_is_refused_though_everything_else_is_right(client: Any) -> None:
    guard = Guard(app=None, token="secret", port=80)  # type: ignore[arg-type]
    asked = {"method": "GET", "path": "/secret/", "headers": [(b"host", b"127.0.0.1:80")]}
    refused = guard.refusal({**asked, "client": client})
    assert refused is not None
    assert refused.status_code == 403
    assert guard.refusal({**asked, "client": ("127.0.0.1", 5000)}) is None


def test_the_token_is_new_each_time_and_not_among_the_arguments(watch: Watch) -> None:
    assert watch.address
    assert watch.process
    caller = Caller(watch.address)
    token = caller.path.strip("/")
    assert len(token) >= 32
    assert caller.status(caller.path) == 200  # it is up
    arguments = Path(f"/proc/{watch.process.pid}/cmdline").read_bytes()
    assert b"serve.py" in arguments
    assert token.encode() not in arguments
    assert token.encode() not in Path(f"/proc/{watch.process.pid}/environ").read_bytes()
    other = Watch(file=io.StringIO())
    other.begin(fake_store(), 1)
    assert other.address
    assert token not in other.address
    other.end()


# ---------------------------------------------------------------- what comes


def test_a_stream_begins_with_the_whole_and_ends_with_the_run() -> None:
    store = fake_store(workers=1)
    watch = Watch("asp", file=io.StringIO())
    watch.begin(store, samples=8)
    for record in (join(0), pull(0, 0.0), update(1.0, 1, part(0))):
        watch.see(record)
    assert watch.address
    caller = Caller(watch.address)
    answer, line = caller.ask(caller.path + "events")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.readline() == b"retry: 1000\n"
    found = pictures(answer)
    assert next(found)["title"] == "asp"
    store.applied = 8
    watch.see(update(2.0, 2, part(0, 1)))
    watch.end()
    last = list(found)[-1]
    assert last["over"] == "finished"
    assert last["version"] == 2
    assert last["counts"]["applied"] == 8
    line.close()


def test_one_that_was_not_done_was_stopped(watch: Watch) -> None:
    assert watch.address
    caller = Caller(watch.address)
    answer, line = caller.ask(caller.path + "events")
    found = pictures(answer)
    next(found)
    watch.end()
    watch.end()  # a second end is none
    assert list(found)[-1]["over"] == "stopped"
    line.close()


def test_hostile_words_stay_one_line_of_data() -> None:
    title = "</script><script>alert(1)</script>\n\nevent: x\r\ndata: y\u2028"
    watch = Watch(title, file=io.StringIO())
    watch.begin(fake_store(), 100)
    assert watch.address
    caller = Caller(watch.address)
    answer, line = caller.ask(caller.path + "events")
    assert next(pictures(answer))["title"] == title
    line.close()
    watch.end()


class Reader(ob.Listener):
    """Reads the page's stream from within a run, which that must not hold up."""

    def __init__(self, watch: Watch):
        self.watch, self.title = watch, ""

    def see(self, record: Any) -> None:
        if not self.title:
            assert self.watch.address
            caller = Caller(self.watch.address)
            answer, line = caller.ask(caller.path + "events")
            self.title = next(pictures(answer))["title"]
            line.close()


@pytest.mark.parametrize("engine", ["local", "sim"])
def test_runs_of_both_engines_are_watched_and_leave_nothing(engine: str) -> None:
    what = problem(samples=16)
    with nothing_left():
        watch = Watch("here", file=io.StringIO())
        reader = Reader(watch)
        run(engine, what, "ssp:1", workers=2, listeners=[watch, reader])
        assert reader.title == "here"
        assert watch.process is None


def test_train_takes_watch_and_says_where(capfd: pytest.CaptureFixture[str]) -> None:
    what = problem(samples=16)
    with nothing_left():
        run("local", what, "bsp", workers=2, watch=True)
    assert "watch: http://127.0.0.1:" in capfd.readouterr().err


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "NEEDED", ("starlette", "no_such_package"))
    with pytest.raises(ConfigError, match=r"pip install 'offbeat\[watch\]'"):
        Watch()


# ---------------------------------------------------------------- it never holds up a run


def test_a_server_that_hangs_neither_blocks_the_run_nor_outlives_it(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "EVERY", 0.0)
    watch.due = 0.0
    monkeypatch.setattr(feed, "SHARE", 0)
    monkeypatch.setattr(feed, "AT_THE_END", 0.1)
    assert watch.process
    process = watch.process
    os.kill(process.pid, signal.SIGSTOP)
    watch.see(join(0))
    for step in range(1, 2000):  # pictures of many times what a pipe holds
        watch.see(update(float(step), step, part(0, step)))
    assert 0 < len(watch.unsent) < 100_000
    watch.end()
    assert process.returncode == -signal.SIGKILL


def test_a_run_outlives_its_server(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY", 0.0)
    watch.due = 0.0
    assert watch.process
    process = watch.process
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    for step in range(1, 5):
        watch.see(update(float(step), step, part(0, step)))
    watch.idle()
    assert watch.process is None
    assert isinstance(watch.file, io.StringIO)
    assert watch.file.getvalue().count("the page's server has ended (-9); the run goes on") == 1
    watch.end()


# ---------------------------------------------------------------- nothing stays


@pytest.mark.parametrize("hangs", [False, True])
def test_a_killed_launcher_takes_the_server_with_it(tmp_path: Path, hangs: bool) -> None:
    with going(tmp_path) as going_on:
        assert Caller(going_on.address).status("/") == 404  # it is up
        server = going_on.children()["offbeat watch"]
        handle = os.pidfd_open(server)
        if hangs:
            os.kill(server, signal.SIGSTOP)
        going_on.process.kill()
        assert gone(handle)
        os.close(handle)


def test_ctrl_c_ends_the_run_and_then_the_server(tmp_path: Path) -> None:
    with going(tmp_path) as going_on:
        assert going_on.process.stderr
        caller = Caller(going_on.address)
        answer, line = caller.ask(caller.path + "events")
        found = pictures(answer)
        assert any(picture["version"] for picture in found)
        handle = os.pidfd_open(going_on.children()["offbeat watch"])
        os.killpg(going_on.process.pid, signal.SIGINT)
        assert list(found)[-1]["over"] == "stopped"
        assert gone(handle)
        os.close(handle)
        line.close()
        going_on.rest()
        assert going_on.process.returncode == 130


def test_a_server_without_a_parent_does_not_begin() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.fileno()
        done = subprocess.run(
            [sys.executable, "-P", feed.PROGRAM, str(number), "1"],
            input=b"token\n",
            pass_fds=[number],
            timeout=60,
        )
    assert done.returncode == 0
