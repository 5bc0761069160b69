"""What each process of a local run does: serve, work, or test."""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from offbeat.choices import InPlace
from offbeat.engine.blame import SERVER
from offbeat.engine.hand import Hand
from offbeat.engine.image import Images
from offbeat.engine.keep import Keep
from offbeat.engine.local_plan import Local, check, memory_plan, processes_of, under_way
from offbeat.engine.open_team import OpenSplit
from offbeat.engine.orders import TESTER, Outbox, Tested, encode
from offbeat.engine.process import compute_steadily, send_helpers_home
from offbeat.engine.rounds import Bereft, Rounds
from offbeat.engine.server import Server, Watch
from offbeat.engine.split import SplitReplica, prepare
from offbeat.engine.spread import Spread, held_by, hire
from offbeat.engine.station import Habits, Make, Station
from offbeat.engine.steward import Lived, Rhythm, Steward
from offbeat.engine.via import (
    ALLREDUCE,
    listening,
)  # fmt: skip
from offbeat.errors import RunError
from offbeat.job import Job, Numbers, Place
from offbeat.link.meeting import MeetingLink
from offbeat.link.memory import Shared
from offbeat.link.signs import IDLE
from offbeat.log import Begun, Log, Relaid, tail
from offbeat.prefetch import Prefetcher, worth_it
from offbeat.replica.evaluate import Evaluator
from offbeat.store.checkpoint import RunFolder
from offbeat.store.core import Store
from offbeat.store.fold import last_version
from offbeat.store.mirror import Mirror
from offbeat.store.parameters import Parameters, named_tensors
from offbeat.store.table import (
    dealt,
    under,
)
from offbeat.worker import Worker

AHEAD = 2  # batches that a reader thread reads ahead
ATTENTION = 1e-3  # seconds: several times what an idle core takes to wake, and what an answer takes


class Crew:
    """The parts of one run, made before anybody is forked, and what each process does with them."""

    def __init__(
        self,
        job: Job,
        local: Local,
        folder: RunFolder | None,
        evaluator: Evaluator | None,
        rhythm: Rhythm,
        memory: int | None = None,
    ):
        """`memory` is what another process of this run has made; this one then only works."""
        assert isinstance(job.content, Numbers)
        check(job, local)
        self.job, self.local, self.folder, self.evaluator = job, local, folder, evaluator
        self.content, self.rhythm, self.workers = job.content, rhythm, job.workers
        self.patience: float | None = local.patience
        self.reads_ahead = local.prefetch
        cut = job.content.cut
        self.split = cut is not None and (
            cut.layout.asynchronous or processes_of(job) > job.workers
        )
        if cut is not None and self.split:
            self.reads_ahead = False  # each process of a replica reads for itself
            prepare(cut)
        if job.content.accumulate > 1:
            self.reads_ahead = False  # a step reads its batch in parts
        if self.reads_ahead is None:
            self.reads_ahead = worth_it(job.content.reader)
        self.shared = Shared(memory_plan(job, local), memory)
        flats = None if memory is not None else self.shared.parameters
        self.store: Store = job.make_store(Log(), flats, self.shared.cells)
        self._allow(self.store.parameters)
        self.meets = local.via == ALLREDUCE
        self.held = held_by(self.shared.plan.tables, job)
        if self.meets:
            self.store.parameters = job.make_parameters(flats, None, Mirror)
            self.held = dealt(self.shared.plan.tables, 1)
        self.keep = Keep(self.shared, len(self.held))
        self.images: Images | None = None
        # Several processes have no moment at which all is one image; some have no parameters.
        whole = len(self.held) == 1 and not self.meets and not job.discipline.pairs
        if memory is None and whole and not isinstance(job.discipline.send, InPlace):
            assert self.store.parameters is not None
            self.images = Images.of(job, self.store.parameters, self.shared.plan.updater)
        self.begin: Callable[[Parameters], Begun] | None = None  # with an earlier run
        self.relaid: Relaid | None = None  # to be told when the run goes on
        self.buffers = {n: b.clone() for n, b in job.content.model.named_buffers()}
        if memory is None:
            for name, view in self.shared.averages.views.items():
                view.copy_(self.buffers[name])

    @property
    def tests(self) -> bool:
        return self.evaluator is not None

    def threads(self, number: int) -> int:
        """A worker waits while the server works for it, so both may use the same share."""
        return 1 if number == TESTER else self.local.threads_for(self.job)

    def last_checkpoint(self) -> Any:
        if self.folder is None:
            return self.keep.load()
        # Only the newest will do: the figures of the run are as of that one.
        found = self.folder.newest(back=False)
        return None if found is None else (found.tensors, found.meta)

    def close(self) -> None:
        if self.images is not None:
            self.images.close()
        self.keep.close()
        self.shared.arena.close()

    # ------------------------------------------------------------ the server

    def serve(
        self, orders: socket.socket, reports: socket.socket, saved: Any, lived: Lived | None
    ) -> None:
        spread = self._spread(orders, saved) if len(self.held) > 1 else None
        self.store.log = self._log(saved, lived)
        ahead = (AHEAD if self.reads_ahead else 0) + (1 if self.local.overlap else 0)
        ahead += under_way(self.job) - 1
        kind = Rounds if self.meets else Server
        server = kind(self.store, self.shared, self.local.patience, ahead, Watch())
        steward = Steward(server, self.folder or self.keep, self.rhythm, Outbox(reports))
        parameters = self.store.parameters
        assert parameters is not None
        if self.folder is None and self.images is not None:
            steward.new_log = lambda: self.keep.log
        if self.images is not None:
            found = None if lived is None else lived.tensors
            self.images.begin(0 if lived is None else lived.version, found)
        if saved is not None:
            steward.restore(*saved)
        else:
            self.store.begin_again()
            parameters.begin(self.content.model)
            begun = None if self.begin is None else self.begin(parameters)
            if begun is not None and lived is None:
                self.store.log.write(begun)
        if spread is not None:
            spread.ready()
            spread.watch(steward.floor.selector)
            server.give, steward.others = spread.give, spread.write
        steward.go_on(lived)
        if saved is not None and lived is None and self.relaid is not None:
            self.store.log.write(self.relaid)
        if self.images is not None:
            self.images.write(self.store.version)
            self.store.on_update, self.store.on_version = self.images.before, self.images.write
            steward.floor.spare = self.images.keep
        steward.obey(orders)
        send_helpers_home()  # from here on the threads that hear the workers compute
        try:
            steward.run()
        except Bereft:
            return  # without a result: the launcher starts everybody anew
        except OSError as error:
            raise RunError(
                f"the run could not be written down ({error.strerror}); its last checkpoint is "
                "intact: make room and resume"
            ) from error
        if spread is not None:
            spread.close()

    def _spread(self, orders: socket.socket, saved: Any) -> Spread:
        """Fork a hand for every process but this one; they load their numbers meanwhile."""

        def hold(number: int, wire: socket.socket) -> None:
            # The end for reports stays open here, so that the launcher hears of the last one's end.
            orders.close()
            parameters = self.job.make_parameters(self.shared.parameters, self.held[number])
            assert parameters is not None
            if saved is not None:
                tensors, meta = saved
                parameters.load(under("store/", tensors), meta["parameters"])
            elif self.begin is not None:
                self.begin(parameters)
            Hand(parameters, self.shared, wire).run()

        others = self.held[1:]
        hands = hire(len(others), hold, self.threads(SERVER))
        mine = self.job.make_parameters(self.shared.parameters, self.held[0], Spread)
        assert isinstance(mine, Spread)
        self._allow(mine)
        self.store.parameters = mine.over(self.shared, hands, others)
        return mine

    def _allow(self, parameters: Parameters | None) -> None:
        """With overlap a worker pulls again before what it computed has been sent."""
        if self.local.overlap and parameters is not None:
            parameters.reads.allow(2)

    def _log(self, saved: Any, lived: Lived | None) -> Log:
        if self.folder is not None:
            keep = None if saved is None else saved[1]["session"]["log"]
            keep = keep if lived is None else lived.length
            return Log(self.folder.log_file, keep, self.folder.run)
        if self.images is None:
            return Log()
        return Log(self.keep.log, None if lived is None else lived.length)

    def lived(self, saved: Any) -> Lived | None:
        """What a server that was killed has left in memory and log; None if that is not enough."""
        if self.images is None:
            return None
        start = 0
        path = self.keep.log if self.folder is None else self.folder.log_file
        if self.folder is not None and saved is not None:
            start = saved[1]["session"]["log"]
        records, length = tail(path, start)
        before = 0 if saved is None else saved[1]["store"]["version"]
        version = last_version(records, before)
        tensors = self.images.read(version)
        return None if tensors is None else Lived(version, records, length, tensors)

    # ------------------------------------------------------------ a worker

    def station(
        self,
        number: int,
        wire: socket.socket,
        make: Make | None = None,
        script: nn.Module | None = None,
    ) -> Station:
        """A worker's place; `make` makes another kind of worker, over the model of a `script`."""
        local = self.local
        least = local.emulate[number] if local.emulate else 0.0
        slot = self.shared.slots[number]
        if least:  # it sleeps for most of the time, and is to run when that is over, anywhere
            slot.settle = lambda: None
        else:
            compute_steadily()
        if self.split:
            assert self.content.cut is not None
            buffers = self.buffers | slot.statistics.views  # where the server leaves the mean
            what = (self.job, self.content.cut, slot, self.shared.posts[number], buffers)
            split = SplitReplica(*what, least)
            if script is not None:
                split = OpenSplit(*what, least, script)
            team = split.team(number, wire, self.threads(number))
            habits = Habits(self.store.discipline, self.job.seed, 0.0, local.overlap)
            build = partial(split.make, team, self.store, number)
            return Station(wire, slot, habits, build, None, team.leave)
        reader = Prefetcher(self.content.reader) if self.reads_ahead else None
        # One that sleeps anyway need not keep its core awake, nor one that waits for other workers.
        attention = 0.0 if least or self.meets else ATTENTION
        habits = Habits(self.store.discipline, self.job.seed, least, local.overlap, attention)
        makes = partial(make or self.job.make_worker, self.store, number)
        if not self.meets:
            return Station(wire, slot, habits, makes, reader)
        link = MeetingLink(wire, slot, number, self.job.make_parameters, 4 * local.patience)
        return Station(wire, slot, habits, partial(self._met, link, makes), reader, meeting=link)

    def _met(self, link: MeetingLink, makes: Make, incarnation: int, place: Place) -> Worker:
        """A worker whose gradients go to the others while they are made."""
        return listening(makes(incarnation, place), link, self.content.accumulate == 1)

    def work(self, number: int, wire: socket.socket) -> None:
        self.station(number, wire).run()

    # ------------------------------------------------------------ the tester

    def test(self, wire: socket.socket) -> None:
        assert self.evaluator is not None
        model = self.content.model
        while wire.recv(16):
            found = self.evaluator(self.tested_into(model), self.shared.tester.turn)
            # Before it says so: the server may have no time to hear it, or ask for the next one.
            self.shared.tester.about = IDLE
            wire.send(encode(Tested(*found)))

    @torch.no_grad()
    def tested_into(self, model: nn.Module) -> nn.Module:
        """Put what the server last exported into `model`."""
        own = named_tensors(model)
        for flat in (*self.shared.tested, self.shared.averages):
            for name, view in flat.views.items():
                own[name].copy_(view)
        return model
