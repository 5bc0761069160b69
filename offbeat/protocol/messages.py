"""The small messages that go beside tensors: who did what with which samples."""

import msgspec

from offbeat.data.lease import Lease
from offbeat.log.records import Part, Settings


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """One packet; tensors never travel in it."""


# ---------------------------------------------------------------- from worker to store


class Join(Message):
    """A worker enters, for the first time or again; others reach it at this place, if they do."""

    place: str = ""


class Push(Message):
    """A contribution.

    The last two say how buffers lie beside the message; the transport fills them in.
    """

    part: Part
    pull: bool  # the worker will pull next, so one answer can serve for both
    ahead: list[Lease] = []  # what it computes before it takes that answer
    absent: list[str] = []  # parameters that got no gradient at all
    place: int = -1  # which of its outgoing buffers; -1 if nothing goes out
    lacking: list[int] = []  # places of averaged local state that it does not have yet
    rows: list[int] = []  # how many rows travel of tensors of which only some do


class Pull(Message):
    """The worker wants to go on; `computed` are steps done since its last push."""

    computed: list[Lease]
    waits: bool = True  # an elastic exchange takes the centre whenever it comes


class AskLeases(Message):
    """The worker has used up its leases."""


class Rest(Message):
    """The worker found nothing to do, after this much waiting and talking in vain."""

    wait: float
    communication: float


class HasMean(Message):
    """The worker has the mean of this attempt at a round, and has not applied it yet."""

    attempt: int


class GroupFailed(Message):
    """A group has failed this worker; it may have been a member that it could not reach."""

    group: int
    reason: str
    unreached: int = -1


class Applied(Message):
    """The worker has applied the mean to its own parameters, which have this hash if asked for."""

    hash: str = ""


class Shown(Message):
    """What the worker holds of this version lies beside the message."""

    version: int


class Pong(Message):
    """The worker is alive, and waits for the others."""


class Leave(Message):
    """The script of this worker has left its loop; the others go on without it."""


class EndRun(Message):
    """The script of this worker ends the run for everybody."""


class Probe(Message):
    """What a worker has measured of its link since its last probe; 0 is nothing.

    The other end of the link answers at once, and the protocol does not hear of it.
    """

    round_trip: float
    nbytes: int  # of large transfers from the store
    seconds: float  # that these took


class Goodbye(Message):
    """The worker's last words: what it held, and how well its stages overlapped."""

    figures: dict[str, float]


# ---------------------------------------------------------------- from store to worker


class Welcome(Message):
    """The worker is in, as this incarnation."""

    incarnation: int


class Accepted(Message):
    """The store has taken (or dropped) the contribution; the slot is free again."""

    leases: list[Lease]


class StartRound(Message):
    """Who adds up a round without a store, and with how many samples each.

    Every attempt at a round has a number, and so has every group that its members connect to.
    """

    attempt: int
    group: int
    members: list[tuple[int, int]]  # a worker and its samples, by number
    secret: bytes  # that they prove to each other
    places: list[str]  # where each listens, in the order of the members


class ApplyMean(Message):
    """Everybody has the mean: apply it, if there is one; `absent` parameters got no gradient."""

    absent: list[str]
    live: bool
    lifts: dict[int, float] = {}  # what averaged local state is multiplied by where some lack it
    hashed: bool = False  # whether a hash of the new version is wanted
    settings: Settings | None = None  # that the script has for the rule


class Show(Message):
    """Send what there is of this version: it is to be tested, saved, or given to another."""

    version: int


class Seen(Message):
    """The server has what this worker has shown."""


class Ping(Message):
    """Is this worker still there?"""


class Go(Message):
    """It is the worker's turn, with the parameters of `version`.

    The last ones say how buffers lie beside the message; the transport fills them in.
    """

    version: int
    steps: int
    epoch: int
    leases: list[Lease]
    waited: float
    start: StartRound | None = None  # the round that follows, where workers meet without a store
    fresh: bool = True  # whether parameters come along; False where the worker has them already
    place: int = 0  # which of its incoming buffers
    updater: bool = False  # averaged optimiser state lies beside them
    lacking: list[int] = []  # places of averaged local state that nobody has yet
    packed: bool = False  # whether they are packed: the change since this worker's last pull
    before: float = 0.0  # seconds for which it was held before the run had begun
    progress: int = 0  # batches that all are through with, as a plain loop would count


class Probed(Message):
    """The answer to a probe."""


class Leased(Message):
    """The next samples, or none."""

    leases: list[Lease]


class Rejoin(Message):
    """This incarnation was given up: join again."""


class Wake(Message):
    """Leases have come back: pull, and go on."""


class Stop(Message):
    """The run is over, or was stopped before its end."""

    finished: bool
    version: int = 0  # that it came to


ToStore = (
    Join
    | Push
    | Pull
    | AskLeases
    | Rest
    | Leave
    | EndRun
    | Goodbye
    | HasMean
    | GroupFailed
    | Applied
    | Pong
    | Shown
    | Probe
)
ToWorker = (
    Welcome
    | Accepted
    | Go
    | Leased
    | Rejoin
    | Wake
    | Stop
    | StartRound
    | ApplyMean
    | Ping
    | Show
    | Seen
    | Probed
)

encode = msgspec.msgpack.Encoder().encode
to_store = msgspec.msgpack.Decoder(ToStore).decode
to_worker = msgspec.msgpack.Decoder(ToWorker).decode
