"""Five choices make a discipline; strings name it, and mistakes are explained."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.discipline.discipline import Discipline
from offbeat.discipline.named import ROWS, as_discipline, parse
from offbeat.discipline.parts import Weigh
from offbeat.errors import ConfigError

EXAMPLES = [
    ob.BSP(), ob.BSP(backup=1), ob.SoftSync(2), ob.SoftSync(3, ob.Constant()),
    ob.SoftSync(3, weigh=ob.Polynomial(0.25)), ob.SSP(3), ob.SSP(slack=0),
    ob.SSP(2, ob.Inverse()), ob.ASP(), ob.ASP(ob.Inverse()), ob.ASP(weigh=ob.Polynomial(1.5)),
    ob.ASP(ob.DelayCompensation(0.1)), ob.ASP(ob.AdaptiveDelayCompensation(1.0, 0.5)),
    ob.ASP(ob.GapAware()), ob.Downpour(), ob.Downpour(4, 2, lr=0.1), ob.Downpour(fetch=3),
    ob.ASUP(), ob.ASUP(slack=2, lr=0.05, momentum=0.5, rho=0.99), ob.Hogwild(),
    ob.Average(), ob.Average(1, "keep"), ob.Average(state="reset"), ob.LocalSGD(),
    ob.LocalSGD(4, state="average"), ob.BMUF(), ob.BMUF(8, 0.5, 0.9, nesterov=True),
    ob.BMUF(momentum=0.0), ob.EASGD(), ob.EASGD(5, alpha=0.1), ob.DiLoCo(),
    ob.DiLoCo(10, lr=1.0, momentum=0.0), ob.AsyncLocalSGD(), ob.AsyncLocalSGD(8, delay=3),
    ob.FedBuff(), ob.FedBuff(2, every=4, lr=0.5), ob.Gossip(), ob.BSP(backup=1, redo=True),
    ob.Ringmaster(4), ob.Ringmaster(1, weigh=ob.Inverse(), redo=True),
    ob.Rennala(4), ob.Rennala(1, redo=True),
]  # fmt: skip


@pytest.mark.parametrize("discipline", EXAMPLES, ids=str)
def test_every_named_row_reads_back_from_its_string(discipline: Discipline) -> None:
    text = str(discipline)
    assert parse(text) == discipline
    assert str(parse(text)) == text
    assert not text.startswith("custom")


def test_the_examples_cover_every_row() -> None:
    assert {str(example).partition(":")[0] for example in EXAMPLES} == set(ROWS)


@pytest.mark.parametrize(
    ("text", "value"),
    [("bsp", ob.BSP()), ("bsp:backup=1", ob.BSP(backup=1)), ("soft:2", ob.SoftSync(2)),
     ("ssp:3", ob.SSP(3)), ("ssp:slack=3", ob.SSP(3)), (" ssp: 3 ", ob.SSP(3)),
     ("asp:weigh=inverse", ob.ASP(ob.Inverse())), ("asp:inverse", ob.ASP(ob.Inverse())),
     ("asp:weigh=poly(0.5)", ob.ASP(ob.Polynomial(0.5))),
     ("asp:weigh=dc-adaptive(strength=1.0,decay=0.9)",
      ob.ASP(ob.AdaptiveDelayCompensation(1.0, 0.9))),
     ("local:16", ob.LocalSGD(16)), ("bmuf:16,momentum=auto", ob.BMUF(16)),
     ("easgd:10", ob.EASGD(10)), ("diloco:100", ob.DiLoCo(100)), ("hogwild", ob.Hogwild()),
     ("ringmaster:8", ob.Ringmaster(8)), ("ringmaster:4,redo=yes", ob.Ringmaster(4, redo=True)),
     ("ringmaster:r=4,weigh=inverse", ob.Ringmaster(4, ob.Inverse())),
     ("rennala:6", ob.Rennala(6)), ("rennala:s=6,redo=yes", ob.Rennala(6, redo=True)),
     ("bsp:backup=1,redo=yes", ob.BSP(backup=1, redo=True)),
     ("downpour:push=2,fetch=4", ob.Downpour(2, 4)), ("fedbuff:4", ob.FedBuff(4))],
)  # fmt: skip
def test_strings_of_the_command_line(text: str, value: Discipline) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(ob.SSP(3), "ssp:3"), (ob.BSP(), "bsp"), (ob.BSP(backup=2), "bsp:backup=2"),
     (ob.ASP(ob.Inverse()), "asp:weigh=inverse"), (ob.SoftSync(2), "soft:2"),
     (ob.Downpour(1, 1), "downpour"), (ob.FedBuff(3, every=2), "fedbuff:3,every=2")],
)  # fmt: skip
def test_the_shortest_spelling_is_used(value: Discipline, text: str) -> None:
    assert str(value) == text


# ---------------------------------------------------------------- custom values

numbers = st.floats(0, 1e6, allow_nan=False)
fractions = st.floats(0, 1)
counts = st.integers(1, 50)
weighs: st.SearchStrategy[Weigh] = st.one_of(
    st.builds(ob.Constant),
    st.builds(ob.Inverse),
    st.builds(ob.Polynomial, numbers),
    st.builds(ob.DelayCompensation, numbers),
    st.builds(ob.AdaptiveDelayCompensation, numbers, fractions),
    st.builds(ob.GapAware, fractions),
)
rules = st.builds(
    ob.Rule,
    st.sampled_from(["sgd", "adagrad", "rms-momentum", "block-momentum", "delayed-nesterov"]),
    numbers,
    st.none() | fractions,
    st.booleans(),
    fractions,
    st.none() | counts,
)
states = st.sampled_from(["keep", "reset"])


@st.composite
def disciplines(draw: st.DrawFn) -> Discipline:
    barrier = draw(st.booleans())
    dropped = draw(st.integers(0, 5))
    redo = dropped > 0 and draw(st.booleans())
    limit = dropped - 1 if dropped else None
    gather: Any = ob.All(dropped, redo) if barrier else ob.Count(draw(counts), limit, redo)
    wait = 0 if barrier else draw(st.none() | st.integers(0, 20))
    kind = draw(st.sampled_from(["gradient", "accumulated", "change", "elastic", "in-place"]))
    send: Any = ob.Gradient()
    apply: Any = draw(st.builds(ob.Yours) | rules)
    if kind == "accumulated":
        fetch = draw(counts)
        send = ob.Accumulated(draw(st.integers(fetch, 60)), fetch)
    elif kind == "change":
        state = "average" if barrier and draw(st.booleans()) else draw(states)
        send, apply = ob.Change(draw(counts), state, draw(st.booleans())), draw(rules)
    elif kind == "elastic":
        send, apply = ob.Elastic(draw(counts), draw(st.none() | fractions)), draw(rules)
        gather, wait = ob.Count(1), None
    elif kind == "in-place":
        send = ob.InPlace()
        gather = gather if barrier else ob.Count(draw(counts))
    return Discipline(send, gather, wait, draw(weighs), apply)


@given(disciplines())
def test_custom_values_read_back_from_their_string(discipline: Discipline) -> None:
    assert parse(str(discipline)) == discipline


def test_replacing_a_choice_makes_the_custom_form() -> None:
    changed = dataclasses.replace(ob.SSP(3), weigh=ob.Inverse())
    assert str(changed).startswith("custom:")
    assert "wait=3" in str(changed)
    assert "weigh=inverse" in str(changed)
    assert parse(str(changed)) == changed


def test_replacing_a_choice_by_the_same_keeps_the_name() -> None:
    assert str(dataclasses.replace(ob.SSP(3), wait=3)) == "ssp:3"


def test_the_spelling_is_no_part_of_the_value() -> None:
    assert ob.ASP() == Discipline()
    assert hash(ob.ASP()) == hash(Discipline())
    assert ob.LocalSGD(4, "average") == ob.Average(4)


# ---------------------------------------------------------------- mistakes

WRONG = [
    ("sp", ["unknown discipline 'sp'", "did you mean", "bsp, soft, ssp, asp"]),
    ("", ["unknown discipline ''", "there are bsp"]),
    ("asp:weigh=invers", ["unknown weigh 'invers'", "did you mean 'inverse'", "poly, dc"]),
    ("ssp", ["slack is missing", "write ssp:slack=..."]),
    ("soft", ["s is missing", "write soft:s=..."]),
    ("ssp:-1", ["slack must be a whole number of at least 0, not -1"]),
    ("ssp:1.5", ["slack must be a whole number, not '1.5'"]),
    ("soft:0", ["s must be a whole number of at least 1, not 0"]),
    ("bsp:backup=-1", ["backup must be a whole number of at least 0, not -1"]),
    ("bsp:1", ["'1' has no place", "bsp takes backup", "write backup=1"]),
    ("ssp:3,4,5", ["'5' has no place", "ssp takes slack, weigh"]),
    ("ssp:slak=3", ["unknown 'slak'", "did you mean 'slack'"]),
    ("ssp:3,slack=3", ["'slack' is given twice"]),
    ("hogwild:1", ["'1' has no place", "hogwild takes no arguments"]),
    ("local:-4", ["h must be a whole number of at least 1, not -4"]),
    ("local:4,state=lose", ["state must be one of keep, average, reset, not 'lose'"]),
    ("downpour:lr=-0.1", ["lr must lie between 0 and inf, not -0.1"]),
    ("downpour:push=0", ["push must be a whole number of at least 1, not 0"]),
    ("easgd:alpha=2", ["alpha must lie between 0 and 1, not 2.0"]),
    ("diloco:momentum=nan", ["momentum must lie between 0 and 1, not nan"]),
    ("bmuf:nesterov=maybe", ["nesterov must be yes or no, not 'maybe'"]),
    ("async-local:delay=-2", ["delay must be a whole number of at least 1, not -2"]),
    ("asp:weigh=poly(0.5", ["brackets do not match"]),
    ("asp:weigh=poly(-1)", ["a must lie between 0 and inf, not -1.0"]),
    ("ringmaster", ["r is missing", "write ringmaster:r=..."]),
    ("ringmaster:0", ["r must be a whole number of at least 1, not 0"]),
    ("rennala:0", ["s must be a whole number of at least 1, not 0"]),
    ("bsp:redo=yes", ["redo is for what is dropped", "give backup as well"]),
    ("custom:gather=count(redo=yes)", ["redo is for what is dropped", "give limit as well"]),
    ("custom:gather=count(limit=-1)", ["limit must be a whole number of at least 0, not -1"]),
    ("custom:3", ["'3' is not a choice", "custom:send=...,gather=..."]),
    ("custom:sent=gradient", ["'sent' is not a choice"]),
    ("custom:gather=some", ["unknown gather 'some'", "there are all, count"]),
    ("custom:wait=-1", ["wait must be a whole number of at least 0, not -1"]),
    ("custom:wait=long", ["wait must be a whole number, not 'long'"]),
    ("custom:apply=rule", ["name is missing"]),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[text or "empty" for text, _ in WRONG])
def test_wrong_strings_say_what_is_wrong_and_what_exists(text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    for words in says:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("choices", "says"),
    [({"gather": ob.All()}, "wait must be 0"),
     ({"gather": ob.All(), "wait": 2}, "wait must be 0"),
     ({"wait": -1}, "wait must be a whole number of at least 0"),
     ({"send": ob.Elastic(), "gather": ob.Count(2), "apply": ob.Rule("sgd")},
      r"gather=Count\(1\)"),
     ({"send": ob.Elastic(), "wait": 1, "apply": ob.Rule("sgd")}, "use wait=None"),
     ({"send": ob.Change()}, "give the store a rule"),
     ({"send": ob.Elastic()}, "give the store a rule"),
     ({"send": ob.Accumulated(1, 2), "wait": 3}, "fetch to be at most push"),
     ({"send": ob.Change(4, "average"), "apply": ob.Rule("sgd")}, "needs gather=All"),
     ({"send": ob.InPlace(), "gather": ob.Count(1, limit=2)}, "leave limit out"),
     ({"send": ob.Elastic(), "gather": ob.Count(1, limit=2), "apply": ob.Rule("sgd")},
      r"gather=Count\(1\)")],
)  # fmt: skip
def test_choices_that_do_not_go_together(choices: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Discipline(**choices)


@pytest.mark.parametrize("value", [None, 3, ob.SSP])
def test_only_values_and_strings_are_disciplines(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"a value like ob\.SSP\(slack=3\) or a string"):
        as_discipline(value)


def test_a_value_is_a_discipline_as_it_is() -> None:
    value = ob.SSP(3)
    assert as_discipline(value) is value
    assert as_discipline("ssp:3") == value


# ---------------------------------------------------------------- numbers that depend on workers


def test_the_number_of_workers_fills_in_what_was_left_open() -> None:
    assert ob.EASGD().for_workers(4).send == ob.Elastic(10, 0.9 / 4)
    bmuf = ob.BMUF().for_workers(4).apply
    assert isinstance(bmuf, ob.Rule)
    assert bmuf.momentum == 1 - 1 / 4
    delayed = ob.AsyncLocalSGD().for_workers(5).apply
    assert isinstance(delayed, ob.Rule)
    assert delayed.delay == 5


def test_the_number_of_workers_leaves_given_numbers_alone() -> None:
    for given_value in (ob.EASGD(alpha=0.1), ob.BMUF(momentum=0.0), ob.AsyncLocalSGD(delay=2)):
        assert given_value.for_workers(4) == given_value


def test_filling_in_twice_changes_nothing_more() -> None:
    for example in EXAMPLES:
        once = example.for_workers(64)
        assert once.for_workers(64) == once
        assert parse(str(once)) == once


@pytest.mark.parametrize(
    ("discipline", "says"),
    [(ob.BSP(backup=4), "backup=4 leaves nobody .* with 4 workers use backup=3 or less"),
     (ob.BSP(backup=9), "use backup=3 or less"),
     (ob.SoftSync(5), "cannot gather 5 contributions from 4 workers: use 4 or less"),
     (ob.FedBuff(), "cannot gather 10 contributions from 4 workers")],
)  # fmt: skip
def test_more_than_the_workers_can_give(discipline: Discipline, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        discipline.for_workers(4)


def test_an_update_of_one_version_may_gather_more_than_there_are_workers() -> None:
    assert ob.Rennala(9).for_workers(4) == ob.Rennala(9)


def test_no_workers_at_all() -> None:
    with pytest.raises(ConfigError, match="workers must be at least 1, not 0"):
        ob.BSP().for_workers(0)


def test_what_the_properties_say() -> None:
    local = {str(e).partition(":")[0] for e in EXAMPLES if e.steps_locally}
    assert local == {
        "hogwild", "average", "local", "bmuf", "easgd", "diloco", "async-local", "fedbuff",
    }  # fmt: skip
    assert [e.drops for e in (ob.BSP(), ob.BSP(backup=1), ob.ASP())] == [False, True, False]
    assert [e.drops for e in (ob.Ringmaster(3), ob.Rennala(3))] == [True, True]


def test_the_rows_are_the_table() -> None:
    assert ob.BSP() == Discipline(ob.Gradient(), ob.All(), 0)
    assert ob.SSP(3) == Discipline(ob.Gradient(), ob.Count(1), 3)
    assert ob.SoftSync(2) == Discipline(ob.Gradient(), ob.Count(2), None, ob.Inverse())
    assert ob.Ringmaster(4).gather == ob.Count(1, limit=3)
    assert ob.Rennala(6, redo=True).gather == ob.Count(6, limit=0, redo=True)
    assert ob.Downpour(2, 3).apply == ob.Rule("adagrad", lr=0.01)
    assert ob.ASUP().weigh == ob.Inverse()
    assert ob.DiLoCo().apply == ob.Rule("sgd", lr=0.7, momentum=0.9, nesterov=True)
    assert ob.DiLoCo(momentum=0.0).apply == ob.Rule("sgd", lr=0.7)
    assert ob.FedBuff().weigh == ob.Polynomial(0.5)
    assert ob.BMUF().send == ob.Change(16, "reset")
