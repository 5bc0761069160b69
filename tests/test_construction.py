"""A part gets what it needs when it is made: nobody hangs a callback into another's attributes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "offbeat").rglob("*.py"))


def own(node: ast.expr) -> bool:
    """Whether an attribute belongs to the object that the code is about."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "ctx")  # autograd's own


def names_of_callables(trees: list[ast.AST]) -> set[str]:
    """What types of things to be called are named: `Make = Callable[...]`."""
    found = {"Callable"}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable["):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def callable_attributes(trees: list[ast.AST]) -> set[str]:
    """Attributes that are declared to hold something to be called, and nothing else anywhere."""
    held, others = set(), set()
    named = names_of_callables(trees)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute | ast.Name):
            target = node.target
            name = target.attr if isinstance(target, ast.Attribute) else target.id
            words = set(re.findall(r"\w+", ast.unparse(node.annotation)))
            (held if words & named else others).add(name)
    return held - others


def methods(tree: ast.AST) -> set[str]:
    """Names of everything that is defined with `def`, but for properties."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
            if not marks & {"property", "cached_property", "setter"}:
                found.add(node.name)
    return found


def called_back(value: ast.expr, defined: set[str]) -> bool:
    """Whether a value is a function: a lambda, a partial, or the name of something defined."""
    if isinstance(value, ast.Lambda):
        return True
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in ("partial", "MethodType")
    if isinstance(value, ast.Attribute):
        return own(value.value) and value.attr in defined
    return isinstance(value, ast.Name) and value.id in defined


def hung_in(source: str, holders: set[str]) -> Iterator[str]:
    """Assignments to attributes of others that hang in something to be called."""
    tree = ast.parse(source)
    defined = methods(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            single = not isinstance(target, ast.Tuple)
            targets = [target] if single else target.elts
            paired = isinstance(node.value, ast.Tuple) and not single
            values = node.value.elts if paired else [node.value] * len(targets)
            for one, value in zip(targets, values, strict=True):
                anothers = isinstance(one, ast.Attribute) and not own(one.value)
                if anothers and (one.attr in holders or called_back(value, defined)):
                    yield f"line {node.lineno}: {ast.unparse(one)}"


HOLDERS = callable_attributes([ast.parse(path.read_text()) for path in MODULES])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_callback_is_hung_into_another_object(path: Path) -> None:
    found = list(hung_in(path.read_text(), HOLDERS))
    assert not found, "pass it to the constructor, or give the object a method to subscribe with"


@pytest.mark.parametrize(
    "source",
    [
        "server.give = spread.give\n",
        "server.silent = lambda number: None\n",
        "def f(): ...\nstore.on_update = f\n",
        "from functools import partial\na.b = partial(print, 1)\n",
        "class A:\n    def m(self): ...\n    def n(self, o): o.heard = self.m\n",
        "a.x, a.give = 1, spread.give\n",
        "from types import MethodType\nrule.step = MethodType(nothing, rule)\n",
    ],
)
def test_callbacks_that_are_hung_in_are_seen(source: str) -> None:
    assert list(hung_in(source, {"give", "silent"}))


def test_types_of_callables_have_names() -> None:
    source = "Make = Callable[[], int]\nclass A:\n    make: Make | None = None\n    size: int = 0\n"
    assert callable_attributes([ast.parse(source)]) == {"make"}


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def m(self): ...\n    def __init__(self): self.heard = self.m\n",
        "agent.token = 3\n",
        "a.size = b.size\n",
        "def f(): ...\na.size = f()\n",
    ],
)
def test_plain_values_are_allowed(source: str) -> None:
    assert not list(hung_in(source, {"give"}))
