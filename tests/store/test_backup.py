"""A backup that is told what a store does has the same bits, whatever the rule and the weighing."""

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.config.setup import make_job
from offbeat.log.records import Part
from offbeat.model.table import Flat
from offbeat.protocol.messages import Push
from offbeat.store.backup import (
    Backup,
    BackupDone,
    BackupWord,
    FollowFrom,
    State,
)
from offbeat.store.followed import FollowedGossip, FollowedParameters
from offbeat.worker.contribution import Contribution
from tests.contract.common import asked

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
ADAM = partial(torch.optim.Adam, lr=0.1)


class Spoiling(torch.optim.SGD):
    """A rule that leaves nothing where a gradient was."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.grad.zero_()
        return found


def halved(rule: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(rule, 2, 0.5)


CASES: dict[str, tuple[ob.Discipline, dict[str, Any]]] = {
    "sgd": (ob.ASP(), {"optimizer": SGD}),
    "adam": (ob.BSP(), {"optimizer": ADAM}),
    "schedule": (ob.ASP(), {"optimizer": SGD, "schedule": ob.Schedule(halved, per="version")}),
    "norm": (ob.ASP(), {"optimizer": SGD, "clip": ob.Clip(norm=0.01)}),
    "value": (ob.ASP(), {"optimizer": ADAM, "clip": ob.Clip(value=0.01)}),
    "a rule of one's own": (ob.ASP(), {"optimizer": partial(Spoiling, lr=0.1)}),
    "delay": (ob.ASP(ob.DelayCompensation(0.5)), {"optimizer": SGD}),
    "adaptive delay": (ob.ASP(ob.AdaptiveDelayCompensation()), {"optimizer": SGD}),
    "gap": (ob.ASP(ob.GapAware()), {"optimizer": ADAM}),
    "gossip": (ob.Gossip(), {"optimizer": SGD}),
}


class Waiting:
    """A channel to a backup that does nothing before somebody waits for it, or it is drained."""

    def __init__(self, backup: Backup):
        self.backup = backup
        self.words: deque[BackupWord] = deque()
        self.under_way: Iterator[BackupDone] | None = None
        self.follows = False
        self.answers = 0

    def say(self, word: BackupWord) -> None:
        if self.follows:
            self.words.append(word)

    def wait(self) -> None:
        before = self.answers
        while self.answers == before:
            self._next()

    def drain(self) -> None:
        while self.words:
            self._next()

    def _next(self) -> None:
        if self.under_way is None:
            self.under_way = self.backup.follow(self.words.popleft())
        if next(self.under_way, None) is None:
            self.under_way = None
        else:
            self.answers += 1


class Pair:
    """A store's numbers and their backup, over the same slots."""

    def __init__(self, discipline: ob.Discipline, **options: Any):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
        optimizer = options.pop("optimizer")
        self.job = make_job(
            asked(nn.Linear(3, 2), data, F.cross_entropy, discipline, optimizer, 2, 4, 1, **options)
        )
        kind = FollowedGossip if self.job.discipline.pairs else FollowedParameters
        self.mine = self.job.make_parameters(kind=kind)
        assert isinstance(self.mine, FollowedParameters)
        self.slots = [[Flat(flat.table) for flat in self.mine.flats] for _ in range(2)]
        self.laid: State = ({}, {})
        self.backup = Backup(self.job.make_parameters(), self._found, lambda: self.laid)
        self.channel = Waiting(self.backup)
        self.sequence = self.version = 0
        self.mine.followed_through(self.channel, [])
        self.draw = torch.Generator().manual_seed(1)

    def _found(self, push: Push) -> Contribution:
        worker = push.part.worker
        return Contribution(push.part, self.slots[worker], place=push.place)

    def show(self) -> None:
        """The backup begins with what there is."""
        state = {name: tensor.clone() for name, tensor in self.mine.state().items()}
        self.laid = state, self.mine.meta()
        self.channel.follows = True
        self.channel.say(FollowFrom(self.version))

    def pull(self, worker: int) -> None:
        self.mine.remember(worker, self.version)

    def push(self, worker: int, base: int) -> Contribution:
        for flat in self.slots[worker]:
            for span in flat.spans:
                span.copy_(torch.randn(span.shape, generator=self.draw))
        part = Part(worker, 1, self.sequence, base, [], 4)
        self.sequence += 1
        return Contribution(part, self.slots[worker], place=0)

    def update(self, *group: Contribution) -> None:
        self.mine.update(group)
        self.version += 1
        self.mine.advance(self.version, 0, self.version)

    def assert_same(self) -> None:
        self.channel.drain()
        assert self.backup.version == self.version
        theirs = self.backup.parameters
        assert theirs.digest() == self.mine.digest()
        mine = self.mine.state()
        assert theirs.state().keys() == mine.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.state().items())


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_same_bits(case):
    discipline, options = CASES[case]
    pair = Pair(discipline, **options)
    for worker in (0, 1):
        pair.mine.enter(worker)
    pair.pull(0)
    pair.update(pair.push(0, 0))
    pair.show()  # after there is something to take over
    for base in range(1, 6):
        worker = base % 2
        pair.pull(worker)
        pair.update(pair.push(worker, base))
    pair.assert_same()
    assert pair.backup.last is not None
    assert [part.sequence for part in pair.backup.last.parts] == [5]


def test_one_that_is_left_of_several_is_copied_before_its_limit():
    pair = Pair(ob.BSP(), optimizer=SGD, clip=ob.Clip(norm=0.01))
    pair.show()
    for _ in range(2):
        other = Contribution(Part(1, 1, pair.sequence, pair.version, [], 4, skipped=True))
        pair.update(pair.push(0, pair.version), other)
    pair.assert_same()


def test_what_waits_is_kept_before_its_worker_writes_again():
    pair = Pair(ob.SoftSync(2, ob.DelayCompensation(0.5)), optimizer=SGD)
    pair.show()
    for _ in range(3):
        for worker in (0, 1):
            pair.pull(worker)
        base = pair.version
        pair.update(pair.push(1, base))
        first = pair.push(0, base)
        pair.mine.wait(first)
        pair.mine.keep(first)
        for worker in (0, 1):  # what waits is the last to need what it was computed on
            pair.pull(worker)
        pair.slots[0][0].zero_()
        pair.update(first, pair.push(1, pair.version))
    pair.assert_same()


def test_a_store_goes_on_from_what_a_backup_hands_on_as_if_nothing_had_happened():
    pair = Pair(ob.ASP(ob.GapAware()), optimizer=ADAM)
    pair.show()
    for base in range(4):
        pair.pull(0)
        pair.update(pair.push(0, base))
    pair.channel.drain()
    tensors, meta = pair.backup.state()
    assert not [name for name in tensors if name.startswith("weigh/backup")]
    other = pair.job.make_parameters()
    other.load(tensors, meta)
    for store in (other, pair.mine):
        store.enter(1)
        store.remember(1, 4)
    last = pair.push(1, 4)
    other.update([last])
    pair.update(last)
    assert other.digest() == pair.mine.digest()


def test_without_a_backup_nothing_is_said_and_nobody_waits():
    pair = Pair(ob.ASP(), optimizer=SGD)
    pair.update(pair.push(0, 0))
    pair.show()
    pair.assert_same()
