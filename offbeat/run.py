"""What a run gives back: the model, its history, and what it cost."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from offbeat.report.summary import History, Summary


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the run was stopped and saved; `run` is what it had come to."""

    def __init__(self, run: "Run"):
        super().__init__("stopped before its end")
        self.run = run


@dataclass(frozen=True)
class Run:
    """A finished run."""

    model: nn.Module
    history: History
    figures: Summary
    folder: Path | None = None

    def summary(self) -> Summary:
        """Speed, staleness, waiting, bytes, memory and the ledger."""
        return self.figures

    @property
    def parameter_hash(self) -> str:
        """A hash of the final parameters; equal for two runs exactly if their bits are."""
        return self.figures.parameter_hash
