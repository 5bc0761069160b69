"""When a run is tested and saved, counted from its store alone: the same on every engine."""

from dataclasses import dataclass

from offbeat.store.store import Store


@dataclass(frozen=True)
class Intervals:
    """How often to test and to save: samples between tests, versions between checkpoints."""

    test: int | None = None  # None never tests
    save: int | None = None  # None saves after each epoch


class Due:
    """What is due at a store now."""

    def __init__(self, store: Store, intervals: Intervals):
        self.store, self.intervals = store, intervals
        self.tests = 0  # done or under way
        self.saved_version, self.saved_epoch = store.version, store.epoch

    def test(self) -> bool:
        """Whether enough samples have been applied since the last test."""
        every = self.intervals.test
        return every is not None and self.store.applied >= (self.tests + 1) * every

    def last_test(self) -> bool:
        """Whether the end of a run is to be tested: not if its last update has just been."""
        every, applied = self.intervals.test, self.store.applied
        return every is not None and (applied > self.tests * every or applied % every > 0)

    def tested(self, samples: int | None = None) -> None:
        """A test of now is made, or was made at `samples`."""
        assert self.intervals.test is not None
        applied = self.store.applied if samples is None else samples
        self.tests = applied // self.intervals.test

    def save(self) -> bool:
        """Whether there is enough that no checkpoint has."""
        if self.intervals.save is None:
            return self.store.epoch > self.saved_epoch
        return self.store.version >= self.saved_version + self.intervals.save

    def saved(self) -> None:
        """A checkpoint has what there is now."""
        self.saved_version, self.saved_epoch = self.store.version, self.store.epoch

    def restore(self, tests: int) -> None:
        """The store goes on from a checkpoint, before which there were so many tests."""
        self.tests = tests
        self.saved()
