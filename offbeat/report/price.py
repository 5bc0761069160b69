"""What the winner of a comparison gave up for being first, in plain words."""

from collections.abc import Sequence

from offbeat.report.grid import Group, Span, accuracy, bytes_sent, efficiency, memory, staleness
from offbeat.report.tables import percent, share, size

POINTS = 0.001  # of accuracy; less is not worth a word
WORTH = 0.01  # of accuracy; so much may be worth more than time
MORE = 1.02  # times the memory or the bytes; less is not worth a word
STALER = 0.05  # updates


def gave_up(winner: Group, other: Group) -> list[str]:
    """What the winner is worse in than the other."""
    words: list[str] = []
    mine, its = winner.span(accuracy), other.span(accuracy)
    better = ""
    if mine is not None and its is not None and _differ(mine, its, POINTS):
        both = f"{percent(mine.mean)} against {percent(its.mean)}"
        if mine.mean < its.mean:
            words.append(f"{100 * (its.mean - mine.mean):.1f} points of final accuracy ({both})")
        else:
            better = f" Its final accuracy is higher: {both}."
    for figure, noun in ((memory, "memory per worker"), (bytes_sent, "bytes sent")):
        mine, its = winner.span(figure), other.span(figure)
        if mine is not None and its is not None and its.mean and mine.mean > MORE * its.mean:
            both = f"{size(mine.mean)} against {size(its.mean)}"
            words.append(f"{times(mine.mean / its.mean)} the {noun} ({both})")
    mine, its = winner.span(staleness), other.span(staleness)
    if mine is not None and its is not None and mine.mean > its.mean + STALER:
        both = f"{mine.mean:.1f} updates old on average, not {its.mean:.1f}"
        words.append(f"freshness (its gradients were {both})")
    if not words:
        return [
            f"Against {other.discipline}, {winner.discipline} gave up nothing measured.{better}"
        ]
    return [f"Against {other.discipline}, {winner.discipline} gave up {listed(words)}.{better}"]


def rather(winner: Group, baseline: Group | None) -> list[str]:
    """When the last point of accuracy matters more than the time, say who had it."""
    if baseline is None or baseline is winner:
        return []
    mine, its = winner.span(accuracy), baseline.span(accuracy)
    if (
        mine is None
        or its is None
        or its.mean - mine.mean < WORTH
        or not _differ(mine, its, POINTS)
    ):
        return []
    return ["Where final accuracy matters more than time, synchronous is the better choice."]


def highest(groups: Sequence[Group], winner: Group) -> list[str]:
    """Who ended above the winner, if that is not by chance."""
    mine = winner.span(accuracy)
    finals = [(final, g) for g in groups if (final := g.span(accuracy)) is not None]
    best, group = max(finals, key=lambda pair: pair[0].mean, default=(None, winner))
    if mine is None or best is None or group is winner or best.mean - mine.mean < WORTH:
        return []
    if not _differ(mine, best, POINTS):
        return []
    return [
        f"The highest final accuracy was that of {group.discipline}: {percent(best.mean)} "
        f"against {percent(mine.mean)}."
    ]


def _differ(mine: Span, its: Span, least: float) -> bool:
    if abs(mine.mean - its.mean) < least:
        return False
    return mine.apart(its) if mine.count > 1 or its.count > 1 else True


def strength(group: Group) -> list[str]:
    """How much of what the devices could do it made use of."""
    share_of = group.span(efficiency)
    if share_of is None:
        return []
    return [
        f"{group.discipline} ran at {share(share_of.mean)} of the speed that its devices would "
        "have if they computed all the time."
    ]


def times(ratio: float) -> str:
    digits = 2 if ratio < 2 else 1 if ratio < 10 else 0
    return f"{ratio:.{digits}f} times"


def listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
