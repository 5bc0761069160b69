"""What goes wrong, by audience: a user's mistake names its remedy, a failed run names its cause."""


class OffbeatError(Exception):
    """Base of every error offbeat raises on purpose; `exit_code` is the command line's answer."""

    exit_code = 1


class ConfigError(OffbeatError, ValueError):
    """The request cannot be carried out as written; the message says what to write instead."""

    exit_code = 2


class RunError(OffbeatError):
    """The run started and could not go on; the message names worker, version and lease."""

    exit_code = 3


class CheckpointError(OffbeatError):
    """A run folder or checkpoint cannot be used; the message names the first thing wrong."""

    exit_code = 4


class ReplayMismatch(OffbeatError):
    """A replay arrived at other parameters than the log says."""

    exit_code = 5
