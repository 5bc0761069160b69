"""One process at a time writes into a run folder, and a dead one is no obstacle."""

import os
import re
import signal
from pathlib import Path

import pytest

from offbeat.errors import CheckpointError
from offbeat.folder.lock import Lock


def test_a_folder_is_held_until_it_is_released(tmp_path: Path) -> None:
    first = Lock(tmp_path)
    with pytest.raises(CheckpointError, match=rf"is in use by process {os.getpid()} \(.+\): wait"):
        Lock(tmp_path)
    first.release()
    assert not list(tmp_path.iterdir())
    second = Lock(tmp_path)
    first.release()  # once more, and it is another's by now
    with pytest.raises(CheckpointError, match="is in use"):
        Lock(tmp_path)
    second.release()


def test_a_lock_that_is_forgotten_is_free(tmp_path: Path) -> None:
    Lock(tmp_path)
    Lock(tmp_path).release()


def test_a_killed_process_leaves_it_free_although_its_child_lives(tmp_path: Path) -> None:
    told, tell = os.pipe()
    stay, leave = os.pipe()
    launcher = os.fork()
    if not launcher:
        kept = Lock(tmp_path)
        if not os.fork():
            os.write(tell, b"%d " % os.getppid())
            os.close(leave)
            os.read(stay, 1)  # until the test is over
            os._exit(0)
        signal.pause()
        kept.release()
    assert os.read(told, 20) == b"%d " % launcher
    with pytest.raises(CheckpointError, match=f"in use by process {launcher} "):
        Lock(tmp_path)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    Lock(tmp_path).release()
    for end in (told, tell, stay, leave):
        os.close(end)


def test_it_is_passed_on_to_a_child(tmp_path: Path) -> None:
    told, tell = os.pipe()
    stay, leave = os.pipe()
    kept = Lock(tmp_path)
    with kept.passed_on():
        child = os.fork()
        if not child:
            os.write(tell, b"!")
            os.read(stay, 1)
            kept.release()
            os._exit(0)
    assert os.read(told, 1) == b"!"
    with pytest.raises(CheckpointError, match=f"in use by process {child} "):
        Lock(tmp_path)
    kept.release()  # not this process's any more
    with pytest.raises(CheckpointError, match="in use"):
        Lock(tmp_path)
    os.write(leave, b"!")
    os.waitpid(child, 0)
    assert not list(tmp_path.iterdir())
    Lock(tmp_path).release()
    for end in (told, tell, stay, leave):
        os.close(end)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("untouched")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="cannot be locked"):
        Lock(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "untouched"


@pytest.mark.parametrize("text", ["", "what", "999999999", "\x1b[2J", "1" * 100])
def test_a_holder_that_is_not_told(tmp_path: Path, text: str) -> None:
    kept = Lock(tmp_path)
    (tmp_path / "lock").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        Lock(tmp_path)
    assert re.search("is in use by another process: wait", str(caught.value))
    kept.release()
