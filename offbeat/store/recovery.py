"""The bookkeeping of a store brought up to date from its log, after the store itself has died."""

from collections.abc import Iterable

from offbeat.data.lease import Lease
from offbeat.log.records import Dropped, Entry, EpochDone, Joined, Turned, Updated
from offbeat.store.board import Row, State
from offbeat.store.store import Store


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
