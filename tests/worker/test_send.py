"""What each sender sends is a gradient to descend, and nothing is lost on the way."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.codec import BF16, Codec, TopK
from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.discipline.discipline import Discipline
from offbeat.errors import ConfigError
from offbeat.model.replica import Replica
from offbeat.model.table import BySize, Flat, parameter_entries, place
from offbeat.rules.schedule import Schedule
from offbeat.rules.updater import Clip, Recipe, groups_of
from offbeat.worker.contribution import Snapshot
from offbeat.worker.send import (
    AccumulatedSender,
    ChangeSender,
    ElasticSender,
    GradientSender,
    Sender,
    make_sender,
)

X, Y = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
READER = Reader(TensorDataset(X, Y))
LEASES = [Lease(0, start, start + 4) for start in range(0, 16, 4)]
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def replica(model: nn.Module) -> Replica:
    return Replica(model, place(parameter_entries(model), BySize(2)), READER, F.cross_entropy)


def sender(
    discipline: Discipline, codec: Codec | None = None, factory: Any = MOMENTUM, **rest: Any
) -> Sender:
    model = net()
    recipe = Recipe(factory, groups_of(model, None), **rest)
    made = make_sender(discipline.for_workers(2), replica(model), codec, recipe)
    made.accept(snapshot(made))
    return made


def snapshot(made: Sender, scale: float = 1.0, version: int = 0, epoch: int = 0) -> Snapshot:
    """The parameters of the fresh net, scaled."""
    flats = [flat.clone() for flat in replica(net()).flats]
    for flat in flats:
        flat.scale_(scale)
    return Snapshot(version, 1, epoch, flats)


def vector(flats: list[Flat]) -> Tensor:
    return torch.cat([view.flatten() for flat in flats for view in flat.views.values()]).clone()


def weights(made: Sender) -> Tensor:
    return vector(made.replica.flats)


def gradient(lease: Lease) -> Tensor:
    fresh = replica(net())
    fresh.compute(lease)
    out = [Flat(flat.table) for flat in fresh.flats]
    fresh.collect(out)
    return vector(out)


def test_every_discipline_gets_its_sender() -> None:
    kinds = {
        ob.ASP(): GradientSender, ob.Downpour(): AccumulatedSender, ob.LocalSGD(): ChangeSender,
        ob.EASGD(): ElasticSender,
    }  # fmt: skip
    for discipline, kind in kinds.items():
        assert type(sender(discipline)) is kind


def test_local_steps_need_an_optimiser() -> None:
    with pytest.raises(ConfigError, match=r"local:4 makes local steps: pass optimizer=partial"):
        make_sender(ob.LocalSGD(4), replica(net()), None, None)


def test_hogwild_steps_where_the_parameters_lie_and_sends_nothing() -> None:
    made = sender(ob.Hogwild())
    before = vector(made.replica.flats).clone()
    made.step(LEASES[0])
    assert made.payload() == []
    assert not torch.equal(vector(made.replica.flats), before)


def test_the_gradient_of_a_step() -> None:
    made = sender(ob.ASP())
    made.step(LEASES[0])
    made.step(LEASES[1])
    assert torch.equal(vector(made.payload()), gradient(LEASES[1]))
    assert made.pack(made.payload(), (0,)) is None


def test_accumulated_gradients_add_up_and_start_again() -> None:
    made = sender(ob.Downpour(2))
    made.step(LEASES[0])
    made.step(LEASES[1])
    torch.testing.assert_close(vector(made.payload()), gradient(LEASES[0]) + gradient(LEASES[1]))
    made.step(LEASES[2])
    assert torch.equal(vector(made.payload()), gradient(LEASES[2]))


def test_accumulated_absence_is_what_no_step_touched() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
            self.turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            out: Tensor = (self.one if self.turn % 2 else self.two)(x)
            return out

    made = make_sender(ob.Downpour(2), replica(Either()), None, None)
    made.step(LEASES[0])
    assert made.absent == {"two.weight", "two.bias", "never.weight", "never.bias"}
    made.step(LEASES[1])
    assert made.absent == {"never.weight", "never.bias"}
    made.payload()
    made.step(LEASES[2])
    assert "two.weight" in made.absent


def test_the_change_is_negated_so_that_descending_it_adds_it() -> None:
    made = sender(ob.LocalSGD(2), factory=partial(torch.optim.SGD, lr=0.1))
    before = weights(made)
    made.step(LEASES[0])
    torch.testing.assert_close(weights(made), before - 0.1 * gradient(LEASES[0]))
    made.step(LEASES[1])
    assert torch.equal(vector(made.payload()), before - weights(made))
    made.accept(snapshot(made, 2.0))
    assert (vector(made.payload()) == 0).all()
    assert torch.equal(weights(made), vector(snapshot(made, 2.0).parameters or []))


@pytest.mark.parametrize("state", ["keep", "average", "reset"])
def test_what_becomes_of_the_local_state_at_a_sync(state: Any) -> None:
    made = sender(ob.LocalSGD(2, state))
    assert isinstance(made, ChangeSender)
    made.step(LEASES[0])
    mine = {k: t.clone() for k, t in made.updater.tensors_of_state().items()}
    sent = made.updater_state()
    assert bool(sent) == (state == "average")
    pulled = snapshot(made)
    pulled.updater = {k: torch.full_like(t, 7.0) for k, t in mine.items()} if sent else {}
    made.accept(pulled)
    now = made.updater.tensors_of_state()
    if state == "keep":
        assert all(torch.equal(now[k], mine[k]) for k in mine)
    elif state == "reset":
        assert now == {}
    else:
        assert all((t == 7).all() for t in now.values())


def test_local_steps_are_clipped_and_scheduled() -> None:
    schedule = Schedule(partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5))
    factory = partial(torch.optim.SGD, lr=1.0)
    made = sender(ob.LocalSGD(1), factory=factory, clip=Clip(norm=0.01), schedule=schedule)
    before = weights(made)
    made.step(LEASES[0])
    assert (weights(made) - before).norm().item() == pytest.approx(0.01, rel=1e-3)
    made.accept(snapshot(made, epoch=1))
    before = weights(made)
    made.step(LEASES[0])
    assert (weights(made) - before).norm().item() == pytest.approx(0.005, rel=1e-3)


@pytest.mark.parametrize("codec", [None, TopK(0.25), BF16()], ids=str)
def test_an_elastic_exchange_conserves_worker_plus_centre(codec: Codec | None) -> None:
    """Without gradient steps in between: the worker moves by what the centre is told to move."""
    made = sender(ob.EASGD(2, alpha=0.25), codec, partial(torch.optim.SGD, lr=0.0))
    made.step(LEASES[0])
    made.accept(snapshot(made, 3.0, version=1))
    before, centre = weights(made), vector(snapshot(made, 3.0).parameters or [])
    payload = made.payload()
    packed = made.pack(payload, (0,))
    sent = vector(payload)
    if packed is not None:
        decoded = {n: p.codec.decode(p) for n, p in packed.items()}
        names = [n for flat in payload for n in flat.views]
        assert torch.equal(sent, torch.cat([decoded[n].flatten() for n in names]))
    # The centre descends `sent`, so it moves by −sent, and the worker by +sent.
    torch.testing.assert_close(weights(made) + (centre - sent), before + centre)
    if codec is None:
        torch.testing.assert_close(sent, 0.25 * (centre - before))
    assert (sent != 0).any()


def test_the_elastic_distance_is_taken_before_the_last_gradient() -> None:
    made = sender(ob.EASGD(1, alpha=0.5), factory=partial(torch.optim.SGD, lr=0.1))
    start = weights(made)
    made.step(LEASES[0])
    assert torch.equal(weights(made), start)  # not applied yet
    made.accept(snapshot(made, 2.0, version=1))
    sent = vector(made.payload())
    torch.testing.assert_close(sent, 0.5 * start)
    torch.testing.assert_close(weights(made), start + sent - 0.1 * gradient(LEASES[0]))


def test_an_elastic_worker_keeps_its_own_parameters() -> None:
    made = sender(ob.EASGD(2))
    start = weights(made)
    made.accept(snapshot(made, 2.0))
    assert torch.equal(weights(made), start)


@pytest.mark.parametrize(
    "discipline", [ob.ASP(), ob.Downpour(2), ob.LocalSGD(2), ob.LocalSGD(2, "average")], ids=str
)
def test_what_a_codec_leaves_out_goes_out_later(discipline: Discipline) -> None:
    made = sender(discipline, TopK(0.25))
    total = torch.zeros_like(weights(made))
    wanted = torch.zeros_like(total)
    for number, lease in enumerate(LEASES):
        made.step(lease)
        payload = made.payload()
        wanted += vector(payload)
        packed = made.pack(payload, (number,))
        assert packed is not None
        names = [name for flat in payload for name in flat.views]
        total += torch.cat([packed[n].codec.decode(packed[n]).flatten() for n in names])
        made.accept(snapshot(made))
    names = [name for flat in made.out for name in flat.views]
    residual = torch.cat([made.state()[f"residual/{n}"].flatten() for n in names])
    torch.testing.assert_close(total + residual, wanted)
    assert (residual != 0).any()


@pytest.mark.parametrize("codec", [None, TopK(0.25)], ids=str)
@pytest.mark.parametrize(
    "discipline",
    [ob.ASP(), ob.Downpour(3), ob.LocalSGD(3), ob.Average(3), ob.BMUF(3), ob.EASGD(3)],
    ids=str,
)
def test_a_sender_goes_on_exactly_where_it_was(discipline: Discipline, codec: Any) -> None:
    first, second = sender(discipline, codec), sender(discipline, codec)
    for lease in LEASES[:2]:
        first.step(lease)
    saved = {k: t.clone() for k, t in first.state().items()}
    second.replica.load_state({k: t.clone() for k, t in first.replica.state().items()})
    second.load_meta(first.meta())
    second.load_state(saved)
    for made in (first, second):
        made.step(LEASES[2])
        if isinstance(made, ElasticSender):
            made.accept(snapshot(made, 2.0))
    packed = [made.pack(made.payload(), (5,)) for made in (first, second)]
    assert torch.equal(vector(first.out), vector(second.out))
    assert first.absent == second.absent
    assert torch.equal(weights(first), weights(second))
    assert (packed[0] is None) == (codec is None)
    assert second.nbytes == first.nbytes > 0
