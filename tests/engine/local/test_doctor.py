"""The doctor's checks, on machines that lack one thing each, and its trial of a forked worker."""

import os
import select
import signal
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.engine.local import doctor
from offbeat.engine.local.doctor import (
    DoctorPlan,
    Finding,
    MachineFacts,
    examine,
    try_fork,
    verdict,
)

ROOT = Path(__file__).resolve().parents[3]
GB = 10**9

SOUND = MachineFacts(
    platform="linux",
    python=(3, 12, 1),
    torch="2.9.1+cpu",
    cuda=None,
    devices=0,
    affinity=8,
    quota=None,
    variables={},
    memory=16 * GB,
    group_memory=None,
    files=1024,
    files_ceiling=4096,
    tasks=None,
    group_tasks=None,
    memfd="",
    pidfd="",
    disk=100 * GB,
    writable=True,
    extras={"scikit-learn": "1.6.0", "ray": None},
)
FOUR = DoctorPlan(4)


def works(threads: int) -> str:
    return ""


def found(name: str, host: MachineFacts, plan: DoctorPlan = FOUR, trouble: str = "") -> Finding:
    """The finding of one check, after a look at all of them."""
    findings = {finding.name: finding for finding in examine(host, plan, lambda threads: trouble)}
    return findings[name]


def test_a_sound_machine_has_nothing_to_change() -> None:
    findings = examine(SOUND, FOUR, works)
    assert [(f.name, f.state, f.remedy) for f in findings if f.state != "good" or f.remedy] == []
    assert verdict(findings, FOUR) == "Ready for 4 workers; nothing to change."
    assert len({finding.name for finding in findings}) == len(findings)


MB100 = DoctorPlan(4, 100_000_000)


@pytest.mark.parametrize(
    ("name", "lack", "plan", "state", "remedy"),
    [
        ("python", {"python": (3, 10, 9)}, FOUR, "bad", "Python 3.11"),
        ("torch", {"torch": "2.5.1"}, FOUR, "bad", "torch>=2.6,<3"),
        ("torch", {"torch": "3.0.0"}, FOUR, "bad", "torch>=2.6,<3"),
        ("torch", {"torch": "unknown"}, FOUR, "bad", "torch>=2.6,<3"),
        ("cores", {"affinity": 2}, FOUR, "warn", "-n 2 "),
        ("cores", {"quota": 3.5}, FOUR, "warn", "-n 3 "),
        ("cores", {"quota": 0.5}, DoctorPlan(1), "warn", "raise the quota"),
        ("threads", {"variables": {"OMP_NUM_THREADS": "64"}}, FOUR, "warn", "OMP_NUM_THREADS"),
        ("threads", {"variables": {"MKL_NUM_THREADS": "all"}}, FOUR, "warn", "MKL_NUM_THREADS"),
        ("shared memory", {"memfd": "not permitted"}, FOUR, "bad", "sandbox"),
        # Four workers take 12 sizes of the model.
        ("memory", {"memory": 1_100_000_000}, MB100, "bad", "-n 2 or a larger machine"),
        ("memory", {"memory": 1_300_000_000}, MB100, "warn", "-n 3 or a larger machine"),
        ("memory", {"memory": 500_000_000}, MB100, "bad", "a smaller model"),
        ("memory", {"group_memory": GB}, MB100, "bad", "limit of the container"),
        ("memory", {"memory": None}, FOUR, "warn", "Linux"),
        # Four workers need 32 files.
        ("files", {"files": 31}, FOUR, "bad", "ulimit -n 4096"),
        ("files", {"files": 40}, FOUR, "warn", "ulimit -n 4096"),
        ("files", {"files": 31, "files_ceiling": None}, FOUR, "bad", "ulimit -n 4096"),
        ("files", {"files": 31, "files_ceiling": 512}, FOUR, "bad", "ulimit -n 512"),
        ("files", {"files": 20, "files_ceiling": 20}, FOUR, "bad", "raised to 4096; -n 2 fits"),
        ("files", {"files": 9, "files_ceiling": 9}, FOUR, "bad", "raised to 4096"),
        ("files", {"files_ceiling": None}, DoctorPlan(1000), "bad", "ulimit -n 12016"),
        ("processes", {"tasks": 10}, FOUR, "bad", "ulimit -u"),
        ("processes", {"tasks": 900, "group_tasks": 10}, FOUR, "bad", "--pids-limit"),
        ("start", {"platform": "darwin"}, FOUR, "bad", "Linux"),
        ("start", {"pidfd": "not permitted"}, FOUR, "bad", "Linux 5.3"),
        ("disk", {"disk": 500_000_000}, FOUR, "warn", "--out on another disk"),
        ("disk", {"disk": GB}, MB100, "warn", "free 1.1 GB"),
        ("disk", {"writable": False}, FOUR, "warn", "another folder"),
    ],
)
def test_a_machine_that_lacks_something_is_told_what_to_change(
    name: str, lack: dict[str, object], plan: DoctorPlan, state: str, remedy: str
) -> None:
    sound = found(name, SOUND, replace(plan, workers=min(plan.workers, 4)))
    assert sound.state == "good"
    finding = found(name, replace(SOUND, **lack), plan)  # type: ignore[arg-type]
    assert finding.state == state
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("name", "host", "words"),
    [
        ("torch", replace(SOUND, cuda="12.8", devices=1), "CUDA 12.8, 1 device"),
        ("cores", replace(SOUND, quota=4.0), "4 for 4 workers (of 8; the control group"),
        ("cores", replace(SOUND, quota=64.0), "8 for 4 workers"),
        ("threads", replace(SOUND, variables={"OMP_NUM_THREADS": "2,1"}), "2 per worker"),
        ("threads", replace(SOUND, affinity=4), "1 per worker"),
        ("memory", replace(SOUND, group_memory=12 * GB), "12.0 GB free: enough for models up to"),
        ("files", replace(SOUND, files=None), "no limit"),
        ("processes", SOUND, "no limit"),
        ("processes", replace(SOUND, tasks=28, group_tasks=900), "28 more"),
        ("start", SOUND, "2 threads"),
        ("extras", SOUND, "scikit-learn 1.6.0, without ray"),
    ],
)
def test_what_is_good_is_told_as_well(name: str, host: MachineFacts, words: str) -> None:
    finding = found(name, host)
    assert finding.state == "good"
    assert words in finding.found


def test_a_failed_trial_is_bad() -> None:
    finding = found("start", SOUND, trouble="gave no answer within 30 s")
    assert (finding.state, finding.found) == ("bad", "a forked worker gave no answer within 30 s")


@pytest.mark.parametrize("lack", [{"platform": "win32"}, {"pidfd": "not permitted"}])
def test_nothing_is_tried_where_it_cannot_work(lack: dict[str, object]) -> None:
    def trial(threads: int) -> str:
        raise AssertionError("tried all the same")

    examine(replace(SOUND, **lack), FOUR, trial)  # type: ignore[arg-type]


def test_the_trial_has_the_threads_of_a_worker() -> None:
    asked: list[int] = []
    for workers, affinity in ((4, 8), (3, 8), (16, 8), (1, 8)):
        host = replace(SOUND, affinity=affinity)
        examine(host, DoctorPlan(workers), lambda threads: asked.append(threads) or "")  # type: ignore[func-returns-value]
    assert asked == [2, 2, 1, 8]


def test_the_verdict_names_what_is_wrong() -> None:
    worse = replace(SOUND, files=3, memfd="no", affinity=1)
    assert verdict(examine(worse, FOUR, works), FOUR) == (
        "Not ready for 4 workers: see what to do about shared memory, files."
    )
    one = DoctorPlan(1)
    small = replace(SOUND, disk=5)
    assert verdict(examine(small, one, works), one) == "Ready for 1 worker; worth a look: disk."


@given(
    host=st.builds(
        replace,
        st.just(SOUND),
        affinity=st.integers(1, 256),
        quota=st.none() | st.floats(0.01, 300),
        memory=st.none() | st.integers(0, 10**13),
        group_memory=st.none() | st.integers(0, 10**13),
        files=st.none() | st.integers(0, 10**6),
        files_ceiling=st.none() | st.integers(0, 10**6),
        tasks=st.none() | st.integers(0, 10**5),
        group_tasks=st.none() | st.integers(0, 10**5),
        disk=st.integers(0, 10**13),
    ),
    plan=st.builds(DoctorPlan, st.integers(1, 2000), st.none() | st.integers(1, 10**12)),
)
def test_every_complaint_has_a_remedy_and_only_complaints_do(
    host: MachineFacts, plan: DoctorPlan
) -> None:
    for finding in examine(host, plan, works):
        assert finding.found
        assert bool(finding.remedy) == (finding.state != "good")


@given(
    memory=st.integers(10**6, 10**13),
    model_bytes=st.integers(1, 10**10),
    workers=st.integers(1, 500),
)
def test_as_many_workers_as_the_remedy_names_do_fit(
    memory: int, model_bytes: int, workers: int
) -> None:
    host = replace(SOUND, memory=memory)
    finding = found("memory", host, DoctorPlan(workers, model_bytes))
    if finding.remedy.startswith("-n "):
        fewer = int(finding.remedy.split()[1])
        assert 0 < fewer < workers
        assert found("memory", host, DoctorPlan(fewer, model_bytes)).state == "good"
        assert found("memory", host, DoctorPlan(fewer + 1, model_bytes)).state != "good"


def test_the_ranges_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={doctor.PYTHON[0]}.{doctor.PYTHON[1]}"
    (least, below) = doctor.TORCH
    assert f"torch>={least[0]}.{least[1]},<{below[0]}" in project["dependencies"]


# ---------------------------------------------------------------- the trial itself


@pytest.fixture
def reaped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if a process that it forked is there afterwards, or a file left open."""
    pids: list[int] = []
    fork = os.fork

    def counted() -> int:
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", counted)
    files = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= files
    assert pids
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def hang(threads: int) -> None:
    threading.Event().wait()


def fail(threads: int) -> None:
    raise ValueError("no luck")


def die(threads: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("reaped")
@pytest.mark.parametrize(
    ("step", "patience", "words"),
    [
        (fail, 60, "failed: ValueError: no luck"),
        (die, 60, "was killed by SIGKILL"),
        (hang, 0.1, "gave no answer within 0.1 s"),
    ],
)
def test_a_worker_that_does_not_finish_is_told_apart(
    step: object, patience: float, words: str
) -> None:
    assert try_fork(1, step, patience) == words  # type: ignore[arg-type]


@pytest.mark.usefixtures("reaped")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_worker_computes_in_a_thread_of_its_own(threads: int) -> None:
    assert try_fork(threads, patience=60) == ""


def test_the_step_runs_in_a_fresh_thread_of_another_process() -> None:
    here = os.getpid()

    def step(threads: int) -> None:
        other = os.getpid() != here
        fresh = threading.current_thread() is not threading.main_thread()
        raise RuntimeError(f"{threads} {other} {fresh}")

    assert try_fork(3, step, 60) == "failed: RuntimeError: 3 True True"


def test_a_refused_fork_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    assert try_fork(1) == "could not be started: Resource temporarily unavailable"


@pytest.mark.usefixtures("reaped")
def test_ctrl_c_leaves_no_worker_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def register(self, *words: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("offbeat.engine.local.doctor.select.poll", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        try_fork(1, hang, 60)


def test_a_worker_that_hangs_ends_without_its_doctor() -> None:
    pid = os.fork()
    if pid == 0:
        doctor._be_the_worker(1, hang, 0.05, 1)
    worker = os.pidfd_open(pid)
    ending = select.poll()
    ending.register(worker, select.POLLIN)
    ending.poll(60_000)  # only a worker that does not end by itself is killed below
    signal.pidfd_send_signal(worker, signal.SIGKILL)
    end = os.waitid(os.P_PIDFD, worker, os.WEXITED)
    os.close(worker)
    assert end is not None
    assert (end.si_code, end.si_status) == (os.CLD_KILLED, signal.SIGALRM)
