"""A stage shared by several processes: the gradients of one process, replayed to the bit."""

import copy
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.log.records import Joined, Lost
from offbeat.split import tensor_shards as shards
from offbeat.split.channel import Channel, Mesh, Wires, alone
from offbeat.split.layout import Layout
from offbeat.split.one_process import PartsInOneProcess
from offbeat.split.part import ALL, Part, PartSpec
from offbeat.split.plan.blocks import find, whole
from offbeat.split.plan.cut import Cut
from offbeat.split.plan.partition import evenly
from offbeat.split.tensor_group import ProcessTensorGroup
from tests.contract.common import problem, scratch
from tests.engine.local.common import (
    Gate,
    Script,
    after,
    assert_exact,
    children,
    nothing_left,
    seen,
)

WIDTH, WORDS, LENGTH = 6, 8, 3
ADAM = partial(torch.optim.AdamW, lr=0.01)


class Layer(nn.Module):
    """Shared up and down, a norm that is whole, a skip inside, and one that is carried on."""

    layout_shards: ClassVar = {"up": "column", "down": "row"}

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.inside, self.drop = nn.Dropout(chance), nn.Dropout(chance)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        skip, value = pair
        inner = self.inside(F.gelu(self.up(self.norm(value))))
        return skip, value + self.drop(self.down(inner))


class Words(nn.Module):
    """Tied embeddings, and the embedded words once more at the end."""

    layout_blocks = (("embed", "token", "place"), "layers", "end", "head")
    layout_shards: ClassVar = {"token": "row", "head": "gathered"}

    def __init__(self, layers: int = 6, chance: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer(chance) for _ in range(layers))
        self.end = End()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, codes: Tensor) -> Tensor:
        pair = self.embed(codes)
        for layer in self.layers:
            pair = layer(pair)
        result: Tensor = self.head(self.end(pair))
        return result

    def embed(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        value = self.token(codes) + self.place
        return value, value


class Apart(Words):
    """The same with a head of its own, as local steps need it."""

    layout_shards: ClassVar = {"token": "gathered", "head": "gathered"}

    def __init__(self, layers: int = 2, chance: float = 0.2) -> None:
        super().__init__(layers, chance)
        self.head = nn.Linear(WIDTH, WORDS)


class End(nn.Module):
    """Where the skip arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self.norm(pair[0] + pair[1])
        return result


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def words(samples: int = 24) -> TensorDataset:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        codes = torch.randint(0, WORDS, (samples, LENGTH))
        return TensorDataset(codes, torch.randint(0, WORDS, (samples, LENGTH)))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


# ---------------------------------------------------------------- gradients


def cut_of(layout: Layout, model: nn.Module) -> Cut:
    blocks = find(model) if layout.stages > 1 else whole(model)
    cut = Cut.of(layout, model, blocks, evenly([1.0] * len(blocks), layout.stages))
    return replace(cut, shards=shards.find(model, layout.tp) if layout.tp > 1 else None)


def together(jobs: Sequence[Callable[[], None]]) -> None:
    """Run all at the same time, as if each were in a process of its own."""
    failed: list[BaseException] = []

    def body(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=body, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def gradients(cut: Cut, model: nn.Module, reader: Reader, lease: Lease) -> dict[str, Tensor]:
    """What the processes of a replica find together, over the wires that they really use."""
    layout = cut.layout
    wires = Wires(layout.pp * layout.tp)
    parts = []
    for process in range(layout.pp * layout.tp):
        mine = {o: Channel(end, o) for (one, o), end in wires.ends.items() if one == process}
        mesh = Mesh(process, mine)
        peers = ProcessTensorGroup(mesh, cut.peers_of(process)) if cut.shards is not None else None
        parts.append(Part(model, PartSpec(cut, process, mesh, reader, loss, peers=peers)))
    together([partial(part.compute, lease) for part in parts])
    for end in wires.ends.values():
        end.close()
    found: dict[str, Tensor] = {}
    for process, part in enumerate(parts):
        shard = cut.place_of(process)[1]
        for name, parameter in part.owned().items():
            assert parameter.grad is not None
            dim = None if cut.shards is None else cut.shards.dims.get(name)
            if shard == 0:
                found[name] = parameter.grad
            elif dim is not None:
                found[name] = torch.cat([found[name], parameter.grad], dim)
            else:
                assert torch.equal(found[name], parameter.grad)  # whole, and equal everywhere
    return found


SCHEDULES = ("layers", "gpipe", "1f1b", "interleaved", "zero-bubble")


EVERY = [
    (schedule, pp, tp)
    for schedule in SCHEDULES
    for pp in (1, 2, 3, 4)
    for tp in (1, 2)
    if (schedule, pp) != ("interleaved", 1)  # one process has nobody to alternate with
]


@pytest.mark.parametrize(("schedule", "pp", "tp"), EVERY)
def test_gradients_are_those_of_one_process(schedule, pp, tp):
    pieces = 1 if schedule == "layers" else 12
    model = made(Words).double()
    data = words(24)
    reader, lease = Reader(data), Lease(0, 0, 24)
    cut = cut_of(Layout(pp=pp, tp=tp, schedule=schedule, microbatches=pieces), model)
    found = gradients(cut, model, reader, lease)
    inputs, target = reader.read(lease)
    loss(model(inputs), target).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=0, atol=1e-10), name
    # And one process that makes the same passes finds the same bits.
    kind = PartsInOneProcess if tp > 1 else Part
    alike = kind(model, PartSpec(cut, ALL, alone(), reader, loss))
    alike.compute(lease)
    for name, parameter in alike.owned().items():
        assert torch.equal(found[name], parameter.grad), name


@pytest.mark.parametrize("tp", [2, 5])
def test_sums_have_the_same_bits_whoever_makes_them(tp):
    """In float32, where the order of a sum shows."""
    model = made(partial(Apart, chance=0.0))
    for layer in model.layers:
        layer.layout_shards = {"up": "column", "down": "row"}
    model.layout_shards = {"layers.*.up": "column"}
    reader, lease = Reader(words()), Lease(0, 0, 8)
    cut = cut_of(Layout(tp=tp, microbatches=2), model)
    alike = PartsInOneProcess(model, PartSpec(cut, ALL, alone(), reader, loss))
    alike.compute(lease)
    for name, gradient in gradients(cut, model, reader, lease).items():
        assert torch.equal(gradient, alike.owned()[name].grad), name


class Seen(nn.Dropout):
    """Remembers what it let through."""

    def forward(self, value: Tensor) -> Tensor:
        self.kept = super().forward(torch.ones_like(value)) > 0
        return value * self.kept


def test_chance_is_equal_where_all_is_whole_and_differs_between_parts():
    model = made(partial(Apart, chance=0.5))
    for layer in model.layers:
        layer.inside, layer.drop = Seen(0.5), Seen(0.5)
    cut = cut_of(Layout(tp=2), model)
    turns = PartsInOneProcess(model, PartSpec(cut, ALL, alone(), Reader(words()), loss))
    turns.train()
    turns.compute(Lease(0, 0, 8))
    one, other = (part.stages[0].get_submodule("layers") for part in turns.parts)
    assert torch.equal(one[0].drop.kept, other[0].drop.kept)
    assert torch.equal(one[1].drop.kept, other[1].drop.kept)
    masks = [layers[n].inside.kept for layers in (one, other) for n in (0, 1)]
    assert all(not torch.equal(a, b) for a, b in combinations(masks, 2))
    assert not torch.equal(one[0].drop.kept, one[1].drop.kept)


# ---------------------------------------------------------------- runs


def run(model: nn.Module, discipline: str, layout: str, **options: Any) -> ob.Run:
    options = {"workers": 2, "batch_size": 4, "epochs": 1, "optimizer": ADAM} | options
    return ob.train(
        copy.deepcopy(model),
        words(),
        loss,
        discipline=discipline,
        layout=layout,
        engine="local",
        **options,
    )


@pytest.mark.parametrize(
    ("discipline", "layout", "make"),
    [
        ("asp", "pp=2,tp=2,schedule=zero-bubble", partial(Words, 2, 0.2)),
        ("bsp", "pp=2,tp=2,microbatches=4,split=count", partial(Words, 2, 0.2)),
        ("ssp:2", "tp=2,precision=bf16", partial(Words, 2, 0.2)),
        ("local:2", "tp=2", partial(Words, 2, 0.2)),
        ("average:2", "pp=2,tp=2", Apart),
        ("easgd:2", "tp=2,precision=fp16", Apart),
        ("diloco:2", "pp=2,tp=2", Apart),
    ],
)
def test_runs_replay_to_the_bit(discipline, layout, make):
    with scratch() as folder, nothing_left():
        model = made(make)
        done = run(model, discipline, layout, out=folder / "run")
        assert done.figures.ledger == [
            {"applied": 24, "repeated": 0, "missing": 0, "dropped": 0, "skipped": 0}
        ]
        replayed = ob.replay(folder / "run", model, words(), loss, optimizer=ADAM).check()
        assert replayed.versions == done.figures.updates


def test_a_simulated_worker_computes_the_same():
    """The whole replica in one process, checkpoint and all."""
    model = made(partial(Words, 2, 0.2))
    with scratch() as folder:
        alike = {"discipline": "bsp", "layout": "tp=2", "workers": 1, "batch_size": 4}
        mine = copy.deepcopy(model)
        real = ob.train(
            mine, words(), loss, optimizer=ADAM, engine="local", out=folder / "real", **alike
        )
        simulated = ob.train(model, words(), loss, optimizer=ADAM, engine="sim", **alike)
        assert simulated.figures.parameter_hash == real.figures.parameter_hash


def test_statistics_are_those_of_a_process_that_is_whole():
    class Normed(nn.Sequential):
        layout_shards: ClassVar = {"0": "gathered", "3": "row"}

    model = made(
        lambda: Normed(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    )
    data, how = problem().data, {"optimizer": ADAM, "workers": 1, "batch_size": 6, "layout": "tp=2"}
    real = ob.train(copy.deepcopy(model), data, F.mse_loss, engine="local", **how)
    simulated = ob.train(copy.deepcopy(model), data, F.mse_loss, engine="sim", **how)
    for name, tensor in real.model.state_dict().items():
        assert torch.equal(tensor, simulated.model.state_dict()[name]), name
    assert real.model[1].num_batches_tracked == 4
    assert not torch.equal(real.model[1].running_mean, model[1].running_mean)


def test_verify_compares_all_shards():
    run(made(partial(Words, 2)), "asp", "pp=2,tp=2", verify=True)


@pytest.mark.parametrize(
    ("make", "options", "told"),
    [
        (Apart, {"optimizer": torch.optim.Adafactor}, "looks at whole tensors"),
        (Words, {}, r"token.weight is tied over several stages, which local:2 with tp > 1"),
        (Apart, {"clip": ob.Clip(norm=1.0)}, "clips at the worker"),
        (Apart, {"codec": "int8"}, "codecs work on whole replicas"),
    ],
)
def test_what_local_steps_on_parts_cannot_do(make, options, told):
    with pytest.raises(ob.ConfigError, match=told):
        run(made(make), "local:2", "pp=2,tp=2", **options)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ("pp=2,tp=2,schedule=2bw", "2bw has one process for each stage: write tp=1"),
        ("pp=2,schedule=2bw,precision=fp16", "already when precision=fp16 leaves out one"),
        ("tp=4", "does not divide by tp=4"),
    ],
)
def test_layouts_that_do_not_go_together(layout, told):
    with pytest.raises(ob.ConfigError, match=told):
        run(made(Apart), "asp", layout)


# ---------------------------------------------------------------- faults


def members(leader: int) -> dict[str, int]:
    """The processes that the leader of a replica has forked, by their names."""
    found = {}
    for thread in Path(f"/proc/{leader}/task").iterdir():
        for pid in (thread / "children").read_text().split():
            found[Path(f"/proc/{pid}/comm").read_text().strip()] = int(pid)
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("member", ["offbeat 0.1", "offbeat 0.3"])
def test_a_member_that_is_killed_takes_its_replica_along(unhurried, member):
    """The leader finds it gone, whatever it waits for, and the worker is replaced as a whole."""
    gate, there = Gate(), {}

    def slow(output: Tensor, target: Tensor) -> Tensor:
        gate(torch.zeros(1), torch.zeros(1))
        return loss(output, target)

    def kill(record: Any) -> bool:
        there.update(members(children()["offbeat 0"]))
        os.kill(there[member], signal.SIGKILL)
        return True

    script = Script(gate, [after(2), kill, seen(Lost, 0), seen(Joined, 0), after(2)])
    with nothing_left(), scratch() as folder:
        model = made(partial(Words, 2, 0.2))
        done = ob.train(
            model, words(48), slow, discipline="asp", layout="pp=2,tp=2", engine="local",
            workers=2, batch_size=4, epochs=2, optimizer=ADAM, listeners=[script],
            out=folder / "run",
        )  # fmt: skip
        assert not script.left
        assert_exact(done, 48, 2)
        ob.replay(folder / "run", model, words(48), loss, optimizer=ADAM).check()
    assert sorted(there) == ["offbeat 0.1", "offbeat 0.2", "offbeat 0.3"]
    assert not any(map(lives, there.values()))
    gate.close()
