"""A store that dies anywhere loses nothing it has told; with one rule left out, it does."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

import offbeat as ob
from offbeat.store.board import Row
from offbeat.store.parameters import Parameters
from offbeat.store.recovery import CrashState
from offbeat.store.store import Store
from offbeat.worker.contribution import Admission, Contribution
from tests.store.backup_histories import (
    BackupHistory,
    BackupProcess,
    Channel,
    FollowedNumbers,
)

DISCIPLINES = ["bsp", "ssp:2", "asp", "soft:2", "bsp:backup=1", "local:2", "easgd:2", "asup:1"]
SEEDS = 25  # of each discipline
MUTANT_SEEDS = 150


def history(kind: type[BackupHistory], discipline: str, seed: int) -> BackupHistory:
    least = 2 if discipline in ("soft:2", "bsp:backup=1") else 1  # workers
    return kind(ob.parse(discipline), seed, least)


def run(made: BackupHistory) -> None:
    made.run()
    made.check_end()


def check(discipline: str, seeds: Sequence[int]) -> int:
    """Returns how often a server has died."""
    deaths = 0
    for seed in seeds:
        made = history(BackupHistory, discipline, seed)
        try:
            run(made)
        except BaseException as error:
            error.add_note(f"{discipline}, seed {seed}: {'; '.join(made.story)}")
            raise
        deaths += made.deaths
    return deaths


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_store_that_dies_anywhere_loses_nothing_that_it_has_told(discipline):
    assert check(discipline, range(SEEDS)) > SEEDS // 2


@pytest.mark.soak
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_so_it_is_in_many_more_histories(discipline):
    assert check(discipline, range(SEEDS, 12_500)) > 6_000


# ---------------------------------------------------------------- one rule left out


class Early(BackupHistory):
    """Answers leave before the backup has what they are about."""

    class Hasty(Channel):
        def wait(self) -> None:
            return

    def _channel(self) -> Channel:
        return self.Hasty(self)


class Unlogged(BackupHistory):
    """Answers leave before they are on record."""

    def record(self) -> None:
        return


class Alone(BackupHistory):
    """The server goes on without a backup that nobody has ended."""

    def wait_in_vain(self, process: BackupProcess) -> None:
        process.frozen = False
        self.channel.process = None

    def promised(self) -> bool:
        return super().promised() or self.last.backup.version is not None


class Later(BackupHistory):
    """What is done while a new backup takes over what there is does not wait for it."""

    class Loose(Channel):
        def begin(self, process: BackupProcess, store: Store) -> None:
            values = store.parameters
            process.laid_down = dict(values.state()), values.meta()
            self.history.soon(lambda: super(type(self), self).begin(process, store))

    def _channel(self) -> Channel:
        return self.Loose(self)


class Unkept(BackupHistory):
    """A new backup comes while something waits that lies in no buffer any more."""

    def may_show(self) -> bool:
        return True


class Unflushed(BackupHistory):
    """A new backup is shown a version that is not on record."""

    def flush_first(self) -> None:
        return


class Unrecorded(BackupHistory):
    """What only the backup knows of is not put on record."""

    def revive(self, crash: CrashState) -> None:
        super().revive(replace(crash, unrecorded=None))


class Undrained(BackupHistory):
    """What was said to the backup and not yet done is forgotten."""

    def drain(self, process: BackupProcess) -> None:
        process.wire.clear()


class Unleased(BackupHistory):
    """Leases that a dead server had handed out do not go out again."""

    def revive(self, crash: CrashState) -> None:
        super().revive(crash)
        self.store.leases.returned.clear()


class Reborn(BackupHistory):
    """Incarnations begin anew with each server."""

    def revive(self, crash: CrashState) -> None:
        super().revive(crash)
        self.store.cells[Row.INCARNATION] = 0


class Repeated(BackupHistory):
    """What comes twice counts twice."""

    class Forgetful(Store):
        def push(self, contribution: Contribution, now: float) -> Admission:
            self.cells[Row.SEQUENCE, contribution.part.worker] = -1
            return super().push(contribution, now)

    authority = Forgetful


class Unread(BackupHistory):
    """The backup does not hear what workers pull."""

    class Silent(FollowedNumbers):
        def remember(self, worker: int, version: int) -> None:
            Parameters.remember(self, worker, version)

    numbers = Silent


class Unwaiting(BackupHistory):
    """The backup does not hear what waits in a round."""

    class Silent(FollowedNumbers):
        def keep(self, contribution: Contribution) -> None:
            contribution.keep()

    numbers = Silent


MUTANTS = [
    *(Early, Unlogged, Alone, Later, Unkept, Unflushed, Unrecorded, Undrained),
    *(Unleased, Reborn, Repeated, Unread, Unwaiting),
]


def found(kind: type[BackupHistory]) -> int | None:
    """After how many histories it shows that a rule is left out."""
    count = 0
    for seed in range(MUTANT_SEEDS):
        for discipline in ("asp", "soft:2", "bsp"):
            count += 1
            try:
                run(history(kind, discipline, seed))
            except (AssertionError, KeyError):
                return count
    return None


@pytest.mark.parametrize("kind", MUTANTS, ids=lambda kind: kind.__name__)
def test_a_rule_that_is_left_out_shows(kind):
    assert found(kind) is not None, kind.__doc__


def test_the_same_seed_makes_the_same_history():
    deaths = 0
    for seed in range(6):
        one, other = (history(BackupHistory, "soft:2", seed) for _ in range(2))
        for made in (one, other):
            run(made)
        assert one.disk == other.disk
        assert one.story == other.story
        deaths += one.deaths
    assert deaths > 0
