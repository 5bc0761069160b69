"""Small values as text, and back."""

import inspect
from dataclasses import dataclass
from typing import Literal

import pytest

from offbeat.config.text import Choice, call_text, nearest, parse_call, read_value, split_arguments
from offbeat.errors import ConfigError


@dataclass(frozen=True)
class Plain:
    """No settings."""


@dataclass(frozen=True)
class Rich:
    """One setting of each kind."""

    size: int = 2
    rate: float = 0.5
    loud: bool = False
    mode: Literal["fast", "slow"] = "fast"
    depth: int | None = None


FAMILY = Choice("thing", {"plain": Plain, "rich": Rich})


def test_nearest_hints_only_at_something_close() -> None:
    assert nearest("inverze", ["inverse", "poly"]) == " (did you mean 'inverse'?)"
    assert nearest("xyz", ["inverse", "poly"]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "yes"), (False, "no"), (None, "auto"), (3, "3"), (0.1, "0.1"), (1e-5, "1e-05"),
     ("fast", "fast")],
)  # fmt: skip
def test_plain_values_as_text(value: object, text: str) -> None:
    assert call_text(value) == text


@pytest.mark.parametrize(
    ("word", "kind", "value"),
    [("3", int, 3), ("0.5", float, 0.5), ("yes", bool, True), ("no", bool, False),
     ("auto", int | None, None), ("4", int | None, 4), ("a", Literal["a", "b"], "a"),
     ("inf", float, float("inf"))],
)  # fmt: skip
def test_words_are_read_as_their_kind(word: str, kind: object, value: object) -> None:
    assert read_value(word, kind, "x") == value


@pytest.mark.parametrize(
    ("word", "kind", "says"),
    [("three", int, "x must be a whole number, not 'three'"),
     ("2.5", int, "x must be a whole number, not '2.5'"),
     ("fast", float, "x must be a number, not 'fast'"),
     ("true", bool, "x must be yes or no, not 'true'"),
     ("c", Literal["a", "b"], "x must be one of a, b, not 'c'"),
     ("auto", int, "x must be a whole number, not 'auto'"),
     ("", int, "x must be a whole number, not ''")],
)  # fmt: skip
def test_wrong_words_say_what_is_wanted(word: str, kind: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_value(word, kind, "x")
    assert str(caught.value) == says


def test_split_keeps_commas_in_brackets() -> None:
    assert split_arguments("2, b=3 ,c=f(1,2)", "t") == (["2"], {"b": "3", "c": "f(1,2)"})
    assert split_arguments("", "t") == ([], {})
    assert split_arguments("f(a=1)", "t") == (["f(a=1)"], {})


@pytest.mark.parametrize("rest", ["a=(1", "a=1)", "a=f((1)"])
def test_brackets_must_match(rest: str) -> None:
    with pytest.raises(ConfigError, match="'whole': brackets do not match"):
        split_arguments(rest, "whole")


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' is given twice"):
        split_arguments("a=1,a=2", "whole")


def call(rest: str) -> dict[str, object]:
    def target(size: int, rate: float = 0.5, *, loud: bool = False) -> None: ...

    parameters = inspect.signature(target).parameters
    return parse_call(f"t:{rest}", "t", parameters, *split_arguments(rest, f"t:{rest}"))


def test_words_find_their_parameters() -> None:
    assert call("3") == {"size": 3}
    assert call("3,0.25,loud=yes") == {"size": 3, "rate": 0.25, "loud": True}


@pytest.mark.parametrize(
    ("rest", "says"),
    [("", "size is missing; write t:size=..."),
     ("1,2,3", "'3' has no place; t takes size, rate, loud"),
     ("1,siz=2", "unknown 'siz' (did you mean 'size'?); t takes size, rate, loud"),
     ("1,size=2", "'size' is given twice"),
     ("x", "size must be a whole number, not 'x'")],
)  # fmt: skip
def test_wrong_calls_say_what_the_name_takes(rest: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call(rest)
    assert says in str(caught.value)
    assert repr(f"t:{rest}") in str(caught.value)


def test_keyword_only_parameters_show_how_to_write_them() -> None:
    def target(*, backup: int = 0) -> None: ...

    parameters = inspect.signature(target).parameters
    with pytest.raises(ConfigError, match="write backup=1"):
        parse_call("bsp:1", "bsp", parameters, ["1"], {})


@pytest.mark.parametrize(
    ("value", "text"),
    [(Plain(), "plain"), (Rich(), "rich"), (Rich(size=5), "rich(size=5)"),
     (Rich(loud=True, mode="slow", depth=4), "rich(loud=yes,mode=slow,depth=4)")],
)  # fmt: skip
def test_a_family_spells_and_reads_its_members(value: object, text: str) -> None:
    assert FAMILY.text(value) == text
    assert FAMILY.read(text) == value


def test_the_settings_of_a_member_may_be_positional() -> None:
    assert FAMILY.read("rich(7,0.25)") == Rich(7, 0.25)


@pytest.mark.parametrize(
    ("text", "says"),
    [("rch", "unknown thing 'rch' (did you mean 'rich'?); there are plain, rich"),
     ("rich(3", "'rich(3': the closing bracket is missing"),
     ("plain(3)", "'3' has no place; plain takes no arguments"),
     ("rich(3))", "brackets do not match")],
)  # fmt: skip
def test_a_family_explains_what_it_cannot_read(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FAMILY.read(text)
    assert says in str(caught.value)


def test_text_after_the_closing_bracket_is_refused() -> None:
    with pytest.raises(ConfigError, match="bracket"):
        FAMILY.read("rich(3)x")
