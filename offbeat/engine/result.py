"""What a run gives back: the model, its history, and what it cost."""

import signal
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from offbeat.engine.signals import Terminated
from offbeat.report.summary import History, Summary
from offbeat.report.words import counted


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run was stopped and saved; `run` is what it had come to."""

    def __init__(self, run: "Run"):
        super().__init__("stopped before its end")
        self.run = run


class InterruptedBySIGTERM(Interrupted, Terminated):
    """The same by SIGTERM; a program that does not catch it ends with 143."""


def interrupted(run: "Run", number: int) -> Interrupted:
    """What to raise when signal `number` has stopped a run."""
    return InterruptedBySIGTERM(run) if number == signal.SIGTERM else Interrupted(run)


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

    def report(self, path: str | Path = "report.html", target: float | str | None = None) -> Path:
        """Write a page that shows the run: verdict, figures and tables, in one file.

        `target` is the score whose time it tells, "90%" or 0.35. A run that kept a folder
        (`out=`) also has its timeline there. Needs matplotlib, `pip install offbeat[plot]`.
        """
        # Only who wants a report pays for what draws it.
        from offbeat.report.digest import digest
        from offbeat.report.grid import remembered, side_by_side
        from offbeat.report.page import write_page

        if self.folder is not None and self.folder.is_dir():
            found = digest(self.folder)
        else:
            found = remembered(self.history, self.figures)
        return write_page(side_by_side([found]).aimed(target), Path(path))

    def __repr__(self) -> str:
        """One line, however long the run and however large the model."""
        figures = self.figures
        words = [
            f"{figures.discipline} on {counted(figures.workers, 'worker')}",
            f"{counted(figures.updates, 'update')} in {figures.seconds:.3g} s",
        ]
        if figures.metric is not None:
            words.append(f"{figures.metric_name} {figures.metric:.4g}")
        if figures.accuracy is not None:
            words.append(f"accuracy {100 * figures.accuracy:.1f} %")
        elif figures.loss is not None:
            words.append(f"test loss {figures.loss:.4g}")
        if self.folder is not None:
            words.append(f"kept in {self.folder}")
        return f"<Run: {', '.join(words)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows of the run: its figures as a table."""
        from offbeat.report.page_tables import notebook

        return notebook(self.figures)

    @property
    def parameter_hash(self) -> str:
        """A hash of the final parameters; equal for two runs exactly if their bits are."""
        return self.figures.parameter_hash
