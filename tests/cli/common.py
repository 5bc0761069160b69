"""Commands as a user gives them: what they print, and the code they end with."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from offbeat.cli import main

Capture = pytest.CaptureFixture[str]
Answer = Callable[..., tuple[int, str, str]]


def answers(*command: str) -> Answer:
    """A function that gives this command with more words; returns exit code, output and errors."""

    def answer(capsys: Capture, *words: object) -> tuple[int, str, str]:
        code = main([*command, *(str(word) for word in words)])
        out, err = capsys.readouterr()
        return code, out, err

    return answer


def objects(answer: Answer) -> Callable[..., Any]:
    """The same with `--json`, for words that are right; returns what was printed."""

    def asked(capsys: Capture, *words: object) -> Any:
        code, out, _ = answer(capsys, "--json", *words)
        assert code == 0, out
        return json.loads(out)

    return asked
