"""`offbeat doctor`: what it prints, how it exits, and how it reads a machine."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import doctor
from offbeat.engine.local.doctor import MachineFacts
from tests.cli.common import answers
from tests.config.test_limits import group, mounted, own_groups

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
Capture = pytest.CaptureFixture[str]

# The machine whose findings docs/commands.md shows.
SHOWN = MachineFacts(
    platform="linux",
    python=(3, 11, 7),
    torch="2.13.0+cpu",
    cuda=None,
    devices=0,
    affinity=2,
    quota=None,
    variables={},
    memory=24_000_000_000,
    group_memory=None,
    files=30,
    files_ceiling=4096,
    tasks=None,
    group_tasks=4000,
    memfd="",
    pidfd="",
    disk=80_000_000_000,
    writable=True,
    extras={"scikit-learn": "1.9.1", "matplotlib": "3.11.2", "ray": None},
)
SOUND = replace(SHOWN, affinity=8, files=1024)


def on(monkeypatch: pytest.MonkeyPatch, host: MachineFacts) -> None:
    monkeypatch.setattr(doctor, "here", lambda folder: host)
    monkeypatch.setattr(doctor, "try_fork", lambda threads: "")


answer = answers("doctor")


def asked(capsys: Capture, *words: object) -> tuple[int, Any]:
    code, out, err = answer(capsys, *words, "--json")
    assert err == ""
    return code, json.loads(out)


def test_a_sound_machine_exits_with_0(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, SOUND)
    code, out, err = answer(capsys)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Ready for 4 workers; nothing to change."
    assert "to do" not in out


def test_one_bad_finding_exits_with_1_and_a_warning_does_not(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, replace(SOUND, files=3))
    code, out, _ = answer(capsys)
    assert code == 1
    assert "to do: ulimit -n 4096" in out
    assert out.splitlines()[-1] == "Not ready for 4 workers: see what to do about files."
    on(monkeypatch, replace(SOUND, affinity=1))
    code, out, _ = answer(capsys)
    assert code == 0
    assert out.splitlines()[-1] == "Ready for 4 workers; worth a look: cores."


def test_everything_fits_in_80_columns(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    worst = replace(
        SHOWN,
        quota=0.5,
        variables={"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "64"},
        memory=1000,
        group_tasks=3,
        memfd="Operation not permitted",
        pidfd="Operation not permitted",
        files_ceiling=12,
        disk=3,
    )
    on(monkeypatch, worst)
    code, out, _ = answer(capsys, "-n", 1000, "--model-bytes", 10**12)
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    # Lines may break anywhere between words, and no word is lost.
    told = " ".join(out.split())
    for words in ("unset OMP_NUM_THREADS MKL_NUM_THREADS", "--pids-limit 4096", "a smaller model"):
        assert words in told


def test_the_documentation_shows_what_is_printed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, SHOWN)
    _, out, _ = answer(capsys)
    printed = "\n".join(line.rstrip() for line in out.splitlines())
    assert f"```text\n{printed}\n```" in (DOCS / "commands.md").read_text()


def test_json_has_every_finding(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, SOUND)
    code, told = asked(capsys, "-n", 2, "--model-bytes", 1000)
    assert code == 0
    wanted = {"ready": True, "workers": 2, "threads_per_worker": 4, "model_bytes": 1000}
    assert told | wanted == told
    assert "error" not in told
    assert {tuple(finding) for finding in told["findings"]} == {
        ("name", "state", "found", "remedy")
    }
    on(monkeypatch, replace(SOUND, memfd="not permitted"))
    code, told = asked(capsys)
    assert code == told["exit_code"] == 1
    assert told["ready"] is False
    assert told["error"] == told["verdict"]
    states = {finding["name"]: finding["state"] for finding in told["findings"]}
    assert [name for name, state in states.items() if state == "bad"] == ["shared memory"]


def test_a_model_that_does_not_fit_is_bad(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, SOUND)
    assert answer(capsys, "--model-bytes", 10**9)[0] == 0
    code, out, _ = answer(capsys, "--model-bytes", 10**9, "-n", 40)
    assert code == 1
    assert "-n 7 or a larger machine" in out


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["-n", "0"], "--workers must be a whole number of at least 1"),
        (["--model-bytes", "0"], "--model-bytes must be a whole number of at least 1"),
        (["--model-bytes", "100MB"], "--model-bytes"),
    ],
)
def test_bad_input_exits_with_2(capsys: Capture, words: list[str], remedy: str) -> None:
    code, out, err = answer(capsys, *words)
    assert (code, out) == (2, "")
    assert remedy in err


# ---------------------------------------------------------------- reading a machine


def test_this_machine_can_be_read(capsys: Capture, tmp_path: Path) -> None:
    host = doctor.here(tmp_path)
    assert host.platform == sys.platform
    assert host.affinity >= 1
    assert host.memory is None or host.memory > 0
    assert host.disk > 0
    assert host.writable
    # Whatever is found here, the whole command says it and ends as its findings say.
    code, told = asked(capsys, "-n", 1)
    assert code == int(any(finding["state"] == "bad" for finding in told["findings"]))


def test_the_variables_that_matter_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert doctor.here(tmp_path).variables == {"OMP_NUM_THREADS": "7"}


def test_a_system_without_the_calls_is_read_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("memfd_create", "pidfd_open", "sched_getaffinity"):
        monkeypatch.delattr(os, name)
    monkeypatch.setitem(sys.modules, "resource", None)
    host = doctor.here(tmp_path)
    assert host.memfd == host.pidfd == "this system does not have it"
    assert (host.files, host.files_ceiling, host.tasks) == (None, None, None)
    assert host.affinity >= 1


def test_a_call_that_is_refused_says_why() -> None:
    def refused() -> None:
        raise PermissionError(1, "Operation not permitted")

    assert doctor.trouble(refused) == "Operation not permitted"
    assert doctor.trouble(lambda: None) == ""


def test_the_tightest_of_own_and_parents_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = tmp_path / "groups"
    group(point / "a", memory__max=10**6, memory__current=0, cpu__max="300000 100000")
    group(point / "a" / "b", memory__max=10**9, memory__current=0, cpu__max="200000 100000")
    monkeypatch.setattr(doctor, "OWN", own_groups(tmp_path, "0::/a/b\n", mounted(point, "cgroup2")))
    host = doctor.here(tmp_path)
    assert (host.quota, host.group_memory, host.group_tasks) == (2.0, 10**6, None)


def test_the_limit_of_processes_counts_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_limit", lambda name: (100, None))
    monkeypatch.setattr(doctor, "tasks_of", lambda user: 30 if user == 7 else 0)
    monkeypatch.setattr(os, "getuid", lambda: 7)
    assert doctor._tasks_left() == 70
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert doctor._tasks_left() is None


def test_processes_and_threads_of_a_user_are_counted() -> None:
    here = Path("/proc/self")
    assert doctor.tasks_of(here.stat().st_uid) >= len(list((here / "task").iterdir()))
    assert doctor.tasks_of(2**32 - 2) == 0
