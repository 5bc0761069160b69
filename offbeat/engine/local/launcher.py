"""The local engine: a launcher that starts server, workers and tester, and mends what dies."""

import os
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from offbeat.engine.local import launcher_messages as orders
from offbeat.engine.local.backup_process import HandedOver, hand_over
from offbeat.engine.local.launcher_messages import (
    BackupFollows,
    CheckpointBegun,
    Halt,
    LogLines,
    ReportInbox,
    RunDone,
    ServerReports,
    WorkerConnected,
    WorkerFrozen,
    send_order,
)
from offbeat.engine.local.outcome import check_settled, write_run
from offbeat.engine.local.process import ForkSpawner, Inside, branch, startable
from offbeat.engine.local.roles import Roles
from offbeat.engine.local.watchdog import FILES, IDLE, WORKING, Watchdog
from offbeat.engine.result import Run, interrupted
from offbeat.engine.run_session import RunSession, Saved
from offbeat.engine.signals import children_kept, heard
from offbeat.engine.spawn import (
    BACKUP,
    RESTARTS,
    SERVER,
    TESTER,
    Handle,
    ProcessFailed,
    Role,
    Spawner,
    failed,
)
from offbeat.errors import RunError
from offbeat.log.log import Listener, decode
from offbeat.log.records import Admitted, Entry, Evaluated, Updated
from offbeat.report.summary import Tally
from offbeat.store.recovery import CrashState

PAUSE = 0.5  # seconds after which a display is told that nothing happens
PIECE = 8  # records that the launcher looks at in one go


class Launcher:
    """Starts the processes of a run, waits, restarts the dead, and passes records on.

    The order of things: the server first, then everybody else with one end of a wire, whose other
    end is handed to the server. Nobody keeps an end that is not his, so that a death is noticed
    at once by whoever talks to the dead.
    """

    def __init__(
        self,
        roles: Roles,
        tally: Tally,
        listeners: Sequence[Listener],
        branches: bool = False,
        spawner: Spawner = ForkSpawner(),  # noqa: B008
    ):
        """With `branches` workers go on from where they are forked, as scripts do."""
        self.roles, self.tally, self.listeners = roles, tally, listeners
        self.kept = tally.copy()  # the figures as of the last checkpoint
        self.marked = (-1, self.kept)  # a version, and the figures as of its checkpoint
        self.seen = [0, 0]  # records since the last checkpoint, and since the one being made
        self.children: dict[int, Handle] = {}
        self.failures: dict[int, int] = {}  # of each, in a row without any work between them
        self.furthest = 0  # the highest version that there has been
        shared = roles.shared
        self.signs = {SERVER: shared.server, TESTER: shared.tester, BACKUP: shared.backup}
        self.dog = Watchdog(roles.local.patience, self.signs)
        self.silent: set[int] = set()  # who was killed for that
        self.selector = selectors.DefaultSelector()
        self.orders: socket.socket | None = None
        self.asking: socket.socket | None = None  # the way to the backup
        self.crash: CrashState | None = None  # what a killed server has left, while nobody else has
        self.inbox: ReportInbox | None = None
        self.done: RunDone | None = None
        self.mistake: RunError | None = None  # of a script after its loop
        self.untold: dict[int, RunError] = {}  # of scripts in their loops, until they are back
        self.ended = 0.0
        self.stopping: int | None = None  # the signal that asked for it
        self.branches, self.spawner = branches, spawner
        self.inside: Inside | None = None  # in such a worker's process

    def run(self, saved: Saved | None) -> RunDone:
        """Train to the end, or until Ctrl-C or SIGTERM."""
        try:
            with self._interruptible():
                self._start(saved)
                while self.done is None or self._somebody_left():
                    if not self._turn():
                        self._restart_all()
            never_back = [self.untold[n] for n in sorted(self.tally.left) if n in self.untold]
            if self.mistake is not None or never_back:
                raise self.mistake or never_back[0]
            assert self.done is not None
            return self.done
        finally:
            if self.inside is None:
                self._end_all()

    # ------------------------------------------------------------ starting

    def _start(self, saved: Saved | None, crash: CrashState | None = None) -> None:
        self.orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine, reports = socket.socketpair()
        self.inbox = ReportInbox(mine)
        self.selector.register(mine, selectors.EVENT_READ, None)
        mine_too = self.orders

        def serve() -> None:
            mine.close()
            mine_too.close()
            self.roles.serve(orders, reports, saved, crash)

        self.signs[SERVER].about, self.signs[TESTER].about = FILES, IDLE
        with orders, reports:
            self._fork(SERVER, serve)
        if self.roles.backup is not None:
            self._start_backup()  # before anybody else comes to the server
        for number in range(self.roles.workers):
            self._start_one(number)
        if self.roles.tests:
            self._start_one(TESTER)
        if self.stopping is not None:  # the order went to a server that was killed
            self._halt()

    def _start_one(self, number: int) -> None:
        theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def main() -> None:
            theirs.close()
            self._forget_my_ends()
            if number == TESTER:
                self.roles.test(mine)
            else:
                self.roles.work(number, mine)

        with theirs:
            if self.branches and number >= 0:
                self._branch(number, theirs, mine)
            else:
                with mine:
                    self._fork(number, main)
            self._hand_over(number, theirs)

    def _start_backup(self) -> None:
        if self.asking is not None:
            self.asking.close()
        theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def main() -> None:
            theirs.close()
            self._forget_my_ends()
            self.roles.back_up(mine, asked)

        self.signs[BACKUP].about = IDLE
        with theirs, mine, asked:
            self._fork(BACKUP, main)
            self._hand_over(BACKUP, theirs)

    def _hand_over(self, number: int, wire: socket.socket) -> None:
        """The server gets its end of a wire."""
        assert self.orders is not None
        with suppress(OSError):  # if the server has died meanwhile, its handle will tell
            send_order(self.orders, WorkerConnected(number), wire)

    def _branch(self, number: int, theirs: socket.socket, mine: socket.socket) -> None:
        """Fork a worker that leaves the launcher from here, by an exception, and goes on."""
        role = self._role(number)
        with startable(role.title):
            child, inside = branch(role.name)
        if child is not None:
            mine.close()
            self._watch(number, child)
            return
        self.inside = inside
        theirs.close()
        self._forget_my_ends()
        for other in self.children.values():
            other.forget()
        self.selector.close()
        assert inside is not None
        raise InWorker(number, mine, inside)

    def _fork(self, number: int, main: Callable[[], None]) -> None:
        self._watch(number, self.spawner.start(self._role(number), main))

    def _role(self, number: int) -> Role:
        return Role(number, self.roles.threads(number))

    def _watch(self, number: int, child: Handle) -> None:
        self.children[number] = child
        self.dog.watch(number, child.pid)
        self.silent.discard(number)
        self.selector.register(child.handle, selectors.EVENT_READ, number)

    def _forget_my_ends(self) -> None:
        """In a child: close what only the launcher should hold."""
        assert self.orders is not None
        assert self.inbox is not None
        self.orders.close()
        self.inbox.wire.close()
        if self.asking is not None:
            self.asking.close()

    # ------------------------------------------------------------ what happens

    def _turn(self) -> bool:
        """Deal with the next things that happen; False when the server has been killed."""
        now = time.monotonic()
        limits = [self._patience_left(), self.dog.left(now), PAUSE if self.listeners else None]
        events = self.selector.select(min(limit for limit in limits if limit is not None))
        if not events:
            for listener in self.listeners:
                listener.idle()
        for key, _ in events:
            if key.data is None:
                self._read()
            elif not self._gone(key.data):
                return False
        if self._patience_left() == 0.0:
            self._kill_all()
        for number in self.dog.silent(time.monotonic()):
            self.silent.add(number)
            self.children[number].kill()
        if self.done is None and self._left_alone():
            self._halt()  # every script has left its loop before the end
        return True

    @property
    def scripted(self) -> bool:
        """Whether workers are scripts, which may end a run before its samples are done."""
        return self.branches

    def _left_alone(self) -> bool:
        return not any(number >= 0 for number in self.children)

    def _read(self) -> None:
        assert self.inbox is not None
        for report in self.inbox.take():
            self._hear(report)

    def _read_all(self) -> None:
        """The server is gone, but its last reports may still lie there."""
        assert self.inbox is not None
        while not self.inbox.ended:
            self._read()

    def _hear(self, report: ServerReports) -> None:
        if isinstance(report, LogLines):
            self._see_in_pieces(report.lines)
        elif isinstance(report, CheckpointBegun):
            self.marked = (report.version, self.tally.copy())
            self.seen[1] = 0
        elif isinstance(report, orders.CheckpointSaved):
            self._saved()
        elif isinstance(report, WorkerFrozen):
            if report.number in self.children:
                self.children[report.number].kill()
        elif isinstance(report, BackupFollows):
            self.crash = None
        else:
            self.done = report
            self.ended = time.monotonic()
            for number in (TESTER, BACKUP):  # nobody waits for their answers any more
                if number in self.children:
                    self.children[number].kill()

    def _see_in_pieces(self, lines: bytes) -> None:
        """Whoever trains goes first: in lock-step all would wait for one who waits for this."""
        each = lines.splitlines(keepends=True)
        for start in range(0, len(each), PIECE):
            self._see(decode(b"".join(each[start : start + PIECE])))
            if self.stopping is None:  # nobody trains on, and the server waits until all is heard
                os.sched_yield()

    def _see(self, records: list[Entry]) -> None:
        self.seen = [count + len(records) for count in self.seen]
        listeners = (self.tally, *self.listeners)
        for record in records:
            if isinstance(record, Updated):
                if record.version > self.furthest:  # made again after a fall back is no progress
                    self.furthest, self.failures[SERVER] = record.version, 0
                    self.failures[BACKUP] = 0
                for part in record.parts:
                    self.failures[part.worker] = 0
            elif isinstance(record, Admitted):
                self.failures[record.worker] = 0
            elif isinstance(record, Evaluated):
                self.failures[TESTER] = 0
            for listener in listeners:
                listener.see(record)

    def _gone(self, number: int) -> bool:
        """A child is gone: what it said last, and whether it can be started again."""
        child = self.children.pop(number)
        self.dog.forget(number)
        self.selector.unregister(child.handle)
        words = child.reap()
        if number == SERVER:
            self._read_all()
        if words is not None and number >= 0 and (words.late or self.done is not None):
            if self.mistake is None:
                self.mistake = failed(self._role(number), words)
                self.ended = time.monotonic()
            return True  # told when the others have left: they may be about to save something
        if words is not None:
            self.untold[number] = failed(self._role(number), words)
        elif self.branches and number >= 0 and (child.status or 0) > 0:
            ended = f"{self._role(number).title} ended its script with exit status {child.status}"
            self.untold[number] = ProcessFailed(f"{ended}, before the run was over")
        if self.done is not None or child.well:
            return number != SERVER or self.done is not None
        if words is not None and words.ours:
            raise failed(self._role(number), words)
        self.failures[number] = self.failures.get(number, 0) + 1
        if self.failures[number] > RESTARTS or (words is not None and number == SERVER):
            patience = self.roles.local.patience if number in self.silent else None
            raise failed(self._role(number), words, child.status, patience)
        if number == SERVER:
            return False
        if number == BACKUP:
            self._start_backup()
        else:
            self._start_one(number)
        return True

    def _restart_all(self) -> None:
        """The server was killed: everybody starts anew, from what it left behind.

        That is an image of a small model, else what the backup has. Without either it goes back
        to its last checkpoint: what was applied since then is given up, and the log is cut to
        match.
        """
        handed = self._ask_backup()
        self._kill_all()
        self._reap_all()
        self._close_ends()
        saved = self.roles.last_checkpoint()
        if saved is not None and saved[1]["store"]["version"] == self.marked[0]:
            self._saved()  # it was killed after saving and before it could say so
        self.crash = self.roles.crash_state(saved, handed, self.crash)
        if self.crash is None:
            self.tally.__dict__.update(self.kept.copy().__dict__)
            self.seen = [0, 0]
        else:
            self._see(self.crash.records[self.seen[0] :])  # what it had no time to report
        self._start(saved, self.crash)

    def _ask_backup(self) -> HandedOver | None:
        """What the backup has, if there is one; it may have to finish an update first."""
        if self.asking is None or BACKUP not in self.children:
            return None
        asking = self.asking
        self.signs[BACKUP].about = WORKING

        def still() -> bool:
            while not select.select([asking], [], [], self.dog.left(time.monotonic()))[0]:
                if BACKUP in self.dog.silent(time.monotonic()):
                    return False
            return True

        return hand_over(asking, still)

    def _saved(self) -> None:
        self.kept = self.marked[1]
        self.seen[0] = self.seen[1]

    # ------------------------------------------------------------ the end

    def _somebody_left(self) -> bool:
        return bool(self.children)

    def _patience_left(self) -> float | None:
        """When the run is over, whoever does not leave is sent away after `patience`.

        Scripts may take as long as they like, unless one has failed that others may wait for.
        """
        patience = self.roles.local.patience
        if self.done is None or (self.branches and self.mistake is None):
            return None
        return max(0.0, self.ended + patience - time.monotonic())

    def _kill_all(self) -> None:
        for child in self.children.values():
            child.kill()

    def _reap_all(self) -> None:
        for number, child in self.children.items():
            self.selector.unregister(child.handle)
            child.reap()
            self.dog.forget(number)
        self.children.clear()

    def _close_ends(self) -> None:
        if self.inbox is not None and self.orders is not None:
            self.selector.unregister(self.inbox.wire)
            self.inbox.wire.close()
            self.orders.close()
        if self.asking is not None:
            self.asking.close()
        self.inbox = self.orders = self.asking = None

    def _end_all(self) -> None:
        self._kill_all()
        self._reap_all()
        self._wait_for_shards()
        self._close_ends()
        self.selector.close()

    def _wait_for_shards(self) -> None:
        """They die with their server; the last one to go closes the other end of the reports."""
        while self.inbox is not None and not self.inbox.ended:
            for _ in self.inbox.take():
                continue

    def _halt(self) -> None:
        if self.orders is not None:
            with suppress(OSError):  # a server that died meanwhile is told again when it is back
                send_order(self.orders, Halt())

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C asks the server to save and stop, the second stops at once."""

        def ask(number: int) -> None:
            self.stopping = number
            self._halt()

        with children_kept(), heard(ask):
            yield


class InWorker(BaseException):
    """Takes a forked worker out of the launcher's frames; it goes on where a script was."""

    def __init__(self, number: int, wire: socket.socket, inside: Inside):
        super().__init__(number)
        self.number, self.wire, self.inside = number, wire, inside


def run_local(
    roles: Roles,
    kept: RunSession,
    tally: Tally,
    listeners: Sequence[Listener],
    make: Callable[..., Launcher] = Launcher,
) -> Run:
    """Train with real processes; raises Interrupted, with the run so far, after Ctrl-C or SIGTERM.

    `make` makes the launcher. Where that has `branches`, each worker leaves from here by an
    InWorker, to go on with a script.
    """
    job = roles.job
    launcher = make(roles, tally, listeners)
    with ExitStack() as after:
        after.callback(roles.close)
        for listener in listeners:
            after.callback(listener.end)
            listener.begin(roles.shared, job.samples * job.epochs)
        try:
            done = launcher.run(kept.saved)
        except InWorker:
            after.pop_all()  # memory and display are used on, here and in the launcher
            raise
    # Scripts may leave of themselves; workers that only compute have no reason to.
    if done.finished or not (launcher.scripted or launcher.stopping is not None):
        check_settled(done, job)
    run = write_run(roles, kept, tally, done)
    if not done.finished and launcher.stopping is not None:
        raise interrupted(run, launcher.stopping)
    return run
