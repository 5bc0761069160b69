"""`Layout`: how many processes share a replica, which part each has, in which order they work."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from offbeat.config.text import nearest, read_value, split_arguments
from offbeat.errors import ConfigError

SCHEDULES = ("layers", "gpipe", "1f1b", "interleaved", "zero-bubble", "stash", "2bw")
ASYNCHRONOUS = ("stash", "2bw")
SPLITS = ("time", "parameters", "count")
PRECISIONS = ("float32", "bf16", "fp16")
_DEFAULT = "1f1b"
CHUNKS = 2  # stages of a process under `interleaved`, unless said: interleaved:3
JOIN = "+"  # between the names of a split


@dataclass(frozen=True)
class Layout:
    """How each replica is split over processes, as in `ob.Layout(pp=2, microbatches=8)`.

    `pp` processes share the blocks of a replica one after the other, `tp` share each of them.
    `split` says where: by measured `time`, by `parameters`, by `count`, or the names of the
    blocks with which the second stage and each one after it begin.
    """

    replicas: int = 1
    pp: int = 1
    tp: int = 1
    schedule: str = _DEFAULT
    microbatches: int | None = None
    split: str | Sequence[str] = "time"
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name in ("replicas", "pp", "tp"):
            _whole(name, getattr(self, name))
        if self.microbatches is not None:
            _whole("microbatches", self.microbatches)
        object.__setattr__(self, "split", _split(self.split))
        _one_of("precision", self.precision, PRECISIONS)
        self._check_schedule()
        self._check_microbatches()
        self._check_names()

    # ------------------------------------------------------------ figures

    @property
    def processes(self) -> int:
        """Of all replicas together."""
        return self.replicas * self.pp * self.tp

    @property
    def chunks(self) -> int:
        """Stages of each process: more than one only under `interleaved`."""
        word, colon, count = self.schedule.partition(":")
        return int(count) if colon else CHUNKS if word == "interleaved" else 1

    @property
    def stages(self) -> int:
        """Parts that the blocks of a replica are cut into."""
        return self.pp * self.chunks

    @property
    def pieces(self) -> int:
        """Microbatches of a step; unless given, as many as keep every stage in use."""
        if self.microbatches is not None:
            return self.microbatches
        return 1 if self.schedule in ("layers", "stash") else self.pp

    @property
    def asynchronous(self) -> bool:
        """Whether the next batches enter before the last one is through."""
        return self.schedule in ASYNCHRONOUS

    @property
    def under_way(self) -> int:
        """Batches that a replica has under way at once, so that no stage runs empty."""
        return 1 + -(-(self.pp - 1) // self.pieces) if self.asynchronous else 1

    def microbatch(self, batch_size: int) -> int:
        """Samples of one microbatch; a batch that does not divide is an error."""
        if batch_size < 1:
            raise ConfigError(f"the batch must have at least one sample, not {batch_size}")
        if batch_size % self.pieces:
            larger = self.pieces * (batch_size // self.pieces + 1)
            near = sorted(self._fitting(batch_size), key=lambda count: abs(count - self.pieces))
            other = f"microbatches={near[0]} or " if near else ""
            raise ConfigError(
                f"a batch of {batch_size} does not divide into {self.pieces} microbatches: "
                f"write {other}a batch size of {larger}"
            )
        return batch_size // self.pieces

    def _fitting(self, batch_size: int) -> list[int]:
        """Training of microbatches that both the batch and the schedule allow."""
        found = []
        for count in range(1, batch_size + 1):
            with suppress(ConfigError):
                if batch_size % count == 0:
                    found.append(replace(self, microbatches=count).pieces)
        return found

    # ------------------------------------------------------------ as text

    def __str__(self) -> str:
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_text(value)}")
        return ",".join(words) or "pp=1"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `pp=2,schedule=1f1b` back."""
        positional, named = split_arguments(text, text)
        takes = [field.name for field in fields(cls)]
        if positional:
            raise ConfigError(
                f"{text!r}: {positional[0]!r} has no name; write for example pp=2,microbatches=8"
            )
        for name in named:
            if name not in takes:
                raise ConfigError(
                    f"{text!r}: unknown {name!r}{nearest(name, takes)}; "
                    f"a layout takes {', '.join(takes)}"
                )
        values: dict[str, Any] = dict(named)
        for name, kind in (("replicas", int), ("pp", int), ("tp", int), ("microbatches", int)):
            if name in named:
                wanted = int | None if name == "microbatches" else kind
                values[name] = read_value(named[name], wanted, f"{text!r}: {name}")
        return cls(**values)

    # ------------------------------------------------------------ checks

    def _check_schedule(self) -> None:
        if not isinstance(self.schedule, str):
            raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}")
        word, colon, count = self.schedule.partition(":")
        _one_of("schedule", word, SCHEDULES)
        if colon and word != "interleaved":
            raise ConfigError(f"schedule={word} takes no number; write schedule={word}")
        if colon and (not count.isdecimal() or int(count) < 2):
            raise ConfigError(
                f"schedule={self.schedule}: each process needs 2 or more stages; "
                f"write schedule=interleaved:{CHUNKS}, or schedule=1f1b for one"
            )
        if word == "interleaved" and self.pp == 1:
            raise ConfigError(
                "schedule=interleaved needs two or more processes to alternate between; "
                "write pp=2, or leave the schedule out"
            )
        if word in ASYNCHRONOUS and self.pp == 1:
            raise ConfigError(
                f"schedule={word} keeps several stages busy, and pp=1 has one; write pp=2, or "
                "leave the schedule out"
            )

    def _check_microbatches(self) -> None:
        count, pp = self.pieces, self.pp
        word = self.schedule.partition(":")[0]
        if word == "layers" and count > 1:
            raise ConfigError(
                f"schedule=layers takes the batch whole, not in {count} microbatches: "
                "leave microbatches out, or write schedule=gpipe"
            )
        if word in ("1f1b", "zero-bubble", "2bw") and count < pp:
            raise ConfigError(
                f"schedule={word} with pp={pp} needs at least {pp} microbatches, not {count}: "
                f"write microbatches={pp}, or schedule={'stash' if word == '2bw' else 'gpipe'}"
            )
        if word == "interleaved" and count % pp:
            raise ConfigError(
                f"schedule={self.schedule} goes round in turns of pp={pp} microbatches, and "
                f"{count} is no multiple: write microbatches={pp * max(1, round(count / pp))}"
            )

    def _check_names(self) -> None:
        if isinstance(self.split, str):
            return
        needed = self.stages - 1
        if len(self.split) != needed:
            raise ConfigError(
                f"{self.stages} stages need {needed} names in split, the first block of each stage "
                f"but the first, and there are {len(self.split)}: "
                f"{JOIN.join(self.split) or 'none'}"
            )


def as_layout(value: Layout | str) -> Layout:
    """A layout, or what its string form says."""
    if isinstance(value, Layout):
        return value
    if isinstance(value, str):
        return Layout.parse(value)
    raise ConfigError(
        f"a layout must be an ob.Layout or a string such as 'pp=2,microbatches=8', "
        f"not {type(value).__name__}"
    )


def in_halves(value: Layout | str) -> Layout:
    """The layout of a script, which computes its loss between the passes of the whole batch.

    That is the order of GPipe, which is also what a layout without a schedule means there.
    """
    if isinstance(value, str) and "schedule=" not in value:
        layout = Layout.parse(f"{value},schedule=gpipe")
    else:
        layout = as_layout(value)
        if not isinstance(value, str) and layout.schedule == _DEFAULT:
            layout = replace(layout, schedule="gpipe")
    if layout.schedule not in ("layers", "gpipe"):
        raise ConfigError(
            f"schedule={layout.schedule} sends microbatches back before all have gone forward, "
            "and a script computes its loss when all have: write schedule=gpipe or layers, or "
            "use ob.train"
        )
    if layout.tp > 1:
        raise ConfigError(
            f"tp={layout.tp} does not work in scripts yet: write pp=, or use ob.train"
        )
    if layout.precision == "fp16":
        raise ConfigError(
            "precision=fp16 scales the loss, and a script computes its own: write precision=bf16, "
            "or use ob.train"
        )
    return layout


def replicas_of(
    layout: Layout | str | None, workers: int | None, described: bool = False
) -> int | None:
    """A worker is a replica, and a layout may say how many there are.

    If it does not, a cluster that is `described` says so.
    """
    if layout is None:
        return workers
    replicas = as_layout(layout).replicas
    if replicas == 1 and described:
        return workers
    if workers is not None and replicas not in (1, workers):
        raise ConfigError(
            f"workers={workers}, but the layout has replicas={replicas}: leave one of them out"
        )
    return replicas if workers is None else workers


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name} must be a whole number of at least 1, not {value!r}; write {name}=1"
        )


def _one_of(name: str, word: Any, known: Sequence[str]) -> None:
    if word not in known:
        hint = nearest(str(word), known)
        raise ConfigError(f"{name} must be one of {', '.join(known)}, not {word!r}{hint}")


def _split(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value in SPLITS:
            return value
        names = tuple(name.strip() for name in value.split(JOIN) if name.strip())
    else:
        names = tuple(value) if isinstance(value, Sequence) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"split must be one of {', '.join(SPLITS)} or names of blocks, not {value!r}"
        )
    return names


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    # A module may well be called `time`; a trailing sign tells its name from the word.
    lone = JOIN if len(value) == 1 and value[0] in SPLITS else ""
    return JOIN.join(value) + lone
