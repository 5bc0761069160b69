"""Where a run's figures go while it runs: your own callback, TensorBoard, CSV, MLflow, W&B."""

from offbeat.track.callback import Begin, Callback, End, Epoch, Event, Update
from offbeat.track.rows import CSV
from offbeat.track.services import MLflow, WandB
from offbeat.track.tensorboard import TensorBoard

__all__ = [
    "CSV",
    "Begin",
    "Callback",
    "End",
    "Epoch",
    "Event",
    "MLflow",
    "TensorBoard",
    "Update",
    "WandB",
]
