"""What can happen in a run: one small record for each kind of event."""

from typing import Any

import msgspec

from offbeat.data.lease import Lease

# What a script has set otherwise than at the beginning, for each group of its optimiser.
Settings = list[dict[str, Any]]


# Not searched for garbage, as everything that is made anew for every step: none can hold itself.
class Record(msgspec.Struct, tag_field="kind", omit_defaults=True, gc=False):
    """Something that happened at `time` (seconds since the run began, virtual in a simulation)."""

    time: float


class Begun(Record, tag="begin"):
    """The run begins with what an earlier one had come to."""

    folder: str
    left: str = ""  # why what the earlier rule kept was left behind, if it was


class Joined(Record, tag="join"):
    """A worker entered, for the first time or again."""

    worker: int
    incarnation: int
    clock: int
    averaged: bool = False  # whether its buffers begin as the mean of all, and not as at first


class Pulled(Record, tag="pull"):
    """A worker took the parameters of `version`, after computing `leases` since its last push."""

    worker: int
    version: int
    leases: list[Lease] = []
    steps: int = 1  # local steps until its next push
    bytes: int = 0


class Part(msgspec.Struct, omit_defaults=True, gc=False):
    """One contribution: who sent it, from which version, of which samples, and what it cost."""

    worker: int
    incarnation: int
    sequence: int
    base: int
    leases: list[Lease]
    samples: int
    staleness: int = 0
    weight: float = 1.0
    bytes: int = 0
    compute: float = 0.0
    wait: float = 0.0
    communication: float = 0.0
    loss: float | None = 0.0  # None where it is not a number
    skipped: bool = False
    partner: int | None = None  # whom it took the mean with before its step, where pairs meet
    settings: Settings | None = None  # None where they are those of the beginning


class Admitted(Record, tag="push"):
    """A contribution was taken in and waits for others before it is applied."""

    worker: int
    incarnation: int
    sequence: int
    leases: list[Lease]


class Updated(Record, tag="update"):
    """The store applied `parts` and is now at `version`."""

    version: int
    parts: list[Part]
    rate: float = 1.0  # what the staleness weights made of the learning rate
    hash: str = ""


class Dropped(Record, tag="drop"):
    """A contribution came too late and was not applied."""

    version: int
    part: Part
    redo: bool = False  # whether its samples go out again, and so are not given up


class Refused(Record, tag="refuse"):
    """A contribution of a worker that had been given up; it must join again."""

    worker: int
    incarnation: int
    sequence: int


class Lost(Record, tag="lost"):
    """A worker was silent for longer than patience; its leases are issued again."""

    worker: int
    incarnation: int
    leases: list[Lease]
    why: str = ""  # who waited for whom in a replica of several processes


class Left(Record, tag="left"):
    """A script left its loop in one worker; its leases are issued again, and the others go on."""

    worker: int
    incarnation: int
    leases: list[Lease]


class Ended(Record, tag="end"):
    """The script of `worker` ended the run for all, before every sample had been dealt with."""

    worker: int
    version: int


class Linked(Record, tag="link"):
    """A worker on `host` can be reached over a network, for the first time or anew."""

    worker: int
    host: str
    round_trip: float  # seconds, as it was measured then
    connections: int


class Measured(Record, tag="wire"):
    """What has gone over a worker's link since the last such record, and how fast.

    The store counts bytes, both directions time their large transfers. 0 is not known.
    """

    worker: int
    round_trip: float = 0.0  # seconds, the least since then
    sent: int = 0  # bytes from the worker to the store
    received: int = 0
    large_sent: int = 0  # of these, bytes of large transfers
    sent_in: float = 0.0  # and the seconds that they took
    large_received: int = 0
    received_in: float = 0.0


class Relaid(Record, tag="relaid"):
    """A run goes on with replicas that are split in another way, and so sum in another order."""

    layout: str | None
    threads: int


class Rested(Record, tag="rest"):
    """A worker has nothing to do now; its time since its last contribution is told here."""

    worker: int
    wait: float = 0.0
    communication: float = 0.0


class EpochDone(Record, tag="epoch"):
    """Every sample of `epoch` has been dealt with."""

    epoch: int
    version: int


class Turned(Record, tag="turn"):
    """From `version` on another discipline holds, the one of the `stage`-th turn of the course."""

    version: int
    stage: int
    discipline: str
    rate: float = 1.0  # what it makes of the learning rate
    why: str = ""
    level: bool = False  # whether all clocks were set to that of the slowest


class Evaluated(Record, tag="test"):
    """The store's parameters on the test set."""

    version: int
    samples: int
    loss: float | None  # None where it is not a number
    accuracy: float | None = None
    metric: float | None = None  # the user's own, whose name run.json has
    metrics: dict[str, float | None] = {}  # others beside it


Entry = (
    Begun | Joined | Pulled | Admitted | Updated | Dropped | Refused | Lost | Left | Ended | Linked
    | Measured | Relaid | Rested
    | EpochDone | Turned | Evaluated
)  # fmt: skip
