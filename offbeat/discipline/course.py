"""A course says which discipline holds when: one throughout, or others from some version on."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from offbeat.config.checks import at_least, within
from offbeat.config.text import nearest, read_value
from offbeat.discipline import named
from offbeat.discipline.discipline import Discipline
from offbeat.discipline.named import ROWS, as_discipline
from offbeat.errors import ConfigError

_EXAMPLE = "switch:bsp,asp,at=25%"


@dataclass(frozen=True)
class Turn:
    """Another discipline `at` a share of the work ("25%") or a version ("v200"), and its rate.

    `rate` multiplies the learning rate that the optimiser and its schedule have. Left out, it is
    as large as an update is beside one of the first discipline: the number of contributions that
    it gathers, over the number that the first gathers.
    """

    discipline: Discipline | str
    at: str
    rate: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "discipline", as_discipline(self.discipline))
        text = str(self.at).strip()
        object.__setattr__(self, "at", text)
        if self.rate is not None:
            within("rate", self.rate, 0.0, float("inf"))
        if text.endswith("%"):
            share = read_value(text[:-1], float, f"at={text}")
            if not 0 < share < 100:
                raise ConfigError(f"at={text}: a turn is made between 0 % and 100 % of the work")
        elif text.startswith("v"):
            at_least("the version in at=", read_value(text[1:], int, f"at={text}"), 1)
        else:
            raise ConfigError(f"at={text}: write a share of the work, at=25%, or a version, v200")

    @property
    def to(self) -> Discipline:
        """What holds from then on."""
        assert isinstance(self.discipline, Discipline)
        return self.discipline

    @cached_property
    def share(self) -> float | None:
        """How much of the work is to be done before, if it is a share of it."""
        return float(self.at[:-1]) / 100 if self.at.endswith("%") else None

    @cached_property
    def version(self) -> int:
        """The version to be reached before; 0 if it is not one."""
        return 0 if self.at.endswith("%") else int(self.at[1:])

    def due(self, version: int, done: int, samples: int) -> bool:
        """Whether it is time, with `done` of all `samples` dealt with."""
        return version >= self.version if self.share is None else done >= self.share * samples

    @property
    def why(self) -> str:
        """Why it is made then, in words."""
        if self.share is None:
            return f"version {self.version} is reached"
        return f"{self.at[:-1]} % of the work is done"

    def __str__(self) -> str:
        rate = "" if self.rate is None else f",rate={self.rate!r}"
        return f"{self.discipline},at={self.at}{rate}"


@dataclass(frozen=True)
class Course:
    """What a run begins with, and its turns in order; without any, one discipline throughout.

    A turn is made right after an update, which has taken all that was gathered. What workers send
    and what the store applies stay the same, so nothing that a worker or a rule keeps is lost;
    how often they send it may change.
    """

    first: Discipline
    turns: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        before: Turn | None = None
        for turn in self.turns:
            _check_pair(self.first, turn.to)
            if before is not None:
                _check_order(before, turn)
            before = turn

    @property
    def stages(self) -> tuple[Discipline, ...]:
        """Everything that holds at some time."""
        return (self.first, *(turn.to for turn in self.turns))

    @property
    def drops(self) -> bool:
        """Whether late contributions are dropped by design at some time."""
        return any(one.drops for one in self.stages)

    def for_workers(self, workers: int) -> "Course":
        """The same with every number that depends on `workers` filled in and checked."""
        turns = [
            dataclasses.replace(
                turn, discipline=turn.to.for_workers(workers), rate=self._rate(turn, workers)
            )
            for turn in self.turns
        ]
        return Course(self.first.for_workers(workers), tuple(turns))

    def _rate(self, turn: Turn, workers: int) -> float:
        if turn.rate is not None:
            return turn.rate
        if self.first.steps_locally:  # what is applied is a change, which has its rate already
            return 1.0
        return turn.to.gather.together(workers) / self.first.gather.together(workers)

    def versions(self, leases: int, workers: int) -> int:
        """About how many updates so many `leases` make, if nobody is lost."""
        made, begun = 0, 0  # updates, and leases that they took
        ends = [*self.turns, None]
        for one, turn in zip(self.stages, ends, strict=True):
            each = one.gather.together(workers) * one.send.local_steps
            left = leases - begun
            if turn is not None and turn.share is not None:
                left = max(0, math.ceil(turn.share * leases) - begun)
            elif turn is not None:
                left = min(left, max(0, turn.version - made) * each)
            made += -(-left // each)
            begun += left
        return made

    def __str__(self) -> str:
        if not self.turns:
            return str(self.first)
        return f"switch:{self.first},{','.join(str(turn) for turn in self.turns)}"


def _check_pair(first: Discipline, other: Discipline) -> None:
    """Refuse what cannot follow each other in one run."""
    why = ""
    if any(one.pairs or one.send.in_place for one in (first, other)):
        own = first if first.pairs or first.send.in_place else other
        why = f"under {own} workers have the parameters to themselves"
    elif first.send.lasting != other.send.lasting:
        why = f"{first} and {other} do not send the same"
    elif first.apply != other.apply:
        why = f"{first} and {other} have different rules, which keep different things"
    elif first.weigh != other.weigh and (first.weigh.elementwise or other.weigh.elementwise):
        why = "a weighing that looks at elements compares with copies from the beginning on"
    if why:
        raise ConfigError(
            f"no turn is made from {first} to {other}: {why}; use disciplines of the same send, "
            "apply and such a weighing, or a second run with start="
        )


def _check_order(before: Turn, turn: Turn) -> None:
    early = before.share is not None and turn.share is not None and turn.share <= before.share
    if early or (before.version and turn.version and turn.version <= before.version):
        raise ConfigError(f"at={turn.at} comes after at={before.at}: turns are listed in order")


def Switch(first: Discipline | str, *turns: Turn) -> Course:  # noqa: N802
    """Begin with one discipline, and turn to others while the run goes on."""
    if not turns:
        raise ConfigError(f"a switch needs a turn, as in ob.Switch('bsp', {_TURN})")
    for turn in turns:
        if not isinstance(turn, Turn):
            raise ConfigError(f"{turn!r} is no turn: write ob.Switch('bsp', {_TURN})")
    return Course(as_discipline(first), turns)


_TURN = "ob.Turn('asp', at='25%')"

# ---------------------------------------------------------------- text


def parse(text: str) -> Discipline | Course:
    """Read a discipline, or a switch between several: `switch:bsp,asp,at=25%`."""
    word, _, rest = text.strip().partition(":")
    return _parse_switch(rest.strip(), text) if word == "switch" else named.parse(text)


def _parse_switch(rest: str, text: str) -> Course:
    if rest.startswith("(") and rest.endswith(")"):  # in a list, brackets say where it ends
        rest = rest[1:-1]
    stages: list[str] = []
    told: list[dict[str, str]] = []  # at and rate of each
    for word in (word.strip() for word in rest.split(",")):
        key, equals, value = word.partition("=")
        if word.partition(":")[0] in (*ROWS, "custom"):
            stages.append(word)
            told.append({})
        elif not stages:
            raise ConfigError(
                f"{text!r}: {word!r} is no discipline{nearest(word, ROWS)}; write {_EXAMPLE}"
            )
        elif equals and key.strip() in ("at", "rate"):
            if key.strip() in told[-1]:
                raise ConfigError(f"{text!r}: {key} of {stages[-1]} is given twice")
            told[-1][key.strip()] = value.strip()
        elif told[-1]:
            raise ConfigError(f"{text!r}: {word!r} is no discipline; write {_EXAMPLE}")
        else:
            stages[-1] += f",{word}"
    turns = []
    for stage, mine in zip(stages[1:], told[1:], strict=True):
        if "at" not in mine:
            raise ConfigError(
                f"{text!r} does not say when {stage} begins: write {_EXAMPLE}, and in a list "
                "switch:(bsp,asp,at=25%)"
            )
        rate = read_value(mine["rate"], float, f"{text!r}: rate") if "rate" in mine else None
        turns.append(Turn(named.parse(stage), mine["at"], rate))
    if not turns or told[0]:
        raise ConfigError(
            f"{text!r}: what a run begins with has no {'/'.join(told[0]) or 'turn'}: "
            f"write {_EXAMPLE}, and in a list switch:(bsp,asp,at=25%)"
        )
    return Course(named.parse(stages[0]), tuple(turns))


def as_course(value: Discipline | Course | str) -> Course:
    """A course as it is, of one discipline throughout, or read from its string form."""
    found = parse(value) if isinstance(value, str) else value
    return found if isinstance(found, Course) else Course(as_discipline(found))
