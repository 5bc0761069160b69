"""Published findings, tried on the simulated cluster: each study makes its runs and its table."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from offbeat.errors import ConfigError
from offbeat.studies import dc_asgd, diloco, staleness, sync_switch
from offbeat.studies.common import Result

__all__ = ["STUDIES", "Result", "Study", "study"]


@dataclass(frozen=True)
class Study:
    """One finding: `run` makes the runs, on MNIST if a folder is given, and `show` the table."""

    run: Callable[[str | None], Result]
    show: Callable[[Result], Table]

    @property
    def about(self) -> str:
        """What the study tries, in one sentence."""
        return (self.run.__doc__ or "").strip()


STUDIES: dict[str, Study] = {
    "staleness": Study(staleness.run, staleness.show),
    "sync-switch": Study(sync_switch.run, sync_switch.show),
    "dc-asgd": Study(dc_asgd.run, dc_asgd.show),
    "diloco": Study(diloco.run, diloco.show),
}


def study(name: str) -> Study:
    """The study called `name`."""
    if name not in STUDIES:
        raise ConfigError(f"there is no study {name!r}; write one of {', '.join(STUDIES)}")
    return STUDIES[name]
