"""Members of a group find each other where no other user can look, and know each other."""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from offbeat.transport.group_keys import KeyFile, Keys, SharedKeys
from tests.contract.common import problem, run
from tests.engine.local.test_rendezvous import as_another_user

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="plays another user")


def together(each: list[Callable[[], Any]]) -> list[Any]:
    """What each of them returns or raises, all at the same time."""
    found: list[Any] = [None] * len(each)

    def body(number: int) -> None:
        try:
            found[number] = each[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=body, args=(n,)) for n in range(len(each))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def file() -> Any:
    made = KeyFile()
    yield made
    os.close(made.file)


@ROOT
def test_another_user_cannot_open_the_keys(file: KeyFile) -> None:
    def look() -> bytes:
        return Path(path).read_bytes() or b"nothing yet"

    path = file.path
    assert as_another_user(look) == b"PermissionError"
    assert look() == b"nothing yet"


def test_members_know_each_other(file: KeyFile) -> None:
    for number in (1, 2):  # the second in a file of its own
        file.renew()
        members = [Keys(file.path, file.secret, 60) for _ in range(2)]
        found = together([partial(members[r].connect, number, r, 2) for r in range(2)])
        assert [group.rank() for group in found] == [0, 1]
        for member in members:
            member.close()


def test_one_without_the_secret_is_no_member(file: KeyFile) -> None:
    keys = [Keys(file.path, bytes(32) if r else file.secret, 60) for r in range(2)]
    member, stranger = together([partial(keys[r].connect, 1, r, 2) for r in range(2)])
    assert isinstance(member, ConnectionError)
    assert "who connected as member 1 is none" in str(member)
    assert isinstance(stranger, ConnectionError)
    for one in keys:
        one.close()


def test_a_number_that_is_another_file_by_now_is_not_written(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("w+") as opened,
        pytest.raises(ConnectionError, match="the server is gone"),
    ):
        SharedKeys(f"/proc/{os.getpid()}/fd/{opened.fileno()}", 60)


def test_keys_that_do_not_come_are_not_waited_for_for_ever(file: KeyFile) -> None:
    keys = SharedKeys(file.path, 0.01)
    os.write(file.file, b'["half')  # of one that was killed
    with pytest.raises(TimeoutError, match="the other members have not come within"):
        keys.get("half")
    keys.close()


def test_a_run_opens_no_store_of_keys_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("any user of this machine could write there")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    done = run("local", problem(samples=12), "bsp", workers=2, epochs=1, via="allreduce")
    assert done.summary().updates > 0
