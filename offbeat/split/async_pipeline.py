"""Leases that follow each other through the stages without a gap: an asynchronous pipeline."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.data.lease import Lease
from offbeat.model.table import Flat
from offbeat.split.part import BACK, ONWARD, Microbatch, Part, PartSpec, pieces_of
from offbeat.split.passes import Passes


class Item(NamedTuple):
    """One microbatch on its way: of which lease, on which parameters, and where its gradient goes.

    `place` numbers the places where parameters come in, `out` those where gradients go out.
    """

    sequence: int
    lease: Lease
    number: int
    pieces: int
    place: int
    out: int


@dataclass
class PipelineResult:
    """A lease's gradient as far as this process makes it: it lies where it goes out."""

    sequence: int
    loss: float | None
    absent: list[str]
    finite: bool


class AsyncPipeline(Part):
    """A stage through which leases flow; each is computed whole on the version it came in with.

    Every stage makes one forward and one backward pass in turns and never empties in between. The
    parameters of the versions under way lie in different places, and the stage has a copy of its
    modules over each: that is the stash of weights. All stages compute a lease on the same
    version, so its gradient is that of one version, and can be replayed.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: PartSpec,
        incoming: Sequence[Sequence[Flat]],
        outgoing: Sequence[Sequence[Flat]],
    ):
        """`incoming` and `outgoing` are all the store's tables, in each place."""
        super().__init__(model, spec)
        self.number = self.numbers[0]
        self.fill = self.cut.layout.pp - 1 - self.number  # forward passes before the first back
        self.names = self.cut.owned(self.number)
        self.tracks: list[Passes] = []
        self.weights: list[dict[str, nn.Parameter]] = []
        for place, flats in enumerate(incoming):
            stage = self.stages[self.number]
            if place:
                stage = self.cut.stage(model, self.number, buffers_of=stage)
            self._bind(stage, flats)
            self.tracks.append(Passes(stage, self.cut.layout.precision))
        self.outs = [{n: v for flat in flats for n, v in flat.views.items()} for flats in outgoing]
        self.waiting: deque[Item] = deque()  # to go in, at the first stage
        self.inside: deque[Item] = deque()  # between their forward and their backward pass
        self.draining = self.ending = False
        self.batches: dict[int, Any] = {}
        self.losses: dict[int, float] = {}
        self.began = 0.0

    def _bind(self, stage: nn.Module, flats: Sequence[Flat]) -> None:
        views = {name: view for flat in flats for name, view in flat.views.items()}
        mine = dict(stage.named_parameters())
        for held in self.cut.held[self.number]:
            mine[held.here].data = views[held.name]
        self.weights.append({held.name: mine[held.here] for held in self.cut.held[self.number]})

    def train(self, mode: bool = True) -> None:
        super().train(mode)
        for track in self.tracks:
            track.stage.train(mode)

    # ------------------------------------------------------------ what comes in

    def put(self, sequence: int, lease: Lease, place: int, out: int) -> None:
        """At the first stage: let a lease in."""
        count = len(pieces_of(lease.samples, self.cut.layout.pieces))
        self.waiting.extend(Item(sequence, lease, n, count, place, out) for n in range(count))

    def drain(self, ending: bool = False) -> None:
        """Nothing follows for now: bring back what is inside; when `ending`, that was all."""
        self.draining, self.ending = True, ending
        if self.number < self.last:
            self._send(self.number + 1, (ONWARD, self.number + 1, 0), [None, ending])

    def run(self, tell: Callable[[PipelineResult], None]) -> None:
        """At every other stage: make passes as they come, until the end is told."""
        self.draining = self.ending = False
        while not (self.ending and not self.inside):
            made = self.advance()
            if made is not None:
                tell(made)

    def advance(self) -> PipelineResult | None:
        """Make the next pass; returns what is finished by it."""
        self.began = self.began or time.perf_counter()
        if self.draining and not self.inside:
            self.draining = False
        if not self.draining and len(self.inside) <= self.fill:
            if self.number or self.waiting:
                self._in()
                return None
            self.drain()  # nothing follows for now
        made = self._out()
        self.total = time.perf_counter() - self.began
        return made

    # ------------------------------------------------------------ passes

    def _in(self) -> None:
        value = None
        if self.number:
            meta, value = self._receive(self.number - 1, (ONWARD, self.number, 0))
            if meta is None:
                self.drain(ending=value)
                return
            item = Item(meta[0], Lease(*meta[1]), *meta[2:])
        else:
            item = self.waiting.popleft()
        batch = self._read(item)
        start, stop = pieces_of(item.lease.samples, self.cut.layout.pieces)[item.number]
        one = Microbatch(item.lease, item.number, item.pieces, start, stop)
        key = (item.sequence, item.number)
        out = self.pass_forward(self.tracks[item.place], self.number, key, one, batch, value)
        self.inside.append(item)
        if self.number == self.last:
            self.losses[item.sequence] = self.losses.get(item.sequence, 0.0) + float(out.item())
            return
        meta = [item.sequence, list(item.lease), *item[2:]]
        self._send(self.number + 1, (ONWARD, self.number + 1, 0), [meta, out])

    def _read(self, item: Item) -> Any:
        if item.number == 0:
            self.batches[item.sequence] = self._batch(item.lease)
        batch = self.batches[item.sequence]
        if item.number == item.pieces - 1:
            del self.batches[item.sequence]
        return batch

    def _out(self) -> PipelineResult | None:
        item = self.inside.popleft()
        gradients = []
        if self.number < self.last:
            gradients = self._receive(self.number + 1, (BACK, self.number, 0))
        since = time.perf_counter()
        made = self.tracks[item.place].backward((item.sequence, item.number), gradients)
        self._spent(since, 2 / 3, item.pieces, item.lease.samples)
        # Before it goes on: who has the gradient of the first stage has those of all.
        finished = self._finished(item) if item.number == item.pieces - 1 else None
        if self.number:
            self._send(self.number - 1, (BACK, self.number - 1, 0), made)
        return finished

    @torch.no_grad()
    def _finished(self, item: Item) -> PipelineResult:
        """Leave the gradient of a lease where it goes out."""
        self.steps += 1
        weights = self.weights[item.place]
        self.sum_tied({(self.number, name): p for name, p in weights.items()})
        absent, sums = [], 0.0
        for name in self.names:
            place, gradient = self.outs[item.out][name], weights[name].grad
            if gradient is None:
                place.zero_()
                absent.append(name)
            else:
                place.copy_(gradient)
                sums += float(place.sum())
        for weight in weights.values():
            weight.grad = None
        finite = bool(torch.isfinite(torch.tensor(sums))) or self._all_finite(item.out)
        return PipelineResult(item.sequence, self.losses.pop(item.sequence, None), absent, finite)

    def _all_finite(self, out: int) -> bool:
        views: list[Tensor] = [self.outs[out][name] for name in self.names]
        return all(bool(torch.isfinite(view).all()) for view in views)
