"""What trackers share: the names of the metrics, and that a tracker's failure is not the run's."""

import importlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import time
from typing import Any, ParamSpec

from offbeat.errors import ConfigError
from offbeat.report.summary import Summary, Test
from offbeat.track.callback import Begin, Callback, End, Epoch, Event, Update

WORKERS = 64  # with a curve of their own
P = ParamSpec("P")

# What a summary has beyond the curves, one number each.
FINAL = (
    *("seconds", "updates", "samples", "samples_per_second", "loss", "accuracy"),
    *("staleness_mean", "staleness_max", "wait_share", "dropped", "refused", "lost", "skipped"),
    *("bytes_sent", "bytes_received"),
)


class Tracker(Callback):
    """Sends named numbers to a place: `open`, then `put` at each point, then `close`.

    What goes wrong before the run is an error. What goes wrong later is told once, as a warning,
    and the run goes on without the tracker: training is worth more than its curves.
    """

    began: float | None = None  # real time at which the run's own time was 0
    _silent = False
    _events: Counter[str]

    def open(self, begin: Begin) -> None:
        raise NotImplementedError

    def put(self, values: dict[str, float], when: float, samples: int) -> None:
        """Finite `values` at `samples`; `when` is real time, or begin plus virtual time."""
        raise NotImplementedError

    def close(self, end: End) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ a callback

    def on_begin(self, begin: Begin) -> None:
        self._silent, self.began, self._events = False, None, Counter()
        self._samples = 0
        try:
            self.open(begin)
        except OSError as error:
            raise ConfigError(
                f"{type(self).__name__} cannot write to {error.filename or 'its place'} "
                f"({error.strerror or error}): choose another one"
            ) from error

    def on_update(self, update: Update) -> None:
        values = {
            "train/loss": update.loss,
            "train/staleness": update.staleness,
            "train/samples_per_second": update.samples_per_second,
            "train/version": update.version,
            "waiting/all": update.waiting,
        }
        for number, share in enumerate(update.waiting_by_worker[:WORKERS]):
            values[f"waiting/worker_{number}"] = share
        self._samples = update.samples
        self._put(values, update.time, update.samples)

    def on_test(self, test: Test) -> None:
        values = {
            "test/loss": test.loss,
            "test/accuracy": test.accuracy,
            "test/metric": test.metric,
        }
        self._put(values, test.time, test.samples)

    def on_epoch(self, epoch: Epoch) -> None:
        values = {"epoch/loss": epoch.loss, "epoch/samples_per_second": epoch.samples_per_second}
        self._put(values, epoch.time, epoch.samples)

    def on_event(self, event: Event) -> None:
        """Joins, losses, refusals and drops, counted."""
        self._events[event.kind] += 1
        name = f"events/{event.kind}"
        self._put({name: self._events[event.kind]}, event.time, self._samples)

    def on_end(self, end: End) -> None:
        if self._silent:
            with suppress(Exception):  # the failure has been told
                self.close(end)
        else:
            self.guarded(self.close, end)

    # ------------------------------------------------------------ putting

    def _put(self, values: Mapping[str, float | None], at: float, samples: int) -> None:
        if self.began is None:
            self.began = time() - at
        told = {k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)}
        if told:
            self.guarded(self.put, told, self.began + at, samples)

    def guarded(self, act: Callable[P, None], *args: P.args, **more: P.kwargs) -> None:
        """Do it, unless that has failed before; a failure is told and stays here."""
        if self._silent:
            return
        try:
            act(*args, **more)
        except Exception as error:
            self._silent = True
            name = type(self).__name__
            warnings.warn(
                f"{name} has stopped tracking ({type(error).__name__}: {error}); the run goes on",
                RuntimeWarning,
                stacklevel=2,
            )


def final(summary: Summary) -> dict[str, float]:
    """The numbers of a summary, by their names there."""
    told = {name: getattr(summary, name) for name in FINAL}
    return {k: float(v) for k, v in told.items() if v is not None and math.isfinite(v)}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as one level of texts: {"options.lr": "0.1"}."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


def installed(name: str, extra: str) -> Any:
    """The user's own package, or what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this needs {name}, which is not here ({error}): pip install {extra}"
        ) from None
