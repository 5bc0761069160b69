"""The server of a store that no image can keep is killed: its backup has all that was told."""

from typing import Any

import pytest

from offbeat.engine.local import crash_image
from offbeat.log.records import Joined, Updated
from tests.contract.common import named
from tests.engine.local.common import (
    Step,
    after,
    assert_exact,
    assert_replays,
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


def strike_twice() -> list[Step]:
    return [after(3), strike("offbeat server"), seen(Joined), after(4), strike("offbeat server")]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_server_loses_nothing(gate, out, name, shards):
    steps = [*strike_twice(), seen(Joined), after(2)]
    what = named(3)[name]
    done, script, what = faulty(
        gate, what, steps, out=out, shards=shards, epochs=6, checkpoint_every=1000
    )
    kept_all(script)
    assert_exact(done, 48, 6)
    assert_replays(done, what)
