"""What a comparison says in plain words: who was first, by how much, and what that cost."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from offbeat.report.grid import Aim, CellGroup, Grid, Spread, speed, waiting
from offbeat.report.price import ended_better, gave_up, highest, listed, rather, strength, times
from offbeat.report.tables import in_links, rate, seconds, share, size, slow_links
from offbeat.report.words import counted

CLOSE = 1.05  # single runs that differ by less say nothing about which is faster


class Verdict(msgspec.Struct, frozen=True):
    """A headline, what stands behind it, and the winner if there is a clear one."""

    headline: str
    sentences: list[str]
    winner: str | None = None


def verdict(grid: Grid) -> Verdict:
    """Which discipline first reached and kept the target, and what it gave up for that."""
    groups = grid.on_most()
    if len({g.devices for g in groups}) > 1:
        groups = [replace(g, discipline=g.name) for g in groups]
    if not groups:
        return Verdict("Nothing to compare yet.", ["No run has come to a result."])
    if len(groups) == 1:
        return _alone(groups[0], grid)
    if len({d.virtual for g in groups for d in g.digests}) > 1:
        return Verdict(
            "Simulated and real runs: their seconds are not the same, so there is no winner.",
            ["Compare simulated runs with simulated ones, and real runs with real ones."],
        )
    aim = grid.aim()
    if aim is None:
        return _by_speed(groups)
    reached = [(g, time) for g in groups if (time := g.time_to(aim)) is not None]
    reached.sort(key=lambda pair: pair[1].mean)
    if not reached:
        return _nobody(groups, aim)
    found = _first(reached, aim, _where(groups))
    best = ended_better(groups, reached[0][0], aim.score)
    headline = found.headline
    if found.winner is not None and best is not None:
        # Being first is not all: a reader of the headline alone must know it.
        headline = f"{headline[:-1]}, but ended clearly worse than {best.discipline}."
    rest = [
        *highest(best, reached[0][0], aim.score),
        *_missed(groups, aim),
        *_fewer(grid, groups[0].devices, aim),
    ]
    return Verdict(headline, [*found.sentences, *rest, *_unreal(groups)], found.winner)


# ---------------------------------------------------------------- who was first


def _first(reached: Sequence[tuple[CellGroup, Spread]], aim: Aim, where: str) -> Verdict:
    winner, time = reached[0]
    baseline = _synchronous([g for g, _ in reached])
    tied = [g for g, other in reached if g is winner or not _clear(time, other)]
    if len(reached) == 1:
        headline = f"{winner.discipline} alone reached {aim}{where}, after {_time(time)}."
        return Verdict(headline, strength(winner), winner.discipline)
    if len(tied) > 1:
        return _tie(tied, reached, aim, where)
    second, its = reached[1]
    lead = f"{times(its.mean / time.mean)} as fast as the next, {second.discipline} ({_time(its)})"
    if winner is baseline:
        headline = (
            f"Synchronous is the better choice here: {winner.discipline} reached {aim.bare} first."
        )
        sentences = [
            f"{winner.discipline} reached {aim}{where} after {_spread(time)}, {lead}.",
            "Waiting for everybody cost less time than stale gradients did.",
        ]
    else:
        headline = f"{winner.discipline} reached {aim} first{where}."
        sentences = [f"It took {_spread(time)}, {lead}."]
        if baseline is not None and baseline is not second:
            its = next(t for g, t in reached if g is baseline)
            ratio = times(its.mean / time.mean)
            sentences.append(
                f"That is {ratio} as fast as synchronous training, {baseline.discipline} "
                f"({_time(its)})."
            )
    against = second if winner is baseline or baseline is None else baseline
    sentences += gave_up(winner, against, aim.score)
    sentences += [*rather(winner, baseline, aim.score), *strength(winner)]
    return Verdict(headline, sentences, winner.discipline)


def _clear(first: Spread, other: Spread) -> bool:
    """True when the difference is more than chance, as far as repeats can tell."""
    if first.count > 1 or other.count > 1:
        return first.apart(other)
    return other.mean > CLOSE * first.mean


def _tie(
    tied: Sequence[CellGroup], reached: Sequence[tuple[CellGroup, Spread]], aim: Aim, where: str
) -> Verdict:
    names = listed([g.discipline for g in tied])
    when = listed([f"{g.discipline} after {_spread(t)}" for g, t in reached if g in tied])
    repeated = any(len(g.digests) > 1 for g in tied)
    why = (
        "Their times lie within the spread of the repeats."
        if repeated
        else f"Their times differ by less than {100 * CLOSE - 100:.0f} %, and each ran once; "
        "--repeat 3 would show the spread."
    )
    headline = f"No clear winner on time to {aim}{where}: {names}."
    sentences = [f"They reached it together: {when}.", why]
    baseline = _synchronous([g for g, _ in reached])
    if baseline is not None and baseline in tied:
        sentences.append(
            f"Synchronous training, {baseline.discipline}, is among them and then the better "
            "choice: nothing in it is stale, and it is the simplest to reason about."
        )
    elif baseline is not None:
        its = next(t for g, t in reached if g is baseline)
        ratio = times(its.mean / reached[0][1].mean)
        sentences.append(
            f"The first of them is {ratio} as fast as synchronous training, {baseline.discipline} "
            f"({_time(its)})."
        )
        for group in tied:
            sentences += gave_up(group, baseline, aim.score)
    return Verdict(headline, sentences)


def _nobody(groups: Sequence[CellGroup], aim: Aim) -> Verdict:
    score = aim.score
    best = [(b, g) for g in groups for d in g.digests if (b := d.best(score.kind)) is not None]
    headline = f"No discipline reached {aim}{_where(groups)}."
    if not best:
        return Verdict(headline, ["No run was tested."])
    choose = max if score.higher else min
    found, group = choose(best, key=lambda pair: pair[0])
    sentences = [
        f"The {score.best} that was kept was {score.write(found)}, by {group.discipline}.",
        f"Train for more epochs, or compare at a {'lower' if score.higher else 'higher'} --target.",
    ]
    return Verdict(headline, [*sentences, *_missed(groups, aim, only_some=True)])


def _by_speed(groups: Sequence[CellGroup]) -> Verdict:
    """Without tests only speed can be compared, and being fast is not winning."""
    ranked = sorted(
        ((g, s) for g in groups if (s := g.span(speed)) is not None), key=lambda p: -p[1].mean
    )
    (first, fast), (second, slower) = ranked[:2]
    words = (
        f"{rate(fast.mean)} samples/s against {rate(slower.mean)} of the next, {second.discipline}."
    )
    note = (
        "No run was tested, so this says nothing about how well they learnt, and there is no "
        "winner: give the task a test set."
    )
    clear = fast.apart(slower) if fast.count > 1 or slower.count > 1 else True
    if not clear or fast.mean < CLOSE * slower.mean:
        headline = (
            f"{first.discipline} and {second.discipline} were about equally fast{_where(groups)}."
        )
        return Verdict(headline, [words, note, *_unreal(groups)])
    headline = f"{first.discipline} processed the most samples per second{_where(groups)}."
    return Verdict(headline, [words, note, *_unreal(groups)])


def _alone(group: CellGroup, grid: Grid) -> Verdict:
    """One discipline: there is nobody to compare it with, so it is described."""
    first = group.digests[0].summary
    so_far = "" if group.finished else " so far"
    score, aim, fast = grid.score(), grid.aim(), group.span(speed)
    final = group.final(score)
    assert fast is not None
    if final is not None and score is not None:
        headline = f"{group.name}: {score.told(score.write(final.mean))}{so_far}."
    elif first.train_loss is not None:
        headline = f"{group.name}: a training loss of {first.train_loss:.4f}{so_far}."
    else:
        headline = f"{group.name}{so_far}."
    sentences = [
        f"It processed {rate(fast.mean)} samples/s: {counted(first.samples, 'sample')} in "
        f"{seconds(first.seconds)} s."
    ]
    time = group.time_to(aim)
    if aim is not None and time is not None:
        sentences.append(f"It reached and kept {aim.bare} after {_time(time)}.")
    elif aim is not None:
        sentences.append(f"It did not reach and keep {aim.bare}.")
    wait = group.span(waiting)
    if wait is not None and first.workers > 1:
        sentences.append(
            f"Its workers spent {share(wait.mean)} of their time waiting, and gradients were "
            f"{first.staleness_mean:.1f} updates old on average."
        )
    if any(mine.link for mine in first.per_worker):
        sentences.append(
            f"{size(first.wire_bytes)} went over the wire, and {share(in_links(first))} of the "
            "workers' time into their links."
        )
        sentences += [f"{text[:1].upper()}{text[1:]}." for text in slow_links(first.per_worker)]
    return Verdict(headline, [*sentences, *strength(group), *_unreal([group])])


# ---------------------------------------------------------------- the others


def _missed(groups: Sequence[CellGroup], aim: Aim, only_some: bool = False) -> list[str]:
    """Who never reached the target, or only sometimes."""
    never = [_best(g, aim) for g in groups if g.reached(aim) == 0]
    some = [g for g in groups if 0 < g.reached(aim) < len(g.digests)]
    words = [
        f"{g.discipline} reached it in {g.reached(aim)} of {len(g.digests)} runs, "
        "and so is not ranked."
        for g in some
    ]
    return words if only_some or not never else [*words, f"Not reached by {listed(never)}."]


def _best(group: CellGroup, aim: Aim) -> str:
    score = aim.score
    levels = [b for d in group.digests if (b := d.best(score.kind)) is not None]
    if not levels:
        return group.discipline
    best = max(levels) if score.higher else min(levels)
    return f"{group.discipline} (at best {score.write(best)})"


def _fewer(grid: Grid, most: int, aim: Aim) -> list[str]:
    """Who was first on the other numbers of devices."""
    words = []
    for devices in grid.devices():
        here = [g for g in grid.groups() if g.devices == devices]
        reached = [(t.mean, g, t) for g in here if (t := g.time_to(aim)) is not None]
        if devices == most or len(here) < 2 or not reached:
            continue
        _, group, time = min(reached, key=lambda found: found[0])
        words.append(f"{group.discipline} on {devices} ({_time(time)})")
    return [f"First with other numbers of devices: {listed(words)}."] if words else []


def _unreal(groups: Sequence[CellGroup]) -> list[str]:
    digests = [d for g in groups for d in g.digests]
    if any(d.virtual for d in digests):
        return ["The cluster was simulated: seconds are virtual, scores are real."]
    if any(d.summary.emulated for d in digests):
        return ["Speeds were emulated: a step took at least the time that was set."]
    return []


# ---------------------------------------------------------------- words


def _synchronous(groups: Sequence[CellGroup]) -> CellGroup | None:
    """The baseline: bsp itself, or else bsp with backups."""
    names = [(g.digests[0].summary.discipline, g) for g in groups]
    plain = [g for name, g in names if name == "bsp"]
    return next(iter([*plain, *(g for name, g in names if name.startswith("bsp:"))]), None)


def _where(groups: Sequence[CellGroup]) -> str:
    counts = {g.devices for g in groups}
    return f" on {counted(counts.pop(), 'device')}" if len(counts) == 1 else ""


def _time(span: Spread) -> str:
    return f"{seconds(span.mean)} s"


def _spread(span: Spread) -> str:
    """A time with the least and the greatest of its repeats, if they differ."""
    if span.low == span.high:
        return _time(span)
    return f"{_time(span)} ({seconds(span.low)} to {seconds(span.high)} in {span.count} runs)"
