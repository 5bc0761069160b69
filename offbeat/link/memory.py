"""Memory that the processes of a run share; it has no name, so it is gone with the last of them."""

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from offbeat.board import Cells, Row, new_board
from offbeat.errors import ConfigError
from offbeat.limits import memory_left
from offbeat.link.cores import NOWHERE, Cores
from offbeat.link.posts import FIELDS, Posts
from offbeat.link.signs import FIELDS as SIGN
from offbeat.link.signs import Sign
from offbeat.store.home import Home
from offbeat.store.table import Flat, Table

PAGE = 4096


class Counts:
    """Numbers that the server tells to whoever watches, beside the board."""

    APPLIED = 0  # samples
    GIVEN_UP = 1  # samples dropped or skipped
    KEPT = 2  # which of two places holds the last checkpoint of a run without a folder, from 1
    VERSION = 3
    STOPPING = 4  # the signal that asked a worker, where nobody else hears it; 0 is none
    COUNT = 5


def pages(nbytes: int) -> int:
    """What a piece of `nbytes` takes up."""
    return max(1, -(-nbytes // PAGE)) * PAGE


class Arena:
    """A stretch of shared memory, handed out piece by piece and never taken back.

    `file` is one that another process has made; without it a new one is made.
    """

    def __init__(self, nbytes: int, file: int | None = None):
        if file is None:
            file = self._made(nbytes)
        elif os.fstat(file).st_size != nbytes:
            raise ConfigError("the processes of this run have models of different sizes")
        self.file = file
        self.map = mmap.mmap(file, nbytes)
        self.used = 0

    def _made(self, nbytes: int) -> int:
        file = os.memfd_create("offbeat", os.MFD_CLOEXEC)
        try:
            # Reserved now, so that a machine with too little memory says so before the run.
            left = memory_left()
            if left is not None and nbytes > left:
                raise OSError(12, f"{left / 2**20:.0f} MiB are free")
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            os.close(file)
            raise ConfigError(
                f"{nbytes / 2**20:.0f} MiB of shared memory are not to be had ({error.strerror}): "
                "use fewer workers, a smaller model, or a machine or container with more memory"
            ) from error
        return file

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes`, on a page of their own."""
        piece = torch.frombuffer(
            self.map, dtype=torch.uint8, count=max(1, nbytes), offset=self.used
        )
        self.used += pages(nbytes)
        return piece[:nbytes]

    def let_go(self, piece: Tensor) -> None:
        """Take a piece out of this process until it is touched again; others have it as it is."""
        start = piece.data_ptr() - torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
        self.map.madvise(mmap.MADV_DONTNEED, start, pages(piece.numel()))

    def close(self) -> None:
        """Give up the name of the memory; it goes with the last tensor in it."""
        os.close(self.file)


@dataclass(frozen=True)
class Plan:
    """What a run keeps in shared memory, and in how many places.

    `incoming` is 0 where workers write the store's own parameters in place, and 2 where they
    compute on while the next ones come; `outgoing` likewise, and 0 where nothing goes out.
    """

    tables: Sequence[Table]
    statistics: Table
    updater: Table
    workers: int
    incoming: int = 1
    outgoing: int = 1
    processes: int = 1  # of each worker
    rule: Table = field(default_factory=lambda: Table.of([]))  # its state, where workers apply it

    @property
    def nbytes(self) -> int:
        whole = sum(pages(table.nbytes) for table in self.tables)
        each = (self.incoming + self.outgoing) * whole
        each += pages(self.statistics.nbytes) + pages(self.updater.nbytes)
        each += pages(self.rule.nbytes) + pages(len(self.rule))
        small = pages(Row.COUNT * self.workers * 8) + pages(Counts.COUNT * 8)
        small += pages((self.workers + 1) * 8) + 2 * pages(SIGN * 8)
        small += pages(self.workers * self.processes * FIELDS * 8)
        return small + 2 * whole + pages(self.statistics.nbytes) + self.workers * each


@dataclass
class Slot:
    """One worker's place: the server writes `incoming`, the worker writes the rest.

    The worker computes on `incoming`, and may change it: nobody else reads it, and the next pull
    writes over it.
    """

    incoming: list[list[Flat]]  # parameters as pulled, in one or two places
    outgoing: list[list[Flat]]  # the payload of a contribution, likewise
    statistics: Flat  # averaged buffers
    updater: Flat  # local optimiser state to average; the server answers in the same place
    home: Home  # the rule's state, where this worker applies the rule itself
    settle: Callable[[], None]  # for the worker: a step is about to begin

    def put(
        self, place: int, shards: Sequence[int], flats: Sequence[Flat], updater: dict[str, Tensor]
    ) -> None:
        """The one copy of a pull, of the shards that this process holds."""
        for shard, flat in zip(shards, flats, strict=True):
            mine = self.incoming[place][shard]
            if mine is not flat:
                mine.copy_(flat)
        for name, tensor in updater.items():
            self.updater.views[name].copy_(tensor)


def without(views: dict[str, Tensor], lacking: Sequence[int]) -> dict[str, Tensor]:
    """The views but for those at places that mean nothing."""
    if not lacking:
        return views
    left = set(lacking)
    return {name: view for i, (name, view) in enumerate(views.items()) if i not in left}


class Shared:
    """The board, the store's parameters, a copy to test in peace, and a slot per worker."""

    def __init__(self, plan: Plan, file: int | None = None):
        """`file` is the memory that another process of this run has made."""
        self.plan = plan
        self.arena = Arena(plan.nbytes, file)
        self.cells: Cells = self._numbers(Row.COUNT * plan.workers).reshape(Row.COUNT, -1)
        if file is None:
            self.cells[:] = new_board(plan.workers)
        self.counts = self._numbers(Counts.COUNT)
        cores = self._numbers(plan.workers + 1)
        if file is None:
            cores[:] = NOWHERE
        self.cores = Cores(cores[:-1], cores[-1:])
        self.server, self.tester = Sign(self._numbers(SIGN)), Sign(self._numbers(SIGN))
        posts = self._numbers(plan.workers * plan.processes * FIELDS)
        self.posts = [Posts(mine) for mine in posts.reshape(plan.workers, -1, FIELDS)]
        self.parameters = self._flats()
        self.tested = self._flats()
        self.averages = self._flat(plan.statistics)
        self.slots = [self._slot(number) for number in range(plan.workers)]

    def _slot(self, number: int) -> Slot:
        plan = self.plan
        incoming = [self._flats() for _ in range(plan.incoming)] or [self.parameters]
        outgoing = [self._flats() for _ in range(plan.outgoing)]
        statistics, updater = self._flat(plan.statistics), self._flat(plan.updater)
        home = Home(self._flat(plan.rule), self.arena.take(len(plan.rule)).numpy())
        settle = partial(self.cores.settle, number)
        return Slot(incoming, outgoing, statistics, updater, home, settle)

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
