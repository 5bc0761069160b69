"""What the processes of a local run share: board, parameters, and a slot for each worker."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from offbeat.engine.local.cpu import NOWHERE, PlacedCpu
from offbeat.engine.local.watchdog import FIELDS as SIGN
from offbeat.engine.local.watchdog import Heartbeat
from offbeat.model.table import Flat, Table
from offbeat.split.wait_notes import FIELDS, WaitNotes
from offbeat.store.board import Cells, Row, new_board
from offbeat.store.slot import RuleState, Slot
from offbeat.transport.handshake import NUMBER
from offbeat.transport.memory import Arena, pages


class Counts:
    """Training that the server tells to whoever watches, beside the board."""

    APPLIED = 0  # samples
    GIVEN_UP = 1  # samples dropped or skipped
    KEPT = 2  # which of two places holds the last checkpoint of a run without a folder, from 1
    VERSION = 3
    STOPPING = 4  # the signal that asked a worker, where nobody else hears it; 0 is none
    COUNT = 5


@dataclass(frozen=True)
class MemoryPlan:
    """What a run keeps in shared memory, and in how many places.

    `incoming` is 0 where workers write the store's own parameters in place, and 2 where they
    compute on while the next ones come; `outgoing` likewise, and 0 where nothing goes out. Without
    `store` it is a worker's alone, whose store is on another host.
    """

    tables: Sequence[Table]
    statistics: Table
    updater: Table
    workers: int
    incoming: int = 1
    outgoing: int = 1
    processes: int = 1  # of each worker
    rule: Table = field(default_factory=lambda: Table.of([]))  # its state, where workers apply it
    store: bool = True

    @property
    def nbytes(self) -> int:
        whole = sum(pages(table.nbytes) for table in self.tables)
        each = (self.incoming + self.outgoing) * whole
        each += pages(self.statistics.nbytes) + pages(self.updater.nbytes)
        each += pages(self.rule.nbytes) + pages(len(self.rule))
        small = pages(Row.COUNT * self.workers * 8) + pages(Counts.COUNT * 8)
        small += pages(self.workers * 8) + pages(NUMBER) + 3 * pages(SIGN * 8)
        small += pages(self.workers * self.processes * FIELDS * 8)
        return small + 2 * self.store * whole + pages(self.statistics.nbytes) + self.workers * each


class SharedMemory:
    """The board, the store's parameters, a copy to test in peace, and a slot per worker."""

    def __init__(self, plan: MemoryPlan, file: int | None = None):
        """`file` is the memory that another process of this run has made."""
        self.plan = plan
        self.arena = Arena(plan.nbytes, file)
        self.cells: Cells = self._numbers(Row.COUNT * plan.workers).reshape(Row.COUNT, -1)
        if file is None:
            self.cells[:] = new_board(plan.workers)
        self.counts = self._numbers(Counts.COUNT)
        cores = self._numbers(plan.workers)
        if file is None:
            cores[:] = NOWHERE
        self.cpu = PlacedCpu(cores)
        self.token = self.arena.take(NUMBER).numpy()  # that workers who meet prove to each other
        if file is None:
            self.token[:] = np.frombuffer(secrets.token_bytes(NUMBER), np.uint8)
        signs = [Heartbeat(self._numbers(SIGN)) for _ in range(3)]
        self.server, self.tester, self.backup = signs
        wait_notes = self._numbers(plan.workers * plan.processes * FIELDS)
        self.wait_notes = [WaitNotes(mine) for mine in wait_notes.reshape(plan.workers, -1, FIELDS)]
        self.parameters = self._flats() if plan.store else []
        self.tested = self._flats() if plan.store else []
        self.averages = self._flat(plan.statistics)
        self.slots = [self._slot() for _ in range(plan.workers)]

    def _slot(self) -> Slot:
        plan = self.plan
        incoming = [self._flats() for _ in range(plan.incoming)] or [self.parameters]
        outgoing = [self._flats() for _ in range(plan.outgoing)]
        statistics, updater = self._flat(plan.statistics), self._flat(plan.updater)
        rule_state = RuleState(self._flat(plan.rule), self.arena.take(len(plan.rule)).numpy())
        return Slot(incoming, outgoing, statistics, updater, rule_state)

    def _numbers(self, count: int) -> Cells:
        return self.arena.take(count * 8).numpy().view(np.int64)

    def _flats(self) -> list[Flat]:
        return [self._flat(table) for table in self.plan.tables]

    def _flat(self, table: Table) -> Flat:
        return Flat(table, self.arena.take(table.nbytes))

    @property
    def applied(self) -> int:
        return int(self.counts[Counts.APPLIED])

    @property
    def given_up(self) -> int:
        return int(self.counts[Counts.GIVEN_UP])
