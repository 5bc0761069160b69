"""The bookkeeping of a store brought up to date from its log, after the store itself has died."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from offbeat.data.lease import Lease
from offbeat.log.records import Dropped, Entry, EpochDone, Joined, Turned, Updated
from offbeat.store.board import Row, State
from offbeat.store.store import Store


@dataclass(frozen=True)
class CrashState:
    """What a server that was killed had done since its last checkpoint, and all it had learnt.

    Its last update may not have come to be recorded.
    """

    version: int
    records: list[Entry]
    length: int  # of its log
    tensors: dict[str, Tensor]
    meta: dict[str, Any] | None = None  # of the parameters, if more is known than their tensors
    unrecorded: Updated | None = None


def beside(found: CrashState, records: list[Entry], length: int, version: int) -> CrashState | None:
    """What a backup has `found`, beside a log that ends with `version`; None if they do not fit.

    Nobody has been told of a version that the backup does not have, and no update is made before
    the one before is in the log: so the backup is at the same version, or one ahead.
    """
    if found.version not in (version, version + 1):
        return None
    last = found.unrecorded if found.version > version else None
    return replace(found, records=records, length=length, unrecorded=last)


def revive(store: Store, crash: CrashState, now: float) -> None:
    """Let `store`, as it was at its last checkpoint, go on where the one before it was killed."""
    store.parameters.load(crash.tensors, crash.meta or store.parameters.meta())
    records, last = list(crash.records), crash.unrecorded
    if last is not None:
        last.time = now
        if store.hashed(last.version):
            last.hash = store.parameters.digest()
        store.log.write(last)
        records.append(last)
    fold(store, records, now)


def last_version(records: Iterable[Entry], before: int) -> int:
    """The version that a log ends with."""
    return max((r.version for r in records if isinstance(r, Updated)), default=before)


def fold(store: Store, records: Iterable[Entry], now: float) -> None:
    """Let `store`, as it was at its last checkpoint, have lived through `records`.

    Versions, epochs, incarnations and the ledger are as the log says. Whatever was handed out and
    not settled goes out again, and everybody has to join again, as after any restart.
    """
    settled: set[Lease] = set()
    told: set[int] = set()  # epochs whose end is in the log
    closed: list[int] = []
    for record in records:
        if isinstance(record, Joined):
            store.cells[Row.INCARNATION, record.worker] = record.incarnation
            store.cells[Row.STATE, record.worker] = State.ACTIVE
        elif isinstance(record, EpochDone):
            told.add(record.epoch)
        elif isinstance(record, Turned):
            store.enter_stage(record.stage)
        elif isinstance(record, Updated):
            store.version = record.version
            for part in record.parts:
                outcome = "skipped" if part.skipped else "applied"
                store.settled += part.samples
                closed += store.leases.ledger.settle(part.leases, outcome)
                settled.update(part.leases)
        elif isinstance(record, Dropped) and not record.redo:
            closed += store.leases.ledger.settle(record.part.leases, "dropped")
            settled.update(record.part.leases)
            store.settled += record.part.samples
    store.leases.recover(settled)
    store.epoch = max([store.epoch, *(epoch + 1 for epoch in closed)])
    store.parameters.advance(store.version, store.epoch, store.progress)
    store.close_epochs([epoch for epoch in closed if epoch not in told], now)
    store.turn_if_due(now)  # the last update may be on record, and what it led to not yet
    store.vacate(now)
