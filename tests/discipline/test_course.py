"""Courses: what may follow what, when a turn is due, at which rate, and their text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.discipline.course import Course, as_course, parse
from offbeat.errors import ConfigError

EXAMPLES = [
    ob.Switch("bsp", ob.Turn("asp", "25%")),
    ob.Switch("asp", ob.Turn("bsp", "80%", rate=0.5)),
    ob.Switch("bsp:backup=1,redo=yes", ob.Turn("asp:weigh=poly(0.5)", "v200")),
    ob.Switch("local:4,state=reset", ob.Turn("custom:send=change(every=4,state=reset),"
              "gather=count,apply=rule(sgd)", "12.5%")),
    ob.Switch("asp", ob.Turn("ssp:3", "10%"), ob.Turn("bsp", "v900", 2.0), ob.Turn("asp", "95%")),
    ob.Switch("local:4", ob.Turn("local:16", "10%")), ob.Switch("easgd", ob.Turn("easgd:2", "v5")),
    ob.Switch("downpour:push=4,fetch=2", ob.Turn("downpour:4,2", "5%")),
]  # fmt: skip


@pytest.mark.parametrize("course", EXAMPLES, ids=str)
def test_every_course_reads_back_from_its_string(course: Course) -> None:
    assert parse(str(course)) == course
    bare = str(course).removeprefix("switch:")
    assert parse(f"switch:({bare})") == course
    assert str(as_course(course)) == str(course)


def test_one_discipline_is_the_simplest_course() -> None:
    assert as_course("ssp:3") == as_course(ob.SSP(3)) == Course(ob.SSP(3))
    assert str(as_course("ssp:3")) == "ssp:3"
    assert as_course(ob.BSP()).stages == (ob.BSP(),)
    assert ob.parse("ssp:3") == ob.SSP(3)


def test_words_belong_to_the_discipline_before_them() -> None:
    text = "switch:bsp:backup=1,redo=yes,ringmaster:4,redo=yes,at=25%,rate=0.3,asp,at=v9"
    assert parse(text) == ob.Switch(
        ob.BSP(backup=1, redo=True),
        ob.Turn(ob.Ringmaster(4, redo=True), "25%", 0.3),
        ob.Turn(ob.ASP(), "v9"),
    )


# ---------------------------------------------------------------- when, and at which rate


def test_a_turn_is_due_at_its_share_or_version() -> None:
    quarter, later = ob.Turn("asp", "25%"), ob.Turn("asp", "v200")
    assert [quarter.due(1, done, 100) for done in (24, 25, 26)] == [False, True, True]
    assert [later.due(version, 0, 100) for version in (199, 200, 201)] == [False, True, True]
    assert (quarter.why, later.why) == ("25 % of the work is done", "version 200 is reached")


@pytest.mark.parametrize(
    ("course", "rates"),
    [("switch:bsp,asp,at=25%", [0.25]), ("switch:asp,bsp,at=25%", [4.0]),
     ("switch:bsp,soft:2,at=5%,asp,at=10%", [0.5, 0.25]), ("switch:asp,ssp:3,at=5%", [1.0]),
     ("switch:bsp:backup=1,asp,at=5%", [1 / 3]), ("switch:asp,rennala:6,at=5%", [6.0]),
     ("switch:bsp,asp,at=5%,rate=0.4,soft:2,at=9%", [0.4, 0.5]),
     ("switch:local:2,custom:send=change(every=2),gather=count,apply=rule(sgd),at=5%", [1.0])],
)  # fmt: skip
def test_a_rate_is_as_large_as_an_update_unless_it_is_given(
    course: str, rates: list[float]
) -> None:
    assert [turn.rate for turn in as_course(course).for_workers(4).turns] == rates


def test_numbers_that_depend_on_workers_are_filled_in_and_checked() -> None:
    filled = as_course("switch:easgd:4,easgd:4,at=5%").for_workers(3)
    assert [one.send for one in filled.stages] == [ob.Elastic(4, 0.3)] * 2
    with pytest.raises(ConfigError, match="cannot gather 5 contributions from 4 workers"):
        as_course("switch:asp,soft:5,at=5%").for_workers(4)


@given(st.integers(1, 400), st.integers(1, 6))
def test_how_many_versions_a_course_makes(leases: int, workers: int) -> None:
    assert as_course("asp").versions(leases, workers) == leases
    assert as_course("switch:asp,asp,at=v7").versions(leases, workers) == leases
    lock = as_course("bsp").versions(leases, workers)
    mixed = as_course("switch:bsp,asp,at=50%").versions(leases, workers)
    assert lock <= mixed <= leases


def test_versions_of_a_switch() -> None:
    assert as_course("switch:local:5,local:10,at=50%").versions(400, 4) == 10 + 5
    assert as_course("switch:bsp,asp,at=25%").versions(400, 4) == 25 + 300
    assert as_course("switch:bsp,asp,at=v10").versions(400, 4) == 10 + 360
    assert as_course("switch:bsp,asp,at=v900").versions(400, 4) == 100


def test_whether_anything_is_ever_dropped() -> None:
    assert not as_course("switch:bsp,asp,at=5%").drops
    assert as_course("switch:bsp,rennala:2,at=5%").drops


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("text", "says"),
    [("switch:bsp,asp", ["does not say when asp begins", "switch:(bsp,asp,at=25%)"]),
     ("switch:bsp", ["has no turn", "write switch:bsp,asp,at=25%"]),
     ("switch:", ["'' is no discipline"]),
     ("switch:bps,asp,at=5%", ["'bps' is no discipline", "did you mean 'bsp'"]),
     ("switch:bsp,at=5%,asp", ["does not say when asp begins"]),
     ("switch:bsp,at=5%,asp,at=6%", ["what a run begins with has no at"]),
     ("switch:bsp,asp,at=5%,at=6%", ["at of asp is given twice"]),
     ("switch:bsp,asp,at=5%,aps,at=6%", ["'aps' is no discipline"]),
     ("switch:bsp,asp,at=0.25", ["write a share of the work, at=25%, or a version"]),
     ("switch:bsp,asp,at=100%", ["between 0 % and 100 %"]),
     ("switch:bsp,asp,at=v0", ["must be a whole number of at least 1, not 0"]),
     ("switch:bsp,asp,at=half%", ["must be a number"]),
     ("switch:bsp,asp,at=5%,rate=-1", ["rate must lie between 0 and inf"]),
     ("switch:bsp,asp,at=50%,ssp:3,at=20%", ["at=20% comes after at=50%", "in order"]),
     ("switch:bsp,asp,at=v9,ssp:3,at=v9", ["at=v9 comes after at=v9"]),
     ("switch:local:4,local:4,state=reset,at=5%", ["do not send the same"]),
     ("switch:downpour,downpour:push=2,at=5%", ["do not send the same"]),
     ("switch:easgd:alpha=0.1,easgd:alpha=0.2,at=5%", ["do not send the same"]),
     ("switch:bsp,local:4,at=5%", ["do not send the same", "a second run with start="]),
     ("switch:asp,gossip,at=5%", ["under gossip workers have the parameters to themselves"]),
     ("switch:hogwild,asp,at=5%", ["under hogwild workers have the parameters"]),
     ("switch:asp,asup,at=5%", ["asp and asup have different rules"]),
     ("switch:asp,asp:weigh=dc,at=5%", ["compares with copies from the beginning on"]),
     ("switch:bsp,soft:0,at=5%", ["s must be a whole number of at least 1"])],
)  # fmt: skip
def test_wrong_courses_say_what_is_wrong(text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    for words in says:
        assert words in str(caught.value)


@pytest.mark.parametrize("turns", [(), ("asp",), (ob.ASP(),)])
def test_a_switch_is_made_of_turns(turns: Any) -> None:
    with pytest.raises(ConfigError, match=r"ob\.Switch\('bsp', ob\.Turn\('asp', at='25%'\)\)"):
        ob.Switch("bsp", *turns)
