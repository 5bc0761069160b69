"""One participant: the cycle says what it does next, the worker does it."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from offbeat.data.lease import Lease
from offbeat.errors import RunError
from offbeat.log.records import Part, Settings
from offbeat.model.table import Entry, Flat, under
from offbeat.worker.contribution import Contribution, Snapshot
from offbeat.worker.send import Sender


class Timing(msgspec.Struct, gc=False):
    """Where the time of one contribution went, in seconds."""

    compute: float = 0.0
    wait: float = 0.0
    communication: float = 0.0


class ScriptStep(msgspec.Struct, frozen=True):
    """What a script says of a step that it has made."""

    loss: float | None = None
    settings: Settings | None = None  # of its optimiser, where they differ from the beginning


class LeftLoop(RunError):
    """The script of a worker has left its loop, and computes no more."""


class Unfinished(RunError):
    """The script of a worker has ended the run before it computed what it was given."""


class Worker:
    """What an engine asks of a participant: take leases, contribute, accept what was pulled."""

    def __init__(self, number: int, incarnation: int):
        self.number, self.incarnation = number, incarnation
        self.base = 0  # the version it holds
        self.epochs = 0  # epochs done by then
        self.progress = 0  # and batches, as a plain loop would count
        self.ahead = False  # whether it computes on while its last contribution is under way
        self.computed_on = 0  # the version its last step was computed on
        self.todo: list[Lease] = []
        self.done: list[Lease] = []

    def take(self, lease: Lease) -> None:
        self.todo.append(lease)

    def catch_up(self) -> list[Lease]:
        """Compute what was taken and not yet computed; returns those leases."""
        computed, self.todo = self.todo, []
        if computed:
            self.done += computed
            self.computed_on = self.base
        return computed

    def computed(self) -> list[Lease]:
        """What the next contribution has in it so far."""
        return self.done

    def contribution(self, sequence: int, timing: Timing, seed: int) -> Contribution:
        """Everything since the last push, ready to go out."""
        raise NotImplementedError

    def retire(self) -> None:
        """A next incarnation takes over."""

    def accept(self, snapshot: Snapshot) -> None:
        self.base, self.epochs = snapshot.version, snapshot.epoch
        self.progress = snapshot.progress

    @property
    def based_on(self) -> int:
        """The version that staleness is counted from."""
        return self.computed_on if self.ahead else self.base

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def meta(self) -> dict[str, Any]:
        return {
            "incarnation": self.incarnation,
            "base": self.base,
            "epochs": self.epochs,
            "progress": self.progress,
            "todo": self.todo,
            "done": self.done,
        }

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        self.incarnation, self.base = meta["incarnation"], meta["base"]
        self.epochs, self.progress = meta.get("epochs", 0), meta.get("progress", 0)
        self.todo = [Lease(*lease) for lease in meta["todo"]]
        self.done = [Lease(*lease) for lease in meta["done"]]

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, gradients and local state."""
        return 0


class CostOnlyWorker(Worker):
    """A participant of a cost-only run: it moves bytes and computes nothing."""

    def __init__(self, number: int, incarnation: int, nbytes: int):
        super().__init__(number, incarnation)
        self.size = nbytes

    def contribution(self, sequence: int, timing: Timing, seed: int) -> Contribution:
        if self.todo:
            self.catch_up()
        leases, self.done = self.done, []
        samples = 0
        for _, start, stop in leases:
            samples += stop - start
        part = Part(
            self.number, self.incarnation, sequence, self.based_on, leases, samples,
            bytes=self.size, compute=timing.compute, wait=timing.wait,
            communication=timing.communication,
        )  # fmt: skip
        return Contribution(part)


class NumberWorker(Worker):
    """Computes leases in order and makes contributions of them.

    Leases may be computed later than they were taken (`todo`): an engine under virtual time
    computes when the result is needed, which spares it from holding results in flight.
    """

    def __init__(
        self,
        number: int,
        incarnation: int,
        sender: Sender,
        buffers: Sequence[Entry],
        skip_nonfinite: bool = False,
    ):
        super().__init__(number, incarnation)
        self.sender, self.buffers = sender, buffers
        self.losses: list[float | None] = []  # None where nobody said
        self.settings: Settings | None = None  # of a script, at its last step
        self.each: list[Settings | None] = []  # and at each since the last push
        self.skip_nonfinite = skip_nonfinite
        self.good = sender.replica.buffers() if skip_nonfinite else {}  # before anything went wrong

    def catch_up(self) -> list[Lease]:
        computed = super().catch_up()
        for lease in computed:
            self._check_loss(self.sender.step(lease), lease)
        return computed

    def finish(self, lease: Lease, step: ScriptStep) -> None:
        """A step of which the user's own code has computed the gradient."""
        self.sender.replica.reclaim()
        self.settings = step.settings
        self.each.append(step.settings)
        self.sender.set(step.settings)
        self.sender.finish()
        self.done.append(lease)
        self.computed_on = self.base
        self._check_loss(step.loss, lease)

    def _check_loss(self, loss: float | None, lease: Lease) -> None:
        if loss is not None and not math.isfinite(loss) and not self.skip_nonfinite:
            raise self._not_finite(f"the loss is {loss}", lease)
        self.losses.append(loss)

    def contribution(self, sequence: int, timing: Timing, seed: int) -> Contribution:
        if self.todo:
            self.catch_up()
        payload = self.sender.payload()
        packed = self.sender.pack(payload, (seed, 3, self.number, self.incarnation, sequence))
        leases, losses = self.done, self.losses
        self.done, self.losses = [], []
        each, self.each = self.each, []
        samples, told, total = 0, 0, 0.0
        for (_, start, stop), loss in zip(leases, losses, strict=True):
            samples += stop - start
            if loss is not None:
                told += stop - start
                total += loss * (stop - start)
        mean = total / told if told else None
        numeric = mean is None or math.isfinite(mean)
        statistics = self.sender.replica.statistics(self.buffers) if self.buffers else {}
        updater = self.sender.updater_state()
        part = Part(
            self.number, self.incarnation, sequence, self.based_on, leases, samples,
            compute=timing.compute, wait=timing.wait, communication=timing.communication,
            loss=mean if numeric else None, settings=self.settings,
            each=each if any(one != self.settings for one in each) else None,
        )  # fmt: skip
        self._judge(part, numeric and self.sender.finite())
        sent = Contribution(part, payload or None, packed, self.sender.absent, statistics, updater)
        part.bytes = sent.nbytes
        self.sender.turn()
        return sent

    def _judge(self, part: Part, finite: bool) -> None:
        """A contribution that is not finite ends the run, or is left out and forgotten."""
        part.skipped = not finite
        if part.skipped and not self.skip_nonfinite:
            raise self._not_finite("the gradient is not finite", part.leases[-1])
        if part.skipped:
            self.sender.recover(self.good)
        elif self.skip_nonfinite:
            self.good = self.sender.replica.buffers()

    def _not_finite(self, what: str, lease: Lease) -> RunError:
        return RunError(
            f"{what} at worker {self.number}, version {self.base}, epoch {lease.epoch}, samples "
            f"{lease.start} to {lease.stop - 1}: lower the rate, clip the gradient, or pass "
            "nonfinite='skip' to leave such contributions out"
        )

    def retire(self) -> None:
        self.sender.retire()

    def accept(self, snapshot: Snapshot) -> None:
        super().accept(snapshot)
        self.sender.accept(snapshot)

    # ------------------------------------------------------------ state

    def tensors(self) -> dict[str, Tensor]:
        replica = {f"replica/{k}": t for k, t in self.sender.replica.state().items()}
        good = {f"good/{k}": t for k, t in self.good.items()}
        found = replica | good | {f"sender/{k}": t for k, t in self.sender.state().items()}
        return {name: tensor.cpu() for name, tensor in found.items()}

    def meta(self) -> dict[str, Any]:
        own = {"losses": self.losses, "sender": self.sender.meta()}
        return super().meta() | own | {"settings": self.settings, "each": self.each}

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        super().load(tensors, meta)
        self.sender.replica.load_state(under("replica/", tensors))
        self.sender.load_meta(meta["sender"])
        self.sender.load_state(under("sender/", tensors))
        self.losses, self.settings = list(meta["losses"]), meta.get("settings")
        self.each = list(meta.get("each", []))
        self.good = {name: tensor.clone() for name, tensor in under("good/", tensors).items()}

    @property
    def nbytes(self) -> int:
        parameters = sum(flat.table.nbytes for flat in self.sender.replica.flats)
        return parameters + self.sender.nbytes


class _Kept(msgspec.Struct):
    """A gradient that was computed and waits for its turn."""

    lease: Lease
    loss: float | None
    base: int
    payload: list[Flat]
    absent: frozenset[str]


class StreamWorker(NumberWorker):
    """One with several leases under way, each on the version it began with.

    Contributions leave in the order in which leases came in. Computed by one process, gradients
    wait here; where a pipeline computes them, `ready` says which one is through.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.kept: deque[_Kept] = deque()
        self.begun_on = 0  # the version that the next contribution was computed on

    def ready(self, lease: Lease, loss: float | None, base: int) -> None:
        """The next contribution is the gradient of `lease`, which the sender has."""
        self._check_loss(loss, lease)
        self.done, self.begun_on = [lease], base

    def catch_up(self) -> list[Lease]:
        computed, self.todo = self.todo, []
        for lease in computed:
            loss = self.sender.step(lease)
            payload = [flat.clone() for flat in self.sender.payload()]
            self.kept.append(_Kept(lease, loss, self.base, payload, self.sender.absent))
        return computed

    def computed(self) -> list[Lease]:
        return [self.kept[0].lease] if self.kept else []

    def contribution(self, sequence: int, timing: Timing, seed: int) -> Contribution:
        self.catch_up()
        if not self.done:
            first = self.kept.popleft()
            for out, flat in zip(self.sender.out, first.payload, strict=True):
                out.copy_(flat)
            self.sender.absent = first.absent
            self.ready(first.lease, first.loss, first.base)
        return super().contribution(sequence, timing, seed)

    @property
    def based_on(self) -> int:
        return self.begun_on
