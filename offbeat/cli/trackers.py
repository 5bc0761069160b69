"""The trackers that the command line asks for."""

from pathlib import Path

from offbeat.log.log import Listener
from offbeat.track import CSV, TensorBoard


def trackers(tensorboard: Path | None, csv: Path | None) -> list[Listener]:
    """Whoever is to follow the run besides the display."""
    found: list[Listener] = []
    if tensorboard is not None:
        found.append(TensorBoard(tensorboard))
    if csv is not None:
        found.append(CSV(csv))
    return found
