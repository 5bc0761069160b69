"""What a user passes by keyword: names that are known, and values of the right kind."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from offbeat.codec import Codec
from offbeat.config.checks import at_least, yes_or_no
from offbeat.config.text import nearest
from offbeat.data.shares import Shares
from offbeat.errors import ConfigError
from offbeat.rules.schedule import Schedule
from offbeat.rules.updater import Clip

# Where an option of a script belongs that `join` does not take.
ELSEWHERE = {
    **dict.fromkeys(("workers", "engine", "cluster", "emulate", "watch"), "offbeat run --{}"),
    **dict.fromkeys(("address", "placement", "tls"), "offbeat run --engine ray --{}"),
    **dict.fromkeys(
        ("batch_size", "epochs", "shuffle", "collate", "drop_last"), "run.batches(..., {}=...)"
    ),
    **dict.fromkeys(("schedule", "clip", "groups", "constrain"), "run.optimizer(..., {}=...)"),
}


def check_names(given: Iterable[str], known: Iterable[str], what: str = "unknown option") -> None:
    """Refuse a name that is not among all that are known, with the nearest of them."""
    names = list(known)
    for key in given:
        if key not in names:
            raise ConfigError(
                f"{what} {key!r}{nearest(key, names)}; there are {', '.join(sorted(names))}"
            )


def check_join(given: Iterable[str], known: Iterable[str]) -> None:
    """The same for `join`, which has fewer: many of a script's settings have another place."""
    names = list(known)
    for key in given:
        if key in ELSEWHERE:
            raise ConfigError(f"join has no {key!r}: write {ELSEWHERE[key].format(key)}")
        if key not in names:
            hint = nearest(key, [*names, *ELSEWHERE])
            raise ConfigError(f"join has no {key!r}{hint}; it takes {', '.join(names)}")


def check_kinds(given: Mapping[str, Any]) -> None:
    """Refuse a value that is of another kind than its option takes."""
    for name, value in given.items():
        if name in _COUNTS:
            if value is not None:
                at_least(name, value, 1)
        elif name in _SWITCHES:
            if not (value is None and name == "prefetch"):
                yes_or_no(name, value)
        elif name in _KINDS:
            right, remedy = _KINDS[name]
            if not right(value):
                raise ConfigError(f"{name} cannot be {value!r}: {remedy}")


_COUNTS = ("evaluate_every", "checkpoint_every", "hash_every", "threads")
_SWITCHES = ("shuffle", "drop_last", "overlap", "prefetch", "verify", "watch", "resume")


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kinds)


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _function(value: Any) -> bool:
    return value is None or callable(value)


def _listeners(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(hasattr(one, "see") for one in value)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "codec": (_is(str, Codec), "write text such as 'topk:0.01', or a value of ob.codec"),
    "pull_codec": (_is(str, Codec), "write text such as 'int8', or a value of ob.codec"),
    "shares": (
        _is(str, list, tuple, Shares),
        "write 'speed', or a number for each worker, as in [1, 2, 4]",
    ),
    "schedule": (_is(Schedule), "write ob.Schedule(factory)"),
    "clip": (_is(Clip), "write ob.Clip(norm=1.0)"),
    "policies": (
        lambda value: isinstance(value, Mapping),
        "write names and policies, as in {'*.running_mean': 'averaged'}",
    ),
    "groups": (_function, "pass a function that takes the model"),
    "collate": (_function, "pass a function that takes a list of samples"),
    "listeners": (_listeners, "pass a list of ob.Listener"),
    "device": (_is(str, list, tuple), "write 'cuda:0', 'cuda:0,cuda:1', 'auto' or 'cpu'"),
    "test_device": (_is(str), "write 'cuda:0' or 'cpu'"),
    "out": (_is(str, Path), "name a folder"),
    "token": (_is(str, Path), "name the file that has it, or a variable, as in '$RUN_TOKEN'"),
    "start": (_is(str, Path), "name the folder of a run"),
    "address": (_is(str), "write auto, or a host and a port, as in '192.168.1.5:6379'"),
    "worker_resources": (
        lambda value: value is None or isinstance(value, Mapping),
        "write what each worker needs, as in {'CPU': 1, 'GPU': 1}",
    ),
    "wait": (_seconds, "write seconds, as in wait=600"),
    "tls": (_is(bool), "write True, False, or None for links that leave the machine"),
    "origin": (lambda value: isinstance(value, Mapping), "pass a mapping"),
}
