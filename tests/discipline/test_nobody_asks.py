"""Outside its package nobody asks which kind of part a discipline has: parts have properties."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.config.text import Choice
from offbeat.discipline.named import ROWS
from offbeat.discipline.parts import (
    APPLIES,
    GATHERS,
    RULES,
    SENDS,
    WEIGHS,
    Apply,
    Gather,
    Send,
    Weigh,
)
from offbeat.rules.updater import RULE_KINDS
from offbeat.store.staleness import WEIGHERS
from offbeat.worker.send import LOCAL_SENDERS, STORE_SENDERS

PACKAGE = Path(ob.__file__).parent
OUTSIDE = [p for p in sorted(PACKAGE.rglob("*.py")) if p.parent != PACKAGE / "discipline"]
FAMILIES: dict[Any, Choice] = {Send: SENDS, Gather: GATHERS, Weigh: WEIGHS, Apply: APPLIES}
PARTS = {kind.__name__ for base in FAMILIES for kind in (base, *base.__subclasses__())}


def asked(source: str) -> set[str]:
    """The classes of parts that a source tells apart by type; its imports say which those are."""
    tree = ast.parse(source)
    meaning: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            meaning |= {one.asname or one.name: home + one.name for one in node.names}
    found: set[str] = set()
    for question in questions(tree):
        for chain in chains(question):
            first, *rest = chain.split(".")
            words = [*meaning.get(first, "").split("."), *rest]
            if words[0] == "offbeat":
                found |= PARTS.intersection(words)
    return found


def questions(tree: ast.AST) -> Iterator[ast.AST]:
    """What values are compared with, or said to be of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("isinstance", "issubclass"):
                yield from node.args[1:]
        elif isinstance(node, ast.Compare):  # type(x) is A, x.kind == A.kind
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.MatchClass):
            yield node.cls


def chains(node: ast.AST) -> Iterator[str]:
    """Dotted names; not those that are called, as values may well be compared with values."""
    if isinstance(node, ast.Name | ast.Attribute):
        yield ast.unparse(node)
    elif not isinstance(node, ast.Call):
        for inner in ast.iter_child_nodes(node):
            yield from chains(inner)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nobody_outside_asks_for_the_type_of_a_part(path: Path) -> None:
    found = asked(path.read_text())
    assert not found, f"ask {sorted(found)} for a property, and give them one if it is missing"


FROM = "from offbeat.discipline.parts import Change, Count, Gradient\n"


@pytest.mark.parametrize(
    "source",
    [
        FROM + "isinstance(send, Gradient)",
        FROM + "isinstance(send, Change | Gradient)",
        FROM + "isinstance(send, (int, Change))",
        FROM + "type(send) is Gradient",
        FROM + "send.__class__ in (Change, Gradient)",
        FROM + "send.kind == Gradient.kind",
        FROM + "match send:\n    case Gradient(): pass",
        "from offbeat.discipline.parts import Gradient as G\nisinstance(send, G)",
        "from offbeat.discipline import parts\nisinstance(send, parts.Gradient)",
        "import offbeat as ob\nisinstance(send, ob.Gradient)",
    ],
)
def test_questions_are_seen(source: str) -> None:
    assert asked(source)


@pytest.mark.parametrize(
    "source",
    [
        FROM + "TABLE = {Gradient.kind: 1}",
        FROM + "gather != Count(1)",
        FROM + "def f(send: Change) -> Gradient: return Gradient()",
        "from mine import Gradient\nisinstance(send, Gradient)",
        "isinstance(send, int)",
    ],
)
def test_what_only_looks_like_a_question_is_allowed(source: str) -> None:
    assert not asked(source)


# ---------------------------------------------------------------- what the parts say instead


@pytest.mark.parametrize(("base", "family"), FAMILIES.items(), ids=lambda x: getattr(x, "what", ""))
def test_every_part_is_of_its_family_and_in_its_table(base: Any, family: Choice) -> None:
    assert {kind.kind: kind for kind in base.__subclasses__()} == family.kinds


def said(value: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(value, name) for name in names)


def test_what_is_sent() -> None:
    names = ("local_steps", "fetch", "steps_locally", "each_gradient", "summable")
    assert said(ob.Gradient(), *names) == (1, 0, False, True, True)
    assert said(ob.Accumulated(4, 2), *names) == (4, 2, False, False, False)
    assert said(ob.Change(8), *names) == (8, 0, True, False, True)
    assert said(ob.Elastic(5), *names) == (5, 0, True, False, False)
    assert said(ob.InPlace(), *names) == (1, 0, True, False, False)
    every = (ob.Gradient(), ob.Accumulated(), ob.Change(), ob.Elastic(), ob.InPlace())
    assert [send for send in every if send.centre] == [ob.Elastic()]
    assert [send for send in every if send.in_place] == [ob.InPlace()]
    assert not any(send.by_speed or send.averages_state for send in every)
    assert ob.Change(by_speed=True).by_speed
    assert ob.Change(state="average").averages_state
    assert len({send.descends for send in (*every[1:], ob.Accumulated(2))}) == 5
    assert ob.Accumulated(1).descends == ob.Gradient().descends


def test_how_many_are_gathered() -> None:
    names = ("barrier", "pairs", "k", "backup")
    assert said(ob.All(2), *names) == (True, False, 0, 2)
    assert said(ob.Count(3), *names) == (False, False, 3, 0)
    assert said(ob.Pair(), *names) == (False, True, 1, 0)
    assert [g.together(8) for g in (ob.All(), ob.All(2), ob.Count(3), ob.Pair())] == [8, 6, 3, 1]


def test_how_staleness_is_weighed_and_what_is_applied() -> None:
    weighs = [WEIGHS.read(word) for word in WEIGHS.kinds]
    assert [weigh.kind for weigh in weighs if weigh.constant] == ["constant"]
    assert [weigh.kind for weigh in weighs if weigh.elementwise] == ["dc", "dc-adaptive", "gap"]
    assert ob.Yours().rule is None
    assert ob.Rule("sgd").rule == ob.Rule("sgd")


NUMBERED = ("soft", "ssp", "ringmaster", "rennala")  # rows that ask for a number


def test_only_what_workers_write_in_place_has_no_order() -> None:
    bare = {name: row for name, row in ROWS.items() if name not in NUMBERED}
    assert [name for name, row in bare.items() if not row().ordered] == ["hogwild"]


def test_properties_are_no_settings() -> None:
    assert SENDS.text(ob.Gradient()) == "gradient"
    assert GATHERS.text(ob.All()) == "all"
    assert repr(ob.Elastic(5)) == "Elastic(every=5, alpha=None)"


def test_every_part_that_needs_an_implementation_has_one() -> None:
    """One without would fail only when it is first used."""
    local = {word for word, kind in SENDS.kinds.items() if kind.steps_locally}  # type: ignore[attr-defined]
    assert local == LOCAL_SENDERS.keys()
    assert SENDS.kinds.keys() - local == STORE_SENDERS.keys()
    assert {weigh.kind for weigh in map(WEIGHS.read, WEIGHS.kinds) if weigh.elementwise} == set(
        WEIGHERS
    )
    assert set(RULES) == RULE_KINDS.keys()
