"""Where the ranks of torchrun meet: who comes in, and who keeps nobody from it."""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from offbeat.config.describe import first_difference
from offbeat.engine.local import private_folder as private
from offbeat.engine.local import rendezvous as module
from offbeat.engine.local.rendezvous import (
    Challenge,
    RankAdmission,
    RankCandidate,
    RankRequest,
    Rendezvous,
    RendezvousClient,
)
from offbeat.errors import ConfigError, RunError
from tests.engine.local.common import nothing_left

SKETCH: dict[str, Any] = {"model": ["a"], "batch_size": 4, "optimizer": None}
LONG = 1e6  # seconds: none of these tests waits for as long
NOBODY = 65534
NONSENSE = "what it said makes no sense"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="plays another user")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with nothing_left():
        yield tmp_path / "offbeat"


class Open(ExitStack):
    """A rendezvous, and a thread that lets one in."""

    def __init__(self, patience: float = LONG, name: str = "run"):
        super().__init__()
        self.rendezvous = Rendezvous(name, SKETCH, patience)
        self.callback(self.rendezvous.close)
        self.found: list[RankCandidate] = []
        self.thread = threading.Thread(target=self._admit, daemon=True)

    def _admit(self) -> None:
        candidate = self.rendezvous.admit()
        self.found.append(candidate)
        with candidate.wire, open("/dev/null") as memory:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                self.rendezvous.let_in(candidate, [memory.fileno(), theirs.fileno()])

    def __enter__(self) -> "Open":
        self.thread.start()
        return self

    def connected(self) -> socket.socket:
        """A connection of this user that has heard the challenge."""
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.callback(wire.close)
        wire.connect(self.rendezvous.files.path("socket"))
        assert isinstance(module.decode_challenge(wire.recv(9999)), Challenge)
        return wire

    def lets_a_rank_in(self, rank: int = 1) -> None:
        come("run", rank, SKETCH)
        self.thread.join()
        assert [candidate.rank for candidate in self.found] == [rank]


def come(name: str, rank: int, sketch: dict[str, Any]) -> None:
    memory, wire = RendezvousClient(name, rank, sketch, first_difference).enter(60)
    os.close(memory)
    wire.close()


def as_another_user(action: Callable[[], bytes]) -> bytes:
    """What `action` finds as somebody else."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            os.write(write, action())
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read()
    os.waitpid(pid, 0)
    return found


def test_ranks_come_in_and_nothing_is_left(runtime: Path) -> None:
    with Open() as here:
        assert (runtime.stat().st_mode & 0o777, os.listdir(runtime) != []) == (0o700, True)
        assert all(f.stat().st_mode & 0o077 == 0 for f in runtime.glob("*.pass"))
        here.lets_a_rank_in()
        assert not here.rendezvous.refused
    assert os.listdir(runtime) == []


@ROOT
def test_another_user_cannot_connect(runtime: Path) -> None:
    with Open() as here:
        path = here.rendezvous.files.path("socket")

        def connect() -> bytes:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wire:
                wire.connect(path)
                return wire.recv(9999)

        assert as_another_user(connect) == b"PermissionError"
        # Even where the folder's mode did not keep it out: the kernel knows who it is.
        os.chmod(runtime, 0o777)
        os.chmod(path, 0o777)
        assert as_another_user(connect) == b""
        os.chmod(runtime, 0o700)
        here.lets_a_rank_in()
        assert here.rendezvous.refused == {f"it is of another user ({NOBODY})": 1}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"[1, {}]", NONSENSE),
        (b"\xff" * 100, NONSENSE),
        (msgspec.msgpack.encode([1, {}]), NONSENSE),
        (
            msgspec.msgpack.encode(["RankRequest", "1", b"", b"", "", b""]),
            NONSENSE,
        ),
        (
            msgspec.msgpack.encode(RankRequest(1, b"n", b"s", "", b"")),
            "it does not know the token of this run",
        ),
        (
            msgspec.msgpack.encode(RankRequest(1, b"n", b"s", "", b"?" * 32)),
            "it does not know the token of this run",
        ),
        (b"x" * (module.LARGEST + 1), "it said too much"),
        (b"", "it left without a word"),
    ],
)
def test_nonsense_is_refused_and_noted_and_the_run_goes_on(
    said: bytes, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with Open() as here:
        for _ in range(2):
            wire = here.connected()
            if said:
                wire.send(said)
                assert wire.recv(10) == b""
            else:
                wire.close()
        here.lets_a_rank_in()
        assert here.rendezvous.refused == {reason: 2}
    assert capfd.readouterr().err.count(reason) == 1


def test_a_proof_serves_for_one_challenge_alone() -> None:
    """Whoever has seen what a rank said cannot say it again."""
    with Open() as here:
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wire.connect(here.rendezvous.files.path("socket"))
        wire.recv(9999)
        request = RankRequest(1, b"n", here.rendezvous.sketch, "")
        request.proof = module._proof_of(here.rendezvous.token, request, b"of another connection")
        wire.send(module.encode(request))
        assert wire.recv(10) == b""
        wire.close()
        here.lets_a_rank_in()


def test_the_silent_keep_nobody_waiting() -> None:
    with Open() as here:
        for _ in range(module.PENDING + 8):
            here.connected()
        here.lets_a_rank_in()
        assert here.rendezvous.refused.total() > 0  # there is room for so many and no more


def test_the_silent_are_sent_away_after_a_while() -> None:
    with Open(patience=0.01) as here:
        wires = [here.connected() for _ in range(3)]
        assert [wire.recv(10) for wire in wires] == [b""] * 3  # that they wait for
        assert here.rendezvous.refused == {"it said nothing for 0.01 s": 3}
        # Enough for a rank, on however slow a machine.
        here.rendezvous.patience = LONG
        here.lets_a_rank_in()


def test_what_a_killed_run_has_left_is_removed(runtime: Path) -> None:
    for name in ("run", "another"):
        pid = os.fork()
        if pid == 0:
            Rendezvous(name, SKETCH, LONG)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
    assert len(list(runtime.iterdir())) == 3  # the second has removed those of the first
    left = (runtime / "another.pass").read_bytes()
    with Open(name="another") as here:
        assert len(list(runtime.iterdir())) == 3
        assert (runtime / "another.pass").read_bytes() != left
        come("another", 0, SKETCH)
        here.thread.join()
    assert os.listdir(runtime) == []


def test_a_rendezvous_that_is_open_is_not_opened_again() -> None:
    with Open() as here:
        with pytest.raises(ConfigError, match="give torchrun another --rdzv-id"):
            Rendezvous("run", SKETCH, 0.01)
        here.lets_a_rank_in()


def test_a_folder_that_others_can_enter_is_not_used(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private.tempfile, "gettempdir", lambda: str(tmp_path))
    runtime.mkdir(0o755)
    runtime.chmod(0o755)
    other = tmp_path / f"offbeat-{os.geteuid()}"
    with Open() as here:
        assert os.listdir(runtime) == []
        assert len(os.listdir(other)) == 3
        here.lets_a_rank_in()
    other.rmdir()
    other.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="set TMPDIR to a folder of your own"):
        Rendezvous("run", SKETCH, LONG)


def test_a_rank_does_not_believe_a_host_without_the_token(runtime: Path) -> None:
    """Nor does it keep the handles that come from there."""
    runtime.mkdir(0o700)
    tries = 0

    def alive() -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            raise RunError("enough")

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(runtime / "run.socket"))
        listening.listen()
        token = msgspec.msgpack.encode(private.Credentials(b"the real one", SKETCH))
        (runtime / "run.pass").write_bytes(token)

        def pretend() -> None:
            for _ in range(2):
                with listening.accept()[0] as wire, open("/dev/null") as file:
                    wire.send(module.encode(Challenge(b"x")))
                    wire.recv(9999)
                    answer = module.encode(RankAdmission(secrets.token_bytes(32)))
                    socket.send_fds(wire, [answer], [file.fileno(), file.fileno()])

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RunError, match="enough"):
            RendezvousClient("run", 1, SKETCH, first_difference).enter(60, alive)
        thread.join()


def test_ranks_say_where_they_differ() -> None:
    with Open() as here:
        theirs = SKETCH | {"batch_size": 8}
        come("run", 1, theirs)
        here.thread.join()
        request = here.found[0].request
        assert request.sketch != here.rendezvous.sketch
        assert request.difference == "batch_size is 8 here and 4 in the run"
