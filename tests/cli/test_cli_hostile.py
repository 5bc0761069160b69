"""Text of run folders and models that is printed: no control character reaches a terminal."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.cli import main
from offbeat.recipes import recipe
from offbeat.report.tables import console, run_table
from offbeat.report.words import counted, visible

# Clears the screen, sets a title, turns a line around, and an 8-bit form of the first.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202etxt\x9b2J\x7f"


def folder(path: Path, **changes: Any) -> Path:
    """A run folder in which a stranger has written."""
    task = recipe("digits", hidden=4)
    ob.train(
        task.model, task.data, task.loss, optimizer=task.optimizer, batch_size=256, test=task.test,
        cluster="20ms,20ms", out=path, origin={"recipe": "digits", "options": {"hidden": 4}},
    )  # fmt: skip
    config = json.loads((path / "run.json").read_text()) | changes
    (path / "run.json").write_text(json.dumps(config))
    return path


def harmless(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


@pytest.mark.parametrize("command", ["report", "replay", "layout"])
@pytest.mark.parametrize(
    "changes",
    [
        {"discipline": HOSTILE},
        {"discipline": f"asp:{HOSTILE}"},
        {"origin": {"script": f"job.py:{HOSTILE}"}},
        {"origin": {"loop": HOSTILE}},
        {"origin": {"recipe": HOSTILE}},
        {"origin": {"recipe": "digits", "options": {HOSTILE: 1}}},
        {"optimizer": {"name": f"torch.optim.{HOSTILE}", "settings": None}},
        {"optimizer": {"name": "torch.optim.SGD", "settings": {HOSTILE: 1}}},
        {"metric": {"name": HOSTILE}},
        {"layout": HOSTILE},
        {"model": [HOSTILE]},
        {"engine": HOSTILE},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_no_control_character_of_a_folder_is_printed(
    command: str, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = folder(tmp_path / "run", **changes)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    main([command, str(run)])
    out, err = capsys.readouterr()
    assert out or err
    assert harmless(out)
    assert harmless(err)


def test_no_control_character_of_a_folders_name_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("report", "replay", "layout"):
        assert main([command, str(tmp_path / HOSTILE)]) != 0
        assert harmless("".join(capsys.readouterr()))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_in_tables_are_harmless_in_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    task = recipe("digits", hidden=4)
    run = ob.train(
        task.model, task.data, task.loss, optimizer=task.optimizer, batch_size=256,
        cluster="20ms",
    )  # fmt: skip
    figures = run.summary()
    figures.metric, figures.metric_name = 0.5, HOSTILE
    screen = Terminal()
    console(screen).print(run_table(figures))
    assert "\x1b[2J" not in screen.getvalue()
    assert "\x07" not in screen.getvalue()
    assert "␛[2J" in screen.getvalue()


def test_what_is_piped_has_no_spaces_at_the_end_of_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--option", "hidden=4", "--batch-size", "256", "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert "bsp on 1 simulated worker, digits" in out
    assert "1 epoch: " in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_words() -> None:
    assert [counted(n, "epoch") for n in (0, 1, 2000)] == ["0 epochs", "1 epoch", "2,000 epochs"]
    assert visible("plain · × ü 漢") == "plain · × ü 漢"
    assert visible("a\x1bb\nc\x9b\u202e\x7f") == "a␛b\nc��␡"
