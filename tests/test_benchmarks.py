"""The judgement of a measured figure, and the table and JSON that show it."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.figure import Figure, Peer, quantity
from benchmarks.table import WIDTH, as_json, table, verdict

FAST = Figure("exchange over the limit", 1.2, "x", at_most=1.25)
SLOW = replace(FAST, value=1.3)


def shown(*figures: Figure) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(table(figures))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "at_most", "at_least", "passed", "judged"),
    [
        (1.25, 1.25, None, True, "yes"),
        (1.26, 1.25, None, False, "NO"),
        (4.0, None, 4.0, True, "yes"),
        (3.9, None, 4.0, False, "NO"),
        (2.0, 3.0, 1.0, True, "yes"),
        (0.5, 3.0, 1.0, False, "NO"),
        (3.5, 3.0, 1.0, False, "NO"),
        (math.nan, 1.25, None, False, "NO"),
        (math.nan, None, 4.0, False, "NO"),
        (None, 1.25, None, None, "?"),
        (1.0, None, None, None, ""),
        (0.0, 0.0, None, True, "yes"),
    ],
)
def test_a_figure_is_judged_by_its_bounds(value, at_most, at_least, passed, judged):
    figure = Figure("it", value, "x", at_most=at_most, at_least=at_least)
    assert figure.passed is passed
    assert figure.judged == judged


def test_what_is_wanted_is_said_by_the_bounds_unless_in_words():
    assert FAST.wanted == "at most 1.25"
    assert Figure("it", 1.0, "x", at_least=4).wanted == "at least 4"
    assert Figure("it", 1.0, "x", at_least=1, at_most=2).wanted == "at most 2 and at least 1"
    assert Figure("it", 1.0, "x", wanted="less than DDP", at_most=2).wanted == "less than DDP"
    assert Figure("it", 1.0, "x").wanted == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1234, "0.123 s"),
        (12.34, "12.3 s"),
        (99.99, "100 s"),
        (5200.4, "5,200 s"),
        (-250, "-250 s"),
    ],
)
def test_quantities_keep_three_digits_or_all_before_the_point(value, text):
    assert quantity(value, "s") == text


def test_a_peer_says_its_value_or_why_it_has_none():
    assert str(Peer("DDP", 155.2, "ms")) == "DDP 155 ms"
    assert str(Peer("DDP", 155.2, "ms", "2 ranks")) == "DDP 155 ms (2 ranks)"
    missing = Peer("Ray", None, "ms", "not installed: pip install offbeat[bench]")
    assert str(missing) == "Ray: not installed: pip install offbeat[bench]"
    assert str(Peer("Ray")) == "Ray: not measured"


def test_the_table_shows_figure_bound_judgement_and_peers_in_a_hundred_columns():
    peers = (Peer("gloo all-reduce", 155.2, "ms"), Peer("Ray", None, "ms", "not installed: get it"))
    text = shown(replace(SLOW, peers=peers, beside="a note " * 9), Figure("rest", None, "s"))
    for part in ("1.3 x", "at most 1.25", "NO", "gloo all-reduce 155 ms", "not measured"):
        assert part in text
    assert "not installed" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_brackets_in_a_note_are_text_and_not_markup():
    assert "offbeat[bench]" in shown(replace(FAST, beside="pip install offbeat[bench]"))


def test_the_verdict_counts_the_bounds_and_those_kept():
    figures = [FAST, SLOW, replace(FAST, value=None), Figure("no bound", 1.0, "x")]
    assert verdict(figures) == "1 of 3 bounds kept"


def test_json_holds_the_machine_and_every_figure_with_its_peers():
    whole = json.loads(as_json({"cores": 2}, [replace(SLOW, peers=(Peer("DDP", 2.5, "ms"),))]))
    assert whole["machine"] == {"cores": 2}
    (figure,) = whole["figures"]
    assert figure["value"] == 1.3
    assert figure["at_most"] == 1.25
    assert figure["wanted"] == "at most 1.25"
    assert figure["passed"] is False
    assert figure["peers"] == [{"name": "DDP", "value": 2.5, "unit": "ms", "note": ""}]
