"""What goes over TCP, packed or not, comes to the same bits as on one machine."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.log.records import Updated
from offbeat.transport.handshake import HELLO, NUMBER
from tests.contract.common import Problem, check_run, problem, run
from tests.engine.hosts.common import over_tcp, through
from tests.engine.hosts.proxy import Proxy
from tests.engine.local.common import nothing_left

Options = dict[str, Any]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def same_bits(one: ob.Run, other: ob.Run) -> None:
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


PACKED: list[tuple[str, Options]] = [
    ("asp", {}),
    ("asp", {"codec": "int8", "pull_codec": "int8"}),
    ("asp", {"codec": "topk:0.3", "pull_codec": "bf16"}),
    ("local:2", {"codec": "1bit"}),
    ("bsp", {"codec": "bf16", "pull_codec": "int8"}),
    ("average:1", {"codec": "fp16", "pull_codec": "topk:0.3"}),
]


@pytest.mark.parametrize(("discipline", "options"), PACKED, ids=str)
def test_the_bits_are_those_of_one_machine(
    tmp_path: Path, discipline: str, options: Options
) -> None:
    what = problem(normed)
    options = {"workers": 1} | options
    here = run("local", what, discipline, **options)
    with nothing_left():
        there = over_tcp(what, discipline, out=tmp_path / "there", **options)
    same_bits(here, there)
    check_run(tmp_path / "there", what)


def test_torn_connections_change_no_bit(tmp_path: Path) -> None:
    """Also of changes that are packed on top of each other."""
    what, options = problem(normed), {"workers": 1, "codec": "int8", "pull_codec": "int8"}
    here, proxy = run("local", what, "asp", **options), Proxy(7)
    with nothing_left(), through(proxy, 4):
        there = over_tcp(what, "asp", out=tmp_path / "there", patience=20.0, **options)
    assert proxy.torn > 3
    same_bits(here, there)
    check_run(tmp_path / "there", what)


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 30_000), nn.Tanh(), nn.Linear(30_000, 2))


def test_large_buffers_are_cut_over_connections_that_are_torn(tmp_path: Path) -> None:
    what, options = problem(large, samples=12), {"workers": 1, "batch_size": 2, "epochs": 1}
    here, proxy = run("local", what, "asp", **options), Proxy(3, usual=700_000)
    with nothing_left(), through(proxy, 4):
        there = over_tcp(what, "asp", out=tmp_path / "there", patience=20.0, **options)
    assert proxy.bytes > 12 * 1_440_000
    assert proxy.torn > 3
    same_bits(here, there)


def test_a_run_that_was_stopped_goes_on_and_is_replayed(tmp_path: Path) -> None:
    """A worker that comes again pulls all once more; the store and a replay know of it."""
    what, folder = problem(normed, samples=48), tmp_path / "run"
    options: Options = {"workers": 1, "codec": "int8", "pull_codec": "int8", "epochs": 4}
    options["out"] = folder

    class Stop(ob.Listener):
        updates = 0

        def see(self, record: Any) -> None:
            self.updates += isinstance(record, Updated)
            if self.updates == 9:
                self.updates += 1
                raise KeyboardInterrupt

    stopped = Stop()
    with nothing_left(), pytest.raises(KeyboardInterrupt):
        over_tcp(what, "asp", listeners=[stopped], checkpoint_every=4, **options)
    with nothing_left():
        over_tcp(what, "asp", resume=True, **options)
    check_run(folder, what, 4)


def words(sparse: bool) -> Problem:
    """A table of 60 rows, of which a batch looks up a few."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 16, sparse=sparse), nn.Flatten(), nn.Linear(32, 2))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(60, (24, 2), generator=generator)
    target = torch.randint(2, (24,), generator=generator)
    return Problem(model, TensorDataset(inputs, target), F.cross_entropy)


def test_rows_of_a_sparse_table_travel_alone(tmp_path: Path) -> None:
    what, options = words(True), {"workers": 1, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    here = run("local", what, "asp", **options)
    proxy = Proxy()
    with nothing_left(), through(proxy):
        there = over_tcp(what, "asp", out=tmp_path / "run", **options)
    same_bits(here, there)
    check_run(tmp_path / "run", what)
    dense = Proxy()
    with nothing_left(), through(dense):
        over_tcp(words(False), "asp", **options)
    updates = there.summary().updates
    table, rows = 60 * 16 * 4, 8 * (16 * 4 + 8)  # of a batch of 4 samples with 2 words each
    assert dense.bytes - proxy.bytes >= updates * (table - rows) * 0.9


@pytest.mark.parametrize("epochs", [1, 6])
def test_every_byte_on_the_wire_is_counted(epochs: int) -> None:
    """But for what comes before the first frame, and the last words, which tell of it."""
    what, proxy = problem(), Proxy()
    with nothing_left(), through(proxy, 4):
        done = over_tcp(what, "asp", workers=2, epochs=epochs, codec="int8")
    beside = 2 * (4 * (HELLO + 3 * NUMBER) + 4 * 200 + 300)  # however long the run was
    assert 0 < proxy.bytes - done.summary().wire_bytes <= beside
