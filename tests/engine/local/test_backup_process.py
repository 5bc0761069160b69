"""The server of a store that no image can keep is killed: its backup has all that was told."""

import signal
from typing import Any

import pytest

import offbeat as ob
from offbeat.engine.local import backup_process, crash_image
from offbeat.engine.local.backup_process import WordInPieces, pieces
from offbeat.log.records import EpochDone, Joined, Lost, Updated
from tests.contract.common import named, problem, run
from tests.engine.local.common import (
    PATIENCE,
    Script,
    Step,
    after,
    assert_exact,
    assert_replays,
    children,
    faulty,
    seen,
    strike,
)

NAMES = ["bsp", "ssp", "asp", "asp-dc", "soft", "fedbuff", "local", "diloco", "gossip", "average"]


@pytest.fixture(autouse=True)
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as a large one."""
    monkeypatch.setattr(crash_image, "LARGEST", 0)


def kept_all(script: Any) -> None:
    """Every version was made once: nothing that was told has been given up."""
    versions = [record.version for record in script.all if isinstance(record, Updated)]
    assert versions == list(range(1, len(versions) + 1))


def again(*names: str) -> list[Step]:
    """They are killed, and the run gets on."""
    return [after(3), strike(*names), seen(Joined), after(3)]


def clipped(name: str) -> dict[str, Any]:
    """A limit on the norm makes the store write where a contribution lies."""
    return {"clip": ob.Clip(norm=0.01)} if name in ("asp", "ssp") else {}


@pytest.mark.parametrize(
    ("name", "shards"), [(name, 1 + 2 * (i % 2)) for i, name in enumerate(NAMES)]
)
def test_a_server_is_killed_twice_and_loses_nothing(gate, out, name, shards):
    steps = [*again("offbeat server"), *again("offbeat server")]
    options = {"shards": shards, "epochs": 6, "checkpoint_every": 1000, **clipped(name)}
    done, script, what = faulty(gate, named(3)[name], steps, out=out, **options)
    kept_all(script)
    assert_exact(done, 48, 6)
    assert_replays(done, what, **clipped(name))


@pytest.mark.parametrize("discipline", ["asp", "gossip"])
def test_so_it_is_without_a_folder_and_after_a_checkpoint_in_memory(gate, discipline):
    steps = [seen(EpochDone), *again("offbeat server"), seen(EpochDone), *again("offbeat server")]
    done, script, _ = faulty(gate, discipline, steps, shards=2)
    kept_all(script)
    assert_exact(done, 48, 12)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 100])
def test_a_word_of_any_size_goes_in_packets(monkeypatch, size):
    monkeypatch.setattr(backup_process, "PIECE", 4)
    word, found = WordInPieces(), bytes(range(size))
    *most, last = list(pieces(found))
    assert max(map(len, [*most, last])) <= 5
    assert [word.take(piece) for piece in most] == [None] * len(most)
    assert word.take(memoryview(last)) == found
    assert word.take(next(pieces(b"next"))) == b"next"


def test_words_too_large_for_a_packet_are_followed_and_handed_over(gate, monkeypatch, out):
    monkeypatch.setattr(backup_process, "PIECE", 16)
    steps = [*again("offbeat server"), *again("offbeat server")]
    done, script, what = faulty(gate, "soft:2", steps, out=out, epochs=6, checkpoint_every=1000)
    kept_all(script)
    assert_exact(done, 48, 6)
    assert_replays(done, what)


@pytest.mark.parametrize("name", ["soft", "asp-dc"])
def test_a_backup_is_killed_and_another_takes_over_from_the_living(gate, out, name):
    backups: set[int] = set()

    def others(wanted: int) -> Step:
        """Done when so many different ones have been there."""

        def step(record: Any) -> bool:
            backups.update(pid for name, pid in children().items() if name == "offbeat backup")
            return len(backups) >= wanted

        return step

    steps = [others(1), after(3), strike("offbeat backup"), others(2), after(6)]
    steps += again("offbeat server")
    done, script, what = faulty(gate, named(3)[name], steps, out=out, checkpoint_every=1000)
    kept_all(script)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


def test_a_backup_stands_still_and_the_server_goes_on_after_patience(gate, out):
    steps = [after(3), strike("offbeat backup", what=signal.SIGSTOP), after(8)]
    done, script, what = faulty(gate, "ssp:1", steps, out=out, patience=PATIENCE)
    kept_all(script)
    assert not [record for record in script.all if isinstance(record, Lost)]
    assert_exact(done, 48, 12)
    assert_replays(done, what)


def test_so_it_is_where_contributions_come_over_tcp(gate, out):
    script = Script(gate, [*again("offbeat server"), *again("offbeat server")])
    what = problem(samples=48)._replace(loss=gate)
    options = {"workers": 3, "epochs": 12, "out": out, "shards": 2, "codec": "int8"}
    done = run("hosts", what, "soft:2", listeners=[script], checkpoint_every=1000, **options)
    assert not script.left
    kept_all(script)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


def test_both_are_killed_and_the_run_goes_back_to_its_last_checkpoint(gate, out):
    steps = [seen(EpochDone), after(2), strike("offbeat backup", "offbeat server"), seen(Joined)]
    done, _, what = faulty(gate, "asp", [*steps, after(3)], out=out)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


def test_without_a_backup_there_is_none(gate, out):
    steps = [seen(EpochDone), after(2), strike("offbeat server"), seen(Joined), after(3)]
    there: list[str] = []

    class Look(ob.Listener):
        def see(self, record: Any) -> None:
            there.extend(children())

    script = Script(gate, steps)
    what = problem(samples=48)._replace(loss=gate)
    options = {"workers": 3, "epochs": 12, "out": out, "backup": False}
    done = run("local", what, "asp", listeners=[script, Look()], **options)
    assert not script.left
    assert "offbeat backup" not in there
    assert_exact(done, 48, 12)
    assert_replays(done, what)
