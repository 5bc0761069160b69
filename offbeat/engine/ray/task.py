"""What travels to the workers of a run before its first step, by way of Ray's object store."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from offbeat.config.run_config import RunConfig
from offbeat.engine.hosts.admission import plain
from offbeat.engine.hosts.sketch import versions

Read = Callable[[], Dataset[Any] | DataLoader[Any]]  # opens the data where it is called

# Options of a run that its workers have to know. What is kept of it, and who sees it, is the
# launcher's own affair.
SENT = (
    *("model", "data", "loss", "optimizer", "schedule", "clip", "constrain", "groups"),
    *("batch_size", "accumulate", "epochs", "collate", "shuffle", "drop_last", "seed"),
    *("discipline", "workers", "shares", "codec", "pull_codec", "shards", "policies", "nonfinite"),
    *("hash_every", "numerics", "reading", "device"),
)


@dataclass(frozen=True)
class Task:
    """A run as its workers get to know it."""

    given: dict[str, Any]  # by the names of `RunConfig`, apart from data that is read there
    read: Read | None  # where every host reads it for itself
    versions: dict[str, Any]  # on the launcher's host

    @classmethod
    def of(cls, config: RunConfig, read: Read | None) -> "Task":
        given = {name: getattr(config, name) for name in SENT}
        if read is not None:
            del given["data"]
        return cls(given, read, plain(versions()))

    @property
    def parts(self) -> dict[str, Any]:
        """All that has to be pickled, by the names that a user knows."""
        return {**self.given, "data": self.given.get("data", self.read)}
