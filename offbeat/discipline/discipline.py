"""A discipline is one value made of five choices."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from offbeat.config.checks import at_least
from offbeat.config.text import Choice
from offbeat.discipline.parts import (
    APPLIES,
    GATHERS,
    RULES,
    SENDS,
    WEIGHS,
    Apply,
    Constant,
    Count,
    Gather,
    Gradient,
    Send,
    Weigh,
    Yours,
)
from offbeat.errors import ConfigError

Choices = tuple[Send, Gather, int | None, Weigh, Apply]


@dataclass(frozen=True)
class Discipline:
    """How workers and store keep step; `wait=None` lets a worker run any number of steps ahead."""

    send: Send = field(default_factory=Gradient)
    gather: Gather = field(default_factory=Count)
    wait: int | None = None
    weigh: Weigh = field(default_factory=Constant)
    apply: Apply = field(default_factory=Yours)
    # How its named row spells it, and the choices that are spelled so: `replace` may change them.
    spelled: tuple[str, Choices] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for family in (SENDS, GATHERS, WEIGHS, APPLIES):
            _check_kind(family, getattr(self, family.what))
        if self.wait is not None:
            at_least("wait", self.wait, 0)
        send, gather = self.send, self.gather
        if gather.barrier and self.wait != 0:
            raise ConfigError(
                "gathering from all workers is a barrier, so wait must be 0; "
                "use Count(k) to gather without one"
            )
        if send.in_place and gather.limit is not None:
            raise ConfigError(
                "workers that write in place send nothing that could be dropped: leave limit out"
            )
        if send.centre and gather != Count(1):
            raise ConfigError(
                "the elastic difference is exchanged one worker at a time: use gather=Count(1)"
            )
        plain = (self.wait, self.weigh, self.apply) == (None, Constant(), Yours())
        if gather.pairs and not (send.each_gradient and plain):
            raise ConfigError(
                "workers that meet in pairs apply their own gradients with your optimiser and "
                "never wait: use send=Gradient() and leave wait, weigh and apply out"
            )
        if send.steps_locally and not send.in_place and self.apply.rule is None:
            raise ConfigError(
                "a worker that makes local steps already uses your optimiser; "
                "give the store a rule, for example apply=Rule('sgd', lr=1.0) to add the change"
            )
        if self.wait is not None and send.centre:
            raise ConfigError("the elastic exchange never waits: use wait=None")
        if self.wait is not None and send.fetch > send.local_steps:
            raise ConfigError("waiting happens at a pull, so it needs fetch to be at most push")
        if send.averages_state and not gather.barrier:
            raise ConfigError("averaging the updater's state needs gather=All()")

    @property
    def choices(self) -> Choices:
        """All five."""
        return self.send, self.gather, self.wait, self.weigh, self.apply

    @property
    def steps_locally(self) -> bool:
        """Whether the user's optimiser works at the worker rather than at the store."""
        return self.send.steps_locally

    @property
    def brings_rule(self) -> bool:
        """Whether gradients are applied by a rule of the discipline's own, not the user's."""
        return self.apply.rule is not None and not self.send.steps_locally

    @property
    def descends(self) -> str:
        """What the store's rule is given: what it keeps of one means nothing for another."""
        return self.send.descends

    @property
    def pairs(self) -> bool:
        """Whether workers have parameters of their own and meet in pairs."""
        return self.gather.pairs

    @property
    def drops(self) -> bool:
        """Whether late contributions are dropped by design."""
        return self.gather.limit is not None

    @property
    def ordered(self) -> bool:
        """Whether updates have an order, in which they can be hashed, simulated and replayed."""
        return not self.send.in_place

    def check_order(self) -> None:
        """Refuse a discipline whose updates have no order to be simulated or replayed in."""
        if not self.ordered:
            raise ConfigError(
                "hogwild writes shared memory in place, which can be neither simulated nor "
                "replayed: use engine='local', or asp, the nearest discipline that keeps a log"
            )

    def for_workers(self, workers: int) -> "Discipline":
        """The same discipline with every number that depends on `workers` filled in and checked."""
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, not {workers}")
        if self.gather.backup >= workers:
            raise ConfigError(
                f"backup={self.gather.backup} leaves nobody to gather from: "
                f"with {workers} workers use backup={workers - 1} or less"
            )
        if self.gather.k > workers and self.gather.limit != 0:  # of one version any number may be
            raise ConfigError(
                f"an update cannot gather {self.gather.k} contributions from {workers} workers: "
                f"use {workers} or less, or more workers"
            )
        send, apply = self.send.for_workers(workers), self.apply.for_workers(workers)
        return dataclasses.replace(self, send=send, apply=apply)

    def __str__(self) -> str:
        if self.spelled is not None and self.spelled[1] == self.choices:
            return self.spelled[0]
        wait = "inf" if self.wait is None else str(self.wait)
        parts = {
            "send": SENDS.text(self.send),
            "gather": GATHERS.text(self.gather),
            "wait": wait,
            "weigh": WEIGHS.text(self.weigh),
            "apply": APPLIES.text(self.apply),
        }
        return "custom:" + ",".join(f"{key}={value}" for key, value in parts.items())


def _check_kind(family: Choice, value: Any) -> None:
    """Refuse what is not a value of the family; a function would have no name in a log."""
    if type(value) in family.words:
        return
    kinds = list(family.kinds.values())
    example = f"ob.{kinds[1].__name__}({repr(RULES[0]) if family is APPLIES else ''})"
    if isinstance(value, type) and value in kinds:
        raise ConfigError(
            f"{family.what}={value.__name__} is a class: write {family.what}=ob.{value.__name__}()"
        )
    names = ", ".join(kind.__name__ for kind in kinds)
    why = " (a function cannot be written to a log and replayed)" if callable(value) else ""
    raise ConfigError(
        f"{family.what} must be one of {names}, as in {family.what}={example}, not {value!r}{why}"
    )
