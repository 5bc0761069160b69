"""What only real processes have: threads, reading ahead, overlapped exchange, Ctrl-C, Hogwild."""

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import offbeat as ob
from offbeat.engine.local.server_process import ServerProcess
from offbeat.log.records import Joined, Lost, Updated
from tests.contract.common import (
    CODECS,
    MOMENTUM,
    assert_close,
    check_run,
    named,
    optimizer_for,
    plain,
    problem,
    run,
)
from tests.contract.real import AtStep, Gate, Once, OpenWhen, children

ADAM = partial(torch.optim.Adam, lr=0.01)


class Slowly(Dataset):
    """Samples one by one, as from files; not tensors that lie in memory as a whole."""

    def __init__(self, samples: int):
        self.inside = problem(samples=samples).data

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: int) -> Any:
        return self.inside[index]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


# ---------------------------------------------------------------- replay of every stage


@pytest.mark.parametrize(
    "name", ["bsp", "soft", "ssp", "asp", "asp-inverse", "asp-dc", "asp-gap", "asup"]
)
@pytest.mark.parametrize("dies", [False, True])
def test_overlap_is_replayed_and_its_staleness_counted(local_only, name, dies, tmp_path):
    what, discipline, out = problem(net, samples=30), named(2)[name], tmp_path / "run"
    if dies:
        what = what._replace(loss=AtStep(what.loss, {(1, 4): Once(signal.SIGKILL)}))
    got = run(
        local_only, what, discipline, workers=2, overlap=True, out=out, codec="int8",
        optimizer=optimizer_for(discipline, ADAM),
    )  # fmt: skip
    records = check_run(out, what)
    if name == "soft":  # where two of one worker may wait together, and neither is behind
        return
    # A gradient made while the one before was under way is at least one version behind.
    assert got.summary().staleness_max >= 1
    if not dies:
        updates = [record for record in records if isinstance(record, Updated)]
        late = [part for record in updates for part in record.parts if part.sequence > 0]
        assert all(part.staleness >= 1 for part in late)


READ = ["bsp", "asp", "local", "easgd", "downpour-rare-push"]


@pytest.mark.parametrize(
    ("name", "overlap"), [*((name, False) for name in READ), ("bsp", True), ("asp", True)]
)
def test_reading_ahead_changes_nothing(local_only, name, overlap, tmp_path):
    inner = problem(net, samples=30)
    what = inner._replace(data=Slowly(30), loss=AtStep(inner.loss, {(1, 3): Once(signal.SIGKILL)}))
    out = tmp_path / "run"
    run(local_only, what, named(2)[name], workers=2, prefetch=True, overlap=overlap, out=out)
    check_run(out, what)
    alone = run(
        local_only, inner._replace(data=Slowly(30)), named(1)[name], workers=1, prefetch=True
    )
    same = run(local_only, inner, named(1)[name], workers=1, prefetch=False)
    assert alone.parameter_hash == same.parameter_hash


@pytest.mark.parametrize("name", ["bsp", "asp", "average"])
def test_several_threads_are_replayed_with_as_many(local_only, name, tmp_path):
    what, out = problem(net, samples=30), tmp_path / "run"
    run(local_only, what, named(2)[name], workers=2, threads=2, out=out)
    before = torch.get_num_threads()
    check_run(out, what)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("codec", "name"), [("int8", "bsp"), ("topk:0.3", "asp"), ("bf16", "local"), ("1bit", "easgd")]
)
def test_packed_pulls_are_replayed(local_only, codec, name, tmp_path):
    what, out = problem(net, samples=26), tmp_path / "run"
    got = run(local_only, what, named(2)[name], workers=2, pull_codec=codec, out=out)
    check_run(out, what)
    whole = run(local_only, what, named(2)[name], workers=2)
    assert got.summary().bytes_received < whole.summary().bytes_received


@pytest.mark.parametrize(
    ("codec", "name"),
    [(codec, name) for codec in CODECS for name in ("asp", "local")] + [("int8", "downpour")],
)
def test_every_codec_is_replayed(local_only, codec, name, tmp_path):
    what, out = problem(net, samples=26), tmp_path / "run"
    run(local_only, what, named(2)[name], workers=2, codec=codec, out=out, epochs=1)
    check_run(out, what, epochs=1)


# ---------------------------------------------------------------- Ctrl-C


class InterruptAt(ob.Listener):
    """Ctrl-C at a version."""

    def __init__(self, version: int):
        self.version = version

    def see(self, record: Any) -> None:
        if isinstance(record, Updated) and record.version == self.version:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("name", ["bsp", "asp", "local", "easgd", "fedbuff"])
def test_interrupted_saved_and_resumed(local_only, name, tmp_path, monkeypatch):
    gate, out, save = Gate(), tmp_path / "run", ServerProcess.save
    what = problem(net, samples=60)
    held = what._replace(loss=AtStep(what.loss, {(worker, 5): gate.wait for worker in range(2)}))
    options = {"workers": 2, "out": out}
    # The workers go no further before the server has been told, and has saved.
    monkeypatch.setattr(
        ServerProcess, "save", lambda server_process: (save(server_process), gate.open())
    )
    with pytest.raises(ob.Interrupted) as caught:
        run(local_only, held, named(2)[name], listeners=[InterruptAt(1)], **options)
    assert not children()
    stopped = caught.value.run.summary()
    assert 0 < stopped.samples <= 40  # of ten steps
    assert (out / "summary.json").exists()
    got = run(local_only, what, named(2)[name], resume=True, **options)
    records = check_run(out, what)
    # Nothing of what had been applied was done again.
    hashes = [record.hash for record in records if isinstance(record, Updated)]
    assert hashes[stopped.updates - 1] == stopped.parameter_hash
    assert got.parameter_hash == hashes[-1]
    joined = [r.incarnation for r in records if isinstance(r, Joined) and r.worker == 0]
    assert joined == [1, 2]


# ---------------------------------------------------------------- Hogwild


def test_hogwild_of_one_worker_is_plain_sgd(local_only):
    what = problem(samples=22)
    got = run(local_only, what, "hogwild", workers=1, optimizer=MOMENTUM)
    assert_close(got.model, plain(what, MOMENTUM))


def test_hogwild_trains_every_sample_and_cannot_be_replayed(local_only, tmp_path):
    what, out, gate = problem(samples=30), tmp_path / "run", Gate()
    # The other one waits for it, or might have done everything by then.
    acts = {(0, 2): gate.wait, (1, 2): Once(signal.SIGKILL)}
    what = what._replace(loss=AtStep(what.loss, acts))
    died = OpenWhen(gate, lambda record: isinstance(record, Lost))
    got = run(local_only, what, "hogwild", workers=2, out=out, listeners=[died])
    for epoch in got.summary().ledger:
        assert epoch["applied"] == 30
        assert epoch["repeated"] == epoch["missing"] == 0
    assert got.summary().lost >= 1
    with pytest.raises(ob.ConfigError, match="neither simulated nor replayed"):
        ob.replay(out, *what)
