"""The small messages that go beside the tensors: who did what with which samples."""

import socket
import time

import msgspec

from offbeat.lease import Lease
from offbeat.link.cores import give_way
from offbeat.log import Part


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """One packet; tensors never travel in it."""


# ---------------------------------------------------------------- from worker to store


class Join(Message):
    """A worker enters, for the first time or again."""


class Push(Message):
    """A contribution lies in the worker's slot."""

    part: Part
    absent: list[str]
    pull: bool  # the worker will pull next, so one answer can serve for both
    place: int = 0  # which of its outgoing buffers; -1 if nothing goes out
    ahead: list[Lease] = []  # what it computes before it takes that answer
    lacking: list[int] = []  # places of averaged local state that it does not have yet


class Pull(Message):
    """The worker wants to go on; `computed` are steps done since its last push."""

    computed: list[Lease]
    waits: bool = True  # an elastic exchange takes the centre whenever it comes


class Ask(Message):
    """The worker has used up its leases."""


class Rest(Message):
    """The worker found nothing to do, after this much waiting and talking in vain."""

    wait: float
    communication: float


class Met(Message):
    """The worker has the mean of this attempt at a round, and has not applied it yet."""

    attempt: int


class Apart(Message):
    """A group has failed this worker."""

    group: int
    reason: str


class Applied(Message):
    """The worker has applied the mean to its own parameters."""


class Here(Message):
    """The worker is alive, and waits for the others."""


class Leave(Message):
    """The script of this worker has left its loop; the others go on without it."""


class End(Message):
    """The script of this worker ends the run for everybody."""


class Bye(Message):
    """The worker's last words: what it held, and how well its stages overlapped."""

    figures: dict[str, float]


# ---------------------------------------------------------------- from store to worker


class Welcome(Message):
    """The worker is in, as this incarnation."""

    incarnation: int


class Took(Message):
    """The store has taken (or dropped) the contribution; the slot is free again."""

    leases: list[Lease]


class Meet(Message):
    """Who adds up a round without a store, and with how many samples each.

    Every attempt at a round has a number, and so has every group that its members connect to.
    """

    attempt: int
    group: int
    members: list[tuple[int, int]]  # a worker and its samples, by number
    path: str  # of the file through which the members find each other
    secret: bytes  # that they prove to each other


class Apply(Message):
    """Everybody has the mean: apply it, if there is one; `absent` parameters got no gradient."""

    absent: list[str]
    live: bool
    lifts: dict[int, float] = {}  # what averaged local state is multiplied by where some lack it


class Knock(Message):
    """Is this worker still there?"""


class Go(Message):
    """The parameters of `version` lie in the worker's slot."""

    version: int
    steps: int
    epoch: int
    leases: list[Lease]
    waited: float
    place: int  # which of its incoming buffers
    updater: bool  # averaged optimiser state lies beside them
    meet: Meet | None = None  # the round that follows, where workers meet without a store
    fresh: bool = False  # whether the rule's state in the slot is to be taken over as well
    lacking: list[int] = []  # places of averaged local state that nobody has yet


class Leased(Message):
    """The next samples, or none."""

    leases: list[Lease]


class Again(Message):
    """This incarnation was given up: join again."""


class Wake(Message):
    """Leases have come back: pull, and go on."""


class Stop(Message):
    """The run is over, or was stopped before its end."""

    finished: bool


ToStore = Join | Push | Pull | Ask | Rest | Leave | End | Bye | Met | Apart | Applied | Here
ToWorker = Welcome | Took | Go | Leased | Again | Wake | Stop | Meet | Apply | Knock

encode = msgspec.msgpack.Encoder().encode
to_store = msgspec.msgpack.Decoder(ToStore).decode
to_worker = msgspec.msgpack.Decoder(ToWorker).decode


class Packets:
    """Receives one packet at a time into a buffer that is made once: they come by the thousand."""

    LARGEST = 1 << 18  # bytes

    def __init__(self) -> None:
        self.view = memoryview(bytearray(self.LARGEST))

    def receive(self, wire: socket.socket, attention: float = 0.0) -> memoryview:
        """The next packet, to be decoded before the next one; empty if the other end is gone.

        For `attention` seconds this core is kept from falling asleep: one that sleeps takes longer
        to wake than most answers take to come. Whoever else is to run on it goes first.
        """
        try:
            until = time.perf_counter() + attention if attention else 0.0
            while until and time.perf_counter() < until:
                give_way()
                try:
                    return self.view[: wire.recv_into(self.view, 0, socket.MSG_DONTWAIT)]
                except BlockingIOError:
                    continue
            return self.view[: wire.recv_into(self.view)]
        except ConnectionError:
            return self.view[:0]
