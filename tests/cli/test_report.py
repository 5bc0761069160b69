"""`offbeat report` and `run.report`: which runs it shows, also unfinished ones, and its errors."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from tests.cli.common import answers, objects

Capture = pytest.CaptureFixture[str]


def trained(out: Path | None, sync: str = "asp", **options: Any) -> ob.Run:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    return ob.train(
        nn.Linear(4, 2),
        data,
        F.cross_entropy,
        discipline=sync,
        optimizer=partial(torch.optim.SGD, lr=0.5),
        cluster="10ms,40ms",
        batch_size=8,
        epochs=2,
        test=data,
        out=out,
        **options,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    for sync in ("bsp", "asp"):
        trained(place / sync, sync)
    return place


answer = answers("report")
asked = objects(answer)


def test_several_runs_side_by_side(capsys: Capture, runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    told = asked(capsys, runs / "bsp", runs / "asp", "--out", page, "--target", "0.6")
    assert told["report"] == str(page)
    assert told["target"] == 0.6
    assert told["verdict"]["winner"] == "asp"
    assert [row["discipline"] for row in told["runs"]] == ["bsp", "asp"]
    assert told["unfinished"] == []
    text = page.read_text()
    assert "asp reached 60 % accuracy first on 2 devices." in text
    assert "simulated, virtual time" in text
    assert not (tmp_path / "figures").exists()


def test_one_run_in_words_and_figures_as_files(
    capsys: Capture, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = answer(capsys, runs / "asp", runs / "asp", "--figures")
    assert code == 0
    assert out.startswith("asp on 2 devices: ")
    assert out.endswith("\nwritten to report.html\n")
    assert (tmp_path / "figures" / "timeline.svg").exists()


def test_a_run_that_goes_on_is_shown_so_far(capsys: Capture, tmp_path: Path) -> None:
    trained(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    log = tmp_path / "run" / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-200])  # in the middle of a record
    told = asked(capsys, tmp_path / "run", "--out", tmp_path / "page.html")
    assert told["unfinished"] == ["run"]
    assert "not finished" in (tmp_path / "page.html").read_text()
    _, out, _ = answer(capsys, tmp_path / "run", "--out", tmp_path / "page.html")
    assert "1 run not finished" in out


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "does not exist"), ("empty", "is not a run folder")]
)
def test_a_bad_folder_is_an_error_of_four(
    capsys: Capture, tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = answer(capsys, tmp_path / name, "--out", tmp_path / "page.html")
    assert code == 4
    assert words in err
    assert not (tmp_path / "page.html").exists()


def test_a_target_in_per_cent_is_refused(capsys: Capture, runs: Path) -> None:
    code, _, err = answer(capsys, runs / "asp", "--target", "90")
    assert code == 2
    assert "0.9 for 90 %" in err


# ---------------------------------------------------------------- comparisons


def comparison(runs: Path, folder: Path, **changes: Any) -> Path:
    (folder / "cells").mkdir(parents=True)
    for name in ("bsp", "asp"):
        (folder / "cells" / name).symlink_to(runs / name)
    cells = [
        {"discipline": "bsp", "devices": 2, "repeat": 0, "folder": "cells/bsp", "error": None},
        {"discipline": "asp:x", "devices": 2, "repeat": 0, "folder": "../../asp", "error": None},
        {"discipline": "soft:9", "devices": 2, "repeat": 0, "folder": None, "error": "too few"},
    ]
    results = {"title": "Mine", "settings": {"task": "small"}, "target": 0.6, "cells": cells}
    (folder / "results.json").write_text(json.dumps(results | changes))
    return folder


def test_a_comparison_is_shown_under_its_own_names(
    capsys: Capture, runs: Path, tmp_path: Path
) -> None:
    folder = comparison(runs, tmp_path / "c", target_given=True)
    told = asked(capsys, folder, "--out", tmp_path / "page.html")
    assert told["title"] == "Mine"
    assert told["target"] == 0.6
    assert [(r["discipline"], r["failed"]) for r in told["runs"]] == [
        ("bsp", None),
        ("asp:x", None),
        ("soft:9", "too few"),
    ]


def test_a_comparison_without_results_is_shown_so_far(
    capsys: Capture, runs: Path, tmp_path: Path
) -> None:
    folder = comparison(runs, tmp_path / "c")
    (folder / "results.json").unlink()
    told = asked(capsys, folder, "--out", tmp_path / "page.html")
    assert len(told["runs"]) == 2
    for link in (folder / "cells").iterdir():
        link.unlink()
    assert answer(capsys, folder)[0] == 4


def test_damaged_results_are_an_error_of_four(capsys: Capture, runs: Path, tmp_path: Path) -> None:
    folder = comparison(runs, tmp_path / "c", cells=[{"discipline": 3}])
    code, _, err = answer(capsys, folder, "--out", tmp_path / "page.html")
    assert code == 4
    assert "results.json is damaged" in err


# ---------------------------------------------------------------- from Python


def test_a_run_writes_its_report(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    path = run.report(tmp_path / "deep" / "page.html", target=0.6)
    assert path.read_text().count("<svg") == 6
    with pytest.raises(ob.ConfigError, match=r"write 90% or 0\.9"):
        run.report(tmp_path / "page.html", target=60)


def test_a_run_without_a_folder_says_what_would_bring_the_timeline(tmp_path: Path) -> None:
    text = trained(None).report(tmp_path / "page.html").read_text()
    assert "pass out=" in text
    assert "figure-timeline" not in text
    assert "figure-curves" in text


def test_a_notebook_shows_a_run() -> None:
    shown = trained(None)._repr_html_()
    assert shown.startswith("<table>")
    assert "asp on 2 workers" in shown
