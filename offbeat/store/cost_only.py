"""The numbers of a store that has none: what a cost-only run has in the place of parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from offbeat.model.table import Flat
from offbeat.store.averages import Averages
from offbeat.store.parameters import Parameters
from offbeat.store.pulls import WholePulls
from offbeat.worker.contribution import Contribution


class CostOnlyParameters(Parameters):
    """A model of so many bytes that is never computed: there is nothing to apply, copy or save.

    Every call is answered as parameters answer it that have no tensors, and at once: thousands of
    workers ask.
    """

    updater_bytes = 0
    nbytes = 0

    def __init__(self, pull_bytes: int = 0):
        self.pull_bytes = pull_bytes
        self.names, self.tables, self.buffers, self.held = [], [], [], []
        self.flats, self.updaters, self.updater_state = [], [], {}
        self.averages, self.pulls = Averages([], nn.Module()), WholePulls()

    def begin(self, model: nn.Module) -> None:
        return

    def update(self, contributions: Sequence[Contribution]) -> float:
        return 1.0

    def advance(self, version: int, epoch: int, progress: int) -> None:
        return

    # ------------------------------------------------------------ workers

    def enter(self, worker: int) -> None:
        return

    def forget(self, worker: int) -> None:
        return

    def of(self, worker: int) -> list[Flat]:
        return self.flats

    def remember(self, worker: int, version: int) -> None:
        return

    def keep(self, contribution: Contribution) -> None:
        return

    def wait(self, contribution: Contribution) -> None:
        return

    # ------------------------------------------------------------ what is looked at and saved

    def digest_sum(self) -> int:
        return 0

    def digest(self) -> str:
        return ""

    def export_to(self, into: Mapping[str, Tensor]) -> None:
        return

    def state(self) -> dict[str, Tensor]:
        return {}

    def meta(self) -> dict[str, Any]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        return
