"""What a worker sends: a gradient, a sum of them, a change, or its distance to the centre."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.codec import Codec, ErrorFeedback, Packed
from offbeat.data.lease import Lease
from offbeat.data.reader import mix
from offbeat.discipline.discipline import Discipline
from offbeat.discipline.parts import Accumulated, Change, Elastic, Gradient, InPlace, Send
from offbeat.errors import ConfigError
from offbeat.log.records import Settings
from offbeat.model.device import on_host
from offbeat.model.replica import Replica
from offbeat.model.table import Flat, fill, named, total_bytes, under
from offbeat.rules.updater import Recipe, Updater
from offbeat.worker.contribution import Snapshot

Outs = list[list[Flat]] | None


class Sender:
    """Turns leases into what goes out; `payload` is always a gradient to descend."""

    def __init__(self, replica: Replica, codec: Codec | None, out: Outs = None):
        """`out` are the places for payloads, taken in turn; without them there is one, its own."""
        self.replica = replica
        self.outs = [[Flat(flat.table) for flat in replica.flats]] if out is None else out
        self.out = self.outs[0]
        self.workspace = replica.device.workspace(replica.flats)
        self.absent: frozenset[str] = frozenset()
        self.feedback = ErrorFeedback(codec) if codec is not None else None

    def step(self, lease: Lease) -> float:
        """Compute one lease; returns its loss."""
        self.begin()
        loss = self.replica.compute(lease)
        self.finish()
        return loss

    def begin(self) -> None:
        """A step is about to be computed."""

    def set(self, settings: Settings | None) -> None:
        """What a script has for the step that it has made; a store is told with the payload."""

    def finish(self) -> None:
        """The gradient of a step lies on the replica's parameters."""
        raise NotImplementedError

    def payload(self) -> list[Flat]:
        """What to send of the steps since the last push, before the codec: on the CPU."""
        raise NotImplementedError

    @property
    def making(self) -> list[Flat]:
        """Where the payload is made, on the replica's device."""
        return self.workspace.at(self.out)

    def made(self) -> list[Flat]:
        """What has been made, where it is sent from."""
        self.workspace.push(self.out)
        return self.out

    def finite(self) -> bool:
        """Whether the payload is."""
        return all(flat.finite() for flat in self.out)

    def retire(self) -> None:
        """Another takes over the replica's model."""

    def turn(self) -> None:
        """A payload is on its way: the next one goes to another place, if there is one."""
        if len(self.outs) > 1:
            self.outs = self.outs[1:] + self.outs[:1]
            self.out = self.outs[0]

    def accept(self, snapshot: Snapshot) -> None:
        """Take over the pulled parameters."""
        self.replica.load(snapshot.parameters)

    def back_to_version(self) -> None:
        """Let the replica hold the version that was pulled, without steps of its own."""

    def recover(self, buffers: Mapping[str, Tensor]) -> None:
        """Forget what a step that was not finite left behind; parameters are pulled anew."""
        self.replica.recover(buffers)
        if self.feedback is not None:
            self.feedback.reset()

    def updater_state(self) -> dict[str, Tensor]:
        """The local optimiser's state, where the discipline averages it."""
        return {}

    def learn_state(self) -> dict[str, Tensor]:
        """What `updater_state` will have, from one step of this throw-away worker."""
        return {}

    def pack(self, payload: list[Flat], seed: tuple[int, ...]) -> dict[str, Packed] | None:
        """Make the payload small; what is lost stays here and goes out with the next one."""
        if self.feedback is None:
            return None
        generator = torch.Generator().manual_seed(mix(*seed))
        views = {name: view for flat in payload for name, view in flat.views.items()}
        # As the model has them: what a codec draws does not depend on how shards lay them out.
        return {
            name: self.feedback.pack(name, views[name], generator)
            for name in self.replica.parameters
            if name in views
        }

    def state(self) -> dict[str, Tensor]:
        found = {}
        if self.feedback is not None:
            found = {f"residual/{k}": t for k, t in self.feedback.state_dict().items()}
        return found

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        if self.feedback is not None:
            self.feedback.load_state_dict(under("residual/", tensors))

    def meta(self) -> dict[str, Any]:
        return {}

    def load_meta(self, meta: dict[str, Any]) -> None:
        return

    @property
    def nbytes(self) -> int:
        """Bytes held beside the replica's parameters."""
        return sum(flat.table.nbytes for flat in self.out) + total_bytes(self.state().values())


class GradientSender(Sender):
    """The gradient of the last step."""

    def __init__(self, replica: Replica, codec: Codec | None, out: Outs = None):
        super().__init__(replica, codec, out)
        self.stream = replica.stream() if out is not None else None

    def begin(self) -> None:
        if self.stream is not None:
            self.stream.begin(self.out)

    def retire(self) -> None:
        if self.stream is not None:
            self.stream.end()

    def finish(self) -> None:
        if self.stream is not None:
            self.absent = self.stream.absent()
        else:
            self.absent = self.replica.collect(self.making)

    def payload(self) -> list[Flat]:
        return self.made()

    def finite(self) -> bool:
        return super().finite() if self.stream is None else self.stream.finite()


class AccumulatedSender(Sender):
    """The sum of the gradients since the last push."""

    def __init__(self, replica: Replica, codec: Codec | None, out: Outs = None):
        super().__init__(replica, codec, out)
        self.sum = [flat.zeros() for flat in replica.flats]
        self.count = 0

    def finish(self) -> None:
        absent = self.replica.collect(self.making)
        self.absent = absent if self.count == 0 else self.absent & absent
        for total, flat in zip(self.sum, self.making, strict=True):
            total.add_(flat)
        self.count += 1

    def payload(self) -> list[Flat]:
        for total, flat in zip(self.sum, self.making, strict=True):
            flat.copy_(total)
            total.zero_()
        self.count = 0
        return self.made()

    def state(self) -> dict[str, Tensor]:
        return super().state() | named("sum/", self.sum)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        super().load_state(tensors)
        fill(self.sum, under("sum/", tensors))

    def meta(self) -> dict[str, Any]:
        return {"count": self.count, "absent": sorted(self.absent)}

    def load_meta(self, meta: dict[str, Any]) -> None:
        self.count, self.absent = meta["count"], frozenset(meta["absent"])


class _LocalSender(Sender):
    """A worker with an optimiser of its own."""

    pulled: list[Flat] | None = None  # the version it holds, beside its own steps

    def __init__(
        self, replica: Replica, codec: Codec | None, recipe: Recipe, send: Send, out: Outs = None
    ):
        super().__init__(replica, codec, out)
        self.clip = recipe.clip
        self.updater = Updater(recipe, replica.parameters)
        self.settings: Settings | None = None  # that a script has for its steps

    def set(self, settings: Settings | None) -> None:
        self.settings = settings

    def back_to_version(self) -> None:
        if self.pulled is not None:
            for mine, version in zip(self.replica.flats, self.pulled, strict=True):
                mine.copy_(version)

    def local_step(self) -> None:
        if self.clip is not None:
            self.clip(self.replica.gradients())
        self.updater.obey(self.settings)
        self.updater.step_in_place()

    def accept(self, snapshot: Snapshot) -> None:
        super().accept(snapshot)
        self.updater.advance(snapshot.version, snapshot.epoch, snapshot.progress)

    def recover(self, buffers: Mapping[str, Tensor]) -> None:
        super().recover(buffers)
        self.updater.reset()

    def state(self) -> dict[str, Tensor]:
        local = {f"local/{k}": t for k, t in self.updater.tensors_of_state().items()}
        return super().state() | local

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        super().load_state(tensors)
        self.updater.load_state(under("local/", tensors))

    def meta(self) -> dict[str, Any]:
        return {"updater": self.updater.meta(), "settings": self.settings}

    def load_meta(self, meta: dict[str, Any]) -> None:
        self.updater.load_meta(meta["updater"])
        self.settings = meta.get("settings")


class ChangeSender(_LocalSender):
    """The change since the last pull, negated so that descending it adds the change."""

    def __init__(
        self, replica: Replica, codec: Codec | None, recipe: Recipe, send: Change, out: Outs = None
    ):
        super().__init__(replica, codec, recipe, send, out)
        self.after_sync = send.state
        self.anchor = self.pulled = [flat.clone() for flat in replica.flats]

    def finish(self) -> None:
        self.local_step()

    def payload(self) -> list[Flat]:
        for out, anchor, mine in zip(self.making, self.anchor, self.replica.flats, strict=True):
            out.subtract(anchor, mine)
        return self.made()

    def accept(self, snapshot: Snapshot) -> None:
        super().accept(snapshot)
        for anchor, mine in zip(self.anchor, self.replica.flats, strict=True):
            anchor.copy_(mine)
        if self.after_sync == "reset":
            self.updater.reset()
        elif self.after_sync == "average" and snapshot.updater:
            self.updater.load_state(snapshot.updater)

    def learn_state(self) -> dict[str, Tensor]:
        if self.after_sync != "average":
            return {}
        for parameter in self.replica.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.updater.step_in_place()
        return self.updater.tensors_of_state()

    def updater_state(self) -> dict[str, Tensor]:
        if self.after_sync != "average":
            return {}
        return {k: on_host(t) for k, t in self.updater.tensors_of_state().items()}

    def state(self) -> dict[str, Tensor]:
        return super().state() | named("anchor/", self.anchor)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        super().load_state(tensors)
        fill(self.anchor, under("anchor/", tensors))


class ElasticSender(_LocalSender):
    """alpha times the distance to the centre; the worker moves by it as the centre does.

    The distance is measured before the last gradient is applied, as EASGD has it, so a gradient
    is applied only when the next step or an exchange comes.
    """

    def __init__(
        self, replica: Replica, codec: Codec | None, recipe: Recipe, send: Elastic, out: Outs = None
    ):
        super().__init__(replica, codec, recipe, send, out)
        assert send.alpha is not None  # for_workers has filled it in
        self.alpha = send.alpha
        self.centre: list[Flat] | None = None
        self.unapplied = False

    def begin(self) -> None:
        if self.unapplied:
            self.local_step()

    def finish(self) -> None:
        self.unapplied = True

    def payload(self) -> list[Flat]:
        assert self.centre is not None
        making = self.making
        for out, centre, mine in zip(making, self.centre, self.replica.flats, strict=True):
            out.subtract(centre, mine)
            out.scale_(self.alpha)
        if self.feedback is None:
            self._move(making)
        return self.made()

    def pack(self, payload: list[Flat], seed: tuple[int, ...]) -> dict[str, Packed] | None:
        packed = super().pack(payload, seed)
        if packed is not None and self.feedback is not None:
            # The worker moves by what really went out, so nothing is left over and the sum of
            # worker and centre is conserved whatever the codec.
            self.feedback.reset()
            for flat in payload:
                for name, view in flat.views.items():
                    view.copy_(packed[name].codec.decode(packed[name]))
            self.workspace.pull(payload)
            self._move(self.workspace.at(payload))
        return packed

    @torch.no_grad()
    def _move(self, pull: list[Flat]) -> None:
        for mine, flat in zip(self.replica.flats, pull, strict=True):
            mine.add_(flat)
        if self.unapplied:
            self.local_step()
            self.unapplied = False
        else:
            self.updater.constrain()

    def accept(self, snapshot: Snapshot) -> None:
        if self.centre is None:
            super().accept(snapshot)
            self.centre = self.pulled = [flat.clone() for flat in self.replica.flats]
        else:
            for centre, flat in zip(self.centre, snapshot.parameters, strict=True):
                centre.copy_(flat)
            self.updater.advance(snapshot.version, snapshot.epoch, snapshot.progress)
        self.replica.show(self.centre)

    def recover(self, buffers: Mapping[str, Tensor]) -> None:
        """The next pull brings the centre only, so the worker starts again from there."""
        super().recover(buffers)
        assert self.centre is not None
        self.replica.load(self.centre)
        self.unapplied = False

    def state(self) -> dict[str, Tensor]:
        found = super().state()
        if self.centre is not None:
            found |= named("centre/", self.centre)
        if self.unapplied:
            for name, parameter in self.replica.parameters.items():
                if parameter.grad is not None:
                    found[f"gradient/{name}"] = parameter.grad
        return found

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        super().load_state(tensors)
        centres = under("centre/", tensors)
        if centres:
            self.centre = self.pulled = [flat.zeros() for flat in self.replica.flats]
            fill(self.centre, centres)
        gradients = under("gradient/", tensors)
        self.unapplied = bool(gradients)
        for name, gradient in gradients.items():
            mine = self.replica.parameters[name]
            mine.grad = gradient.to(mine.device, copy=True)


class InPlaceSender(_LocalSender):
    """Nothing goes out: the step itself is written into parameters that all workers share."""

    def __init__(
        self, replica: Replica, codec: Codec | None, recipe: Recipe, send: Send, out: Outs = None
    ):
        super().__init__(replica, None, recipe, send, [[]])

    def finish(self) -> None:
        self.local_step()

    def payload(self) -> list[Flat]:
        return []


# By the word of the send part: those whose steps the store makes, and those who make their own.
STORE_SENDERS: dict[str, Callable[[Replica, Codec | None, Outs], Sender]] = {
    Gradient.kind: GradientSender,
    Accumulated.kind: AccumulatedSender,
}
LOCAL_SENDERS: dict[str, Callable[[Replica, Codec | None, Recipe, Any, Outs], Sender]] = {
    Change.kind: ChangeSender,
    Elastic.kind: ElasticSender,
    InPlace.kind: InPlaceSender,
}


def make_sender(
    discipline: Discipline,
    replica: Replica,
    codec: Codec | None,
    local: Recipe | None,
    out: Outs = None,
) -> Sender:
    """The sender that `discipline` asks for; `local` makes the worker's own optimiser."""
    send = discipline.send
    if not send.steps_locally:
        return STORE_SENDERS[send.kind](replica, codec, out)
    if local is None:
        raise ConfigError(
            f"{discipline} makes local steps: pass optimizer=partial(torch.optim.SGD, lr=0.1)"
        )
    return LOCAL_SENDERS[send.kind](replica, codec, local, send, out)
