"""What the winner of a comparison gave up for being first, in plain words."""

from collections.abc import Sequence

from offbeat.report.grid import CellGroup, Spread, bytes_sent, efficiency, memory, staleness
from offbeat.report.score import Score
from offbeat.report.tables import share, size

POINTS = 0.001  # of accuracy; less is not worth a word
WORTH = 0.01  # of accuracy; so much may be worth more than time
LITTLE = 0.01  # of a loss or metric, as a share of it; less is not worth a word
MUCH = 0.05  # of a loss or metric, as a share of it; so much may be worth more than time
MORE = 1.02  # times the memory or the bytes; less is not worth a word
STALER = 0.05  # updates


def gave_up(winner: CellGroup, other: CellGroup, score: Score) -> list[str]:
    """What the winner is worse in than the other."""
    words: list[str] = []
    mine, its = winner.final(score), other.final(score)
    better = ""
    if mine is not None and its is not None and _differ(mine, its, score, POINTS, LITTLE):
        both = f"{score.write(mine.mean)} against {score.write(its.mean)}"
        if not score.better(its.mean, mine.mean):
            better = f" Its final {score.words} is {'higher' if score.higher else 'lower'}: {both}."
        elif score.kind == "accuracy":
            words.append(f"{100 * (its.mean - mine.mean):.1f} points of final accuracy ({both})")
        else:
            words.append(f"some of the final {score.words} ({both})")
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


def rather(winner: CellGroup, baseline: CellGroup | None, score: Score) -> list[str]:
    """When the last bit of the score matters more than the time, say who had it."""
    if baseline is None or baseline is winner or not clearly_worse(winner, baseline, score):
        return []
    return [f"Where final {score.words} matters more than time, synchronous is the better choice."]


def ended_better(groups: Sequence[CellGroup], winner: CellGroup, score: Score) -> CellGroup | None:
    """Who ended with the best score, if that is clearly better than the winner's."""
    finals = [(final.mean, g) for g in groups if (final := g.final(score)) is not None]
    choose = max if score.higher else min
    _, group = choose(finals, key=lambda pair: pair[0], default=(None, winner))
    return group if group is not winner and clearly_worse(winner, group, score) else None


def highest(best: CellGroup | None, winner: CellGroup, score: Score) -> list[str]:
    """Who ended above the winner, and with what."""
    if best is None:
        return []
    mine, its = winner.final(score), best.final(score)
    assert mine is not None
    assert its is not None
    return [
        f"The {score.best} final {score.words} was that of {best.discipline}: "
        f"{score.write(its.mean)} against {score.write(mine.mean)}."
    ]


def clearly_worse(one: CellGroup, other: CellGroup, score: Score) -> bool:
    """Whether one ended worse than the other by more than is worth a little time."""
    mine, its = one.final(score), other.final(score)
    if mine is None or its is None or not score.better(its.mean, mine.mean):
        return False
    return _differ(mine, its, score, WORTH, MUCH)


def _differ(mine: Spread, its: Spread, score: Score, points: float, part: float) -> bool:
    """Whether two differ by so many points of accuracy, or by so much of any other score."""
    scale = max(abs(mine.mean), abs(its.mean))
    if abs(mine.mean - its.mean) < (points if score.kind == "accuracy" else part * scale):
        return False
    return mine.apart(its) if mine.count > 1 or its.count > 1 else mine.mean != its.mean


def strength(group: CellGroup) -> list[str]:
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
