"""An asynchronous pipeline: the order of its passes, their parameters, and what is inside."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.model.table import Flat, Staged, parameter_entries, place
from offbeat.split.async_pipeline import AsyncPipeline, PipelineResult
from offbeat.split.channel import Channel, Mesh, Wires
from offbeat.split.part import PartSpec, pieces_of
from offbeat.split.passes import Passes
from offbeat.split.plan.blocks import find
from offbeat.split.plan.cut import Cut
from offbeat.split.plan.schedule import BACKWARD, FORWARD, orders

BATCH = 4


class Watched(Passes):
    """Notes every pass of a stage."""

    notes: list[tuple[str, Any]]

    def forward(self, key: Any, value: Any, cost: Any = None) -> Any:
        self.notes.append((FORWARD, key))
        return super().forward(key, value, cost)

    def backward(self, key: Any, gradients: Any) -> Any:
        self.notes.append((BACKWARD, key))
        return super().backward(key, gradients)


class Tiny(nn.Module):
    """Stages of one block each; the first and the last share a weight."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.all = nn.Sequential(*(nn.Linear(2, 2) for _ in range(stages)))
        self.all[-1].weight = self.all[0].weight
        self.layout_blocks = tuple(f"all.{number}" for number in range(stages))

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.all(value)
        return result


class Pipeline:
    """All stages of one replica, each in a thread."""

    def __init__(self, pp: int, schedule: str, pieces: int, samples: int) -> None:
        torch.manual_seed(0)
        self.layout = ob.Layout(pp=pp, schedule=schedule, microbatches=pieces)
        self.model = Tiny(pp).double()
        self.cut = Cut.of(self.layout, self.model, find(self.model), tuple(range(pp)))
        inputs, target = torch.randn(2, samples, 2, dtype=torch.float64)
        self.reader = Reader(TensorDataset(inputs, target), 0)
        tables = place(parameter_entries(self.model), Staged(self.cut.groups()))
        depth = self.layout.under_way
        self.incoming = [[Flat(table) for table in tables] for _ in range(depth)]
        self.outgoing = [[Flat(table) for table in tables] for _ in range(depth)]
        for flats in self.incoming:  # a version of its own in each place
            for flat in flats:
                for view in flat.views.values():
                    view.copy_(torch.randn(view.shape, dtype=torch.float64))
        self.wires = Wires(pp)
        self.flows = [self._flow(process) for process in range(pp)]
        self.notes = [flow.tracks[0].notes for flow in self.flows]  # type: ignore[attr-defined]

    def _flow(self, process: int) -> AsyncPipeline:
        ends = self.wires.ends.items()
        mesh = Mesh(process, {o: Channel(end, o) for (one, o), end in ends if one == process})
        spec = PartSpec(self.cut, process, mesh, self.reader, F.mse_loss)
        flow = AsyncPipeline(self.model, spec, self.incoming, self.outgoing)
        notes: list[tuple[str, Any]] = []
        watched = []
        for track in flow.tracks:
            one = Watched(track.stage, track.precision)
            one.notes = notes
            watched.append(one)
        flow.tracks = list(watched)
        return flow

    def run(
        self, leases: Sequence[Lease], pause_after: int | None = None
    ) -> list[list[PipelineResult]]:
        """Let leases through as a worker does; at a pause everything inside comes back first."""
        told: list[list[PipelineResult]] = [[] for _ in self.flows]
        threads = [
            threading.Thread(target=flow.run, args=(mine.append,))
            for flow, mine in zip(self.flows[1:], told[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        first, left, begun = self.flows[0], list(leases), 0
        depth = self.layout.under_way
        gradients = []
        while len(told[0]) < len(leases):
            held = pause_after is not None and begun == pause_after and len(told[0]) < begun
            while left and begun - len(told[0]) < depth and not held:
                first.put(begun, left.pop(0), begun % depth, begun % depth)
                begun += 1
                held = begun == pause_after
            made = None
            while made is None:
                made = first.advance()
            told[0].append(made)
            out = self.outgoing[made.sequence % depth]
            gradients.append({n: v.clone() for flat in out for n, v in flat.views.items()})
        first.drain(ending=True)
        for thread in threads:
            thread.join()
        for end in self.wires.ends.values():
            end.close()
        self.gradients = gradients
        return told

    def wanted(self, lease: Lease, sequence: int) -> dict[str, Tensor]:
        """The gradient of a lease by one process, on the version that it came in with."""
        views = {
            name: view.clone()
            for flat in self.incoming[sequence % self.layout.under_way]
            for name, view in flat.views.items()
        }
        own = dict(self.model.named_parameters())
        for name, view in views.items():
            own[name].data = view
        inputs, target = self.reader.read(lease)
        loss = F.mse_loss(self.model(inputs), target)
        found = torch.autograd.grad(loss, list(own.values()))
        return dict(zip(own, found, strict=True))


def leases_of(samples: int) -> list[Lease]:
    return [Lease(0, s, min(s + BATCH, samples)) for s in range(0, samples, BATCH)]


def check(pipeline: Pipeline, leases: Sequence[Lease], told: list[list[PipelineResult]]) -> None:
    """What holds of every run of leases, whatever its gaps."""
    pp = pipeline.layout.pp
    keys = [
        (sequence, number)
        for sequence, lease in enumerate(leases)
        for number in range(len(pieces_of(lease.samples, pipeline.layout.pieces)))
    ]
    for stage, notes in enumerate(pipeline.notes):
        assert [key for kind, key in notes if kind == FORWARD] == keys
        assert [key for kind, key in notes if kind == BACKWARD] == keys
        inside = 0
        for kind, _ in notes:
            inside += 1 if kind == FORWARD else -1
            assert 0 <= inside <= pp - stage
        assert [made.sequence for made in told[stage]] == list(range(len(leases)))
        assert all(made.finite and not made.absent for made in told[stage])
        assert all((made.loss is None) == (stage < pp - 1) for made in told[stage])
    for sequence, lease in enumerate(leases):
        for name, gradient in pipeline.wanted(lease, sequence).items():
            torch.testing.assert_close(
                pipeline.gradients[sequence][name], gradient, rtol=1e-10, atol=1e-12, msg=name
            )


shapes = st.sampled_from(
    [
        *(("stash", 2, 1), ("stash", 3, 1), ("stash", 3, 2), ("stash", 4, 1), ("stash", 4, 4)),
        *(("2bw", 2, 2), ("2bw", 2, 4), ("2bw", 3, 4), ("2bw", 4, 4)),
    ]
)


@given(shape=shapes, samples=st.integers(1, 22), pause=st.none() | st.integers(1, 5))
def test_every_stage_has_each_microbatch_once_in_order(
    shape: tuple[str, int, int], samples: int, pause: int | None
) -> None:
    """And on the version it came in with; never more inside a stage than stages follow."""
    schedule, pp, pieces = shape
    pipeline, leases = Pipeline(pp, schedule, pieces, samples), leases_of(samples)
    check(pipeline, leases, pipeline.run(leases, pause))


@pytest.mark.parametrize(("schedule", "pp", "pieces"), [("stash", 3, 1), ("2bw", 3, 4)])
def test_without_gaps_the_order_is_that_of_one_long_step(
    schedule: str, pp: int, pieces: int
) -> None:
    """One forward, one backward; the pipeline fills once and empties once."""
    pipeline, leases = Pipeline(pp, schedule, pieces, 6 * BATCH), leases_of(6 * BATCH)
    pipeline.run(leases)
    long = orders("1f1b", pp, 6 * pieces)
    for stage, notes in enumerate(pipeline.notes):
        found = [(kind, sequence * pieces + number) for kind, (sequence, number) in notes]
        assert found == [(op.kind, op.microbatch) for op in long[stage]]
