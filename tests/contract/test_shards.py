"""A process for each shard of the store: the same bits, one version for all, files that fit any."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.folder.checkpoint import RunFolder
from offbeat.folder.tensors import load_tensors
from tests.contract.common import (
    CODECS,
    NAMES,
    Stop,
    StopAfter,
    assert_same_bits,
    check_run,
    named,
    optimizer_for,
    plain,
    problem,
    run,
)
from tests.contract.test_determinism import random_net

ADAM = partial(torch.optim.Adam, lr=0.01)
HALVE = ob.Schedule(partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5), "version")
PLACEMENTS = [2, ob.ByCount(3), ob.ByWeight((1.0, 4.0)), ob.BySize(8)]


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The second has one tensor, so that most shards have nothing of it."""
    first, *rest = model.parameters()
    return [{"params": rest}, {"params": [first], "lr": 0.03}]


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_one_process(local_only, name, tmp_path):
    """With clipping, a schedule, groups and batch norm, under every discipline."""
    what, discipline = problem(random_net, samples=36), named(2)[name]
    code = {"clip": ob.Clip(norm=0.3), "schedule": HALVE, "groups": two_groups}
    placement = PLACEMENTS[NAMES.index(name) % len(PLACEMENTS)]
    run(
        local_only, what, discipline, workers=2, shards=placement, epochs=1,
        optimizer=optimizer_for(discipline, ADAM), out=tmp_path / "run", **code,
    )  # fmt: skip
    check_run(tmp_path / "run", what, epochs=1, shards=1, **code)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["asp", "local", "easgd"])
def test_what_a_codec_draws_does_not_depend_on_shards(local_only, name, codec, tmp_path):
    what = problem(random_net, samples=36)
    run(
        local_only, what, named(2)[name], workers=2, shards=3, epochs=1, codec=codec,
        out=tmp_path / "run",
    )  # fmt: skip
    check_run(tmp_path / "run", what, epochs=1, shards=1)


@pytest.mark.parametrize("name", ["bsp", "fedbuff", "average"])
def test_parameters_without_a_gradient_are_left_alone_by_all(local_only, name, tmp_path):
    """One of the layers takes part in nothing, so its tensors are absent in every contribution."""

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    decay = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)
    what, code = problem(Half), {"clip": ob.Clip(norm=0.1)}
    got = run(
        local_only, what, named(2)[name], workers=2, shards=4, out=tmp_path / "run",
        optimizer=decay, **code,
    )  # fmt: skip
    check_run(tmp_path / "run", what, shards=1, **code)
    assert torch.equal(got.model.idle.weight, what.model.idle.weight)
    assert not torch.equal(got.model.used.weight, what.model.used.weight)


@pytest.mark.parametrize("shards", [1, 4])
def test_one_worker_is_a_plain_loop(local_only, shards):
    """The norm that is limited is the one of the whole gradient, whoever holds which part of it."""
    what = problem(random_net, samples=26)
    what.model.eval()
    what = what._replace(model=torch.nn.Sequential(what.model[0], what.model[3], what.model[6]))
    what.model[2] = torch.nn.Linear(7, 2).double()
    adam = partial(torch.optim.Adam, lr=0.01)
    options = {"optimizer": adam, "clip": ob.Clip(norm=0.4)}
    got = run(local_only, what, "bsp", workers=1, shards=shards, **options)
    assert_same_bits(got.model, plain(what, adam, clip=0.4))


def test_what_the_processes_hold_adds_up(local_only, tmp_path):
    what = problem(random_net)
    adam = partial(torch.optim.Adam, lr=0.01)
    one, four = (
        run(local_only, what, "bsp", workers=2, shards=shards, optimizer=adam).summary().memory
        for shards in (1, 4)
    )
    assert one["store"] == four["store"]
    assert "store_largest" not in one
    assert four["store"] / 4 <= four["store_largest"] < four["store"] / 2


def test_gradients_that_are_not_finite_are_skipped_by_all(local_only, tmp_path):
    what = problem(samples=24)
    what.data.tensors[0][5] = torch.nan
    for name in ("asp", "fedbuff", "bsp"):
        out = tmp_path / name
        got = run(local_only, what, named(2)[name], workers=2, shards=3, nonfinite="skip", out=out)
        assert got.summary().skipped > 0
        assert ob.replay(out, *what, shards=1).identical


def stages() -> torch.nn.Module:
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(3, 8), torch.nn.Tanh(), linear(8, 8), linear(8, 2))


@pytest.mark.parametrize(("shards", "files"), [(1, 1), (2, 2)])
def test_the_stages_of_a_split_model_are_dealt_whole(local_only, shards, files, tmp_path):
    what, code = problem(stages), {"clip": ob.Clip(norm=0.3)}
    run(
        local_only, what, "asp", workers=2, layout="pp=3,microbatches=4", shards=shards,
        optimizer=ADAM, out=tmp_path / "run", **code,
    )  # fmt: skip
    assert len(_files(tmp_path / "run")) == 1 + files
    check_run(tmp_path / "run", what, shards=1, **code)


def test_more_shards_than_stages_are_refused(local_only):
    with pytest.raises(ob.ConfigError, match="4 shards for 3 stages with parameters: a shard"):
        run(local_only, problem(stages), "asp", workers=2, layout="pp=3,microbatches=4", shards=4)


# ---------------------------------------------------------------- checkpoints


def _files(out: Path) -> list[str]:
    newest = sorted((out / "checkpoints").iterdir())[-1]
    return sorted(file.name for file in newest.iterdir() if file.name != "manifest.json")


@pytest.mark.parametrize("name", ["asp", "bsp", "asp-dc-adaptive", "average", "asup"])
@pytest.mark.parametrize("counts", [(4, 1, 3), (1, 3, 2)])
def test_a_run_goes_on_with_other_shards(local_only, name, counts, tmp_path):
    """The rule's state too: a replay over the whole log would not find the same bits without it."""
    what, discipline = problem(random_net, samples=26), named(2)[name]
    code = {"schedule": HALVE, "groups": two_groups}
    out, options = tmp_path / "run", {"workers": 2, "epochs": 3, "checkpoint_every": 2, **code}
    options["optimizer"] = optimizer_for(discipline, ADAM)
    for index, shards in enumerate(counts):
        last = index == len(counts) - 1
        listeners = [] if last else [StopAfter(14)]
        try:
            run(
                local_only, what, discipline, out=out, resume=index > 0, shards=shards,
                listeners=listeners, **options,
            )  # fmt: skip
        except Stop:
            assert not last
        names = _files(out)
        assert len(names) == 1 + shards or not last
    check_run(out, what, epochs=3, **code)


@pytest.mark.parametrize(
    "name", ["asp-gap", "asp-dc-adaptive", "downpour-rare-push", "easgd", "local", "fedbuff"]
)
def test_a_simulation_goes_on_with_other_shards(sim_only, name, tmp_path):
    """Workers, and contributions that wait for others, fit any number of shards too."""
    what, discipline = problem(random_net, samples=26), named(3)[name]
    options: dict[str, Any] = {"cluster": "10ms,13ms,20ms", "codec": "topk:0.3"}
    options |= {"optimizer": optimizer_for(discipline, ADAM), "checkpoint_every": 1}
    whole = run(sim_only, what, discipline, out=tmp_path / "whole", **options)
    out = tmp_path / "stopped"
    for index, shards in enumerate((4, 1, 3)):
        listeners = [StopAfter(11)] if index < 2 else []
        try:
            got = run(
                sim_only, what, discipline, out=out, resume=index > 0, shards=shards,
                listeners=listeners, **options,
            )  # fmt: skip
        except Stop:
            continue
    assert (out / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()
    assert got.parameter_hash == whole.parameter_hash


def test_every_process_writes_what_it_holds(local_only, tmp_path):
    what = problem(random_net)
    run(local_only, what, "bsp", workers=2, shards=3, optimizer=ADAM, out=tmp_path / "run")
    assert _files(tmp_path / "run") == [
        "state.json",
        *(f"tensors-{number}.safetensors" for number in range(3)),
    ]
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    parts = [load_tensors(newest / f"tensors-{number}.safetensors") for number in range(3)]
    held = [{n for n in part if n.startswith("store/parameters/")} for part in parts]
    names = [f"store/parameters/{name}" for name, _ in what.model.named_parameters()]
    assert sorted(n for part in held for n in part) == sorted(names)
    for mine, part in zip(held, parts, strict=True):
        moments = {n.rpartition("/")[0] for n in part if n.endswith("/exp_avg")}
        assert {n.replace("/rule/", "/parameters/") for n in moments} == mine


def test_a_damaged_file_of_one_process_is_named(local_only, tmp_path):
    what = problem()
    run(local_only, what, "bsp", workers=2, shards=2, out=tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    file = newest / "tensors-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=r"tensors-1\.safetensors is damaged"):
        RunFolder(tmp_path / "run").load()


@pytest.mark.parametrize("counts", [(3, 1), (1, 3), (3, 2)])
def test_a_run_begins_with_another_of_other_shards(local_only, counts, tmp_path):
    """With its rule's state, as the replay of what was kept of it shows."""
    what, before = problem(random_net), tmp_path / "before"
    options = {"workers": 2, "optimizer": ADAM}
    run(local_only, what, "asp", shards=counts[0], out=before, **options)
    out = tmp_path / "run"
    run(local_only, what, "asp", shards=counts[1], start=before, out=out, **options)
    check_run(out, what)
