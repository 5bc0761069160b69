"""What a slot holds of a message, at both ends: the same wherever the slot lies."""

from torch import Tensor

from offbeat.model.table import Flat
from offbeat.protocol.messages import Go, Push
from offbeat.store.parameters import Parameters
from offbeat.store.slot import Slot, without
from offbeat.worker.contribution import Contribution, Snapshot

# ---------------------------------------------------------------- at the worker


def fill(slot: Slot, push: Push, contribution: Contribution, local: Flat) -> None:
    """Put what comes beside a contribution into the slot, and say so in its message.

    `local` is where the local optimiser's state goes. The payload lies in the slot already.
    """
    if contribution.payload is not None:
        push.place = 0  # by identity: comparing would look into the tensors
        while slot.outgoing[push.place][0] is not contribution.payload[0]:
            push.place += 1
    for name, tensor in contribution.statistics.items():
        slot.statistics.views[name].copy_(tensor)
    push.lacking = _put_local(local, contribution.updater)


def _put_local(local: Flat, updater: dict[str, Tensor]) -> list[int]:
    """Returns the places of what is not there: names may not fit into a packet."""
    lacking: list[int] = []
    for place, (name, view) in enumerate(local.views.items()):
        mine = updater.get(name)
        if mine is None:
            lacking.append(place)
            view.zero_()  # where workers add up among themselves, nothing is to be added
        elif mine is not view:
            view.copy_(mine)
    return lacking


def snapshot_in(slot: Slot, go: Go) -> Snapshot:
    """The parameters that have come with `go`."""
    updater = without(slot.updater.views, go.lacking) if go.updater else {}
    there = slot.incoming[go.place]
    return Snapshot(go.version, go.steps, go.epoch, there, updater, go.progress)


# ---------------------------------------------------------------- at the server


def contribution_in(slot: Slot, push: Push) -> Contribution:
    """What has come with `push`."""
    part = push.part
    statistics: dict[str, Tensor] = {}
    if slot.statistics.views and not part.skipped:
        # Its own: it may wait for others, and the worker goes on.
        statistics = slot.statistics.clone().views
    return Contribution(
        part,
        slot.outgoing[push.place] if push.place >= 0 else None,
        None,
        frozenset(push.absent),
        statistics,
        without(slot.updater.views, push.lacking),
        push.place,
    )


def lay_out(slot: Slot, go: Go, worker: int, parameters: Parameters, pulls: int) -> None:
    """Where there are two places, the worker computes in the other one meanwhile."""
    go.place = pulls % len(slot.incoming)
    if go.fresh:
        parameters.give(worker, slot, go.place)
    if parameters.averages_local_state:
        go.updater = True
        go.lacking = parameters.unlearnt(slot.updater.views)
