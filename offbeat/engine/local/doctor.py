"""Whether this machine can run the local engine, and what to change where it cannot."""

import os
import re
import select
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import nn

from offbeat.engine.signals import children_kept
from offbeat.folder.checkpoint import KEEP
from offbeat.report.tables import size

# The ranges that the package declares.
PYTHON = (3, 11)
TORCH = ((2, 6), (3, 0))

# What the engine holds, in sizes of the model: parameters and a copy at the store, parameters and
# gradients of each worker, and two tensors of state for each parameter, as Adam has.
OF_STORE, OF_WORKER, OF_OPTIMISER = 2, 2, 2
FILES, FILES_OF_WORKER = 8, 6
TASKS, TASKS_OF_WORKER = 4, 4  # processes and threads; threads of arithmetic come on top
TIGHT = 0.8  # of the memory: beyond this, activations and data have too little
SMALL_DISK = 10**9
PATIENCE = 30.0  # seconds for one tiny step in a forked process

State = Literal["good", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """What one check saw, and what to change unless that was good."""

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorPlan:
    """What the machine is asked for: so many workers, of a model of that size if it is known."""

    workers: int = 4
    model_bytes: int | None = None

    def threads(self, cores: float) -> int:
        """Threads of arithmetic that each worker gets."""
        return max(1, int(cores) // self.workers)

    def memory(self, model_bytes: int) -> int:
        return (OF_STORE + OF_WORKER * self.workers + OF_OPTIMISER) * model_bytes


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Readings of a machine; None stands for no limit, or for what cannot be read there."""

    platform: str
    python: tuple[int, int, int]
    torch: str
    cuda: str | None
    devices: int
    affinity: int  # cores that this process may run on
    quota: float | None  # cores that its control group may use
    variables: Mapping[str, str]
    memory: int | None
    group_memory: int | None
    files: int | None  # the limit in force, and the one it can be raised to
    files_ceiling: int | None
    tasks: int | None  # processes and threads that this user may still start
    group_tasks: int | None
    memfd: str  # why shared memory or process descriptors do not work; empty if they do
    pidfd: str
    disk: int
    writable: bool
    extras: Mapping[str, str | None]

    @property
    def cores(self) -> float:
        return self.affinity if self.quota is None else min(self.affinity, self.quota)


# ---------------------------------------------------------------- the checks


def examine(
    host: MachineFacts, plan: DoctorPlan, trial: Callable[[int], str]
) -> tuple[Finding, ...]:
    """Every finding; `trial` starts a worker of so many threads and says what went wrong."""
    return (
        check_python(host),
        check_torch(host),
        check_cores(host, plan),
        check_threads(host, plan),
        check_shared_memory(host),
        check_memory(host, plan),
        check_files(host, plan),
        check_processes(host, plan),
        check_start(host, plan, trial),
        check_disk(host, plan),
        check_extras(host),
    )


def verdict(findings: tuple[Finding, ...], plan: DoctorPlan) -> str:
    """All findings in one sentence."""
    bad, warn = ([f.name for f in findings if f.state == state] for state in ("bad", "warn"))
    whom = _workers(plan.workers)
    if bad:
        return f"Not ready for {whom}: see what to do about {', '.join(bad)}."
    if warn:
        return f"Ready for {whom}; worth a look: {', '.join(warn)}."
    return f"Ready for {whom}; nothing to change."


def check_python(host: MachineFacts) -> Finding:
    found = ".".join(map(str, host.python))
    if host.python >= PYTHON:
        return Finding("python", "good", found)
    return Finding("python", "bad", found, "install Python 3.11 or newer, and offbeat for it")


def check_torch(host: MachineFacts) -> Finding:
    if host.cuda is None:
        found = f"{host.torch}, built without CUDA"
    else:
        found = f"{host.torch}, built for CUDA {host.cuda}, {_count(host.devices, 'device')}"
    numbers = re.match(r"(\d+)\.(\d+)", host.torch)
    least, below = TORCH
    if numbers and least <= (int(numbers[1]), int(numbers[2])) < below:
        return Finding("torch", "good", found)
    return Finding("torch", "bad", found, "pip install 'torch>=2.6,<3'")


def check_cores(host: MachineFacts, plan: DoctorPlan) -> Finding:
    found = f"{host.cores:g} for {_workers(plan.workers)}"
    if host.cores < host.affinity:
        found += f" (of {host.affinity}; the control group has a quota)"
    if plan.workers <= host.cores:
        return Finding("cores", "good", found)
    if host.cores < 1:
        remedy = "raise the quota, as in docker run --cpus 2"
    else:
        remedy = f"-n {int(host.cores)} is fastest; more only for emulated speeds"
    return Finding("cores", "warn", found, remedy)


def check_threads(host: MachineFacts, plan: DoctorPlan) -> Finding:
    threads = plan.threads(host.cores)
    found = f"{threads} per worker"
    # OMP_NUM_THREADS may be a list, one number for each level of nesting.
    odd = {n: v for n, v in host.variables.items() if v.split(",")[0].strip() != str(threads)}
    if not odd:
        return Finding("threads", "good", found)
    found += f", but {' and '.join(f'{name} is {value!r}' for name, value in odd.items())}"
    return Finding("threads", "warn", found, f"unset {' '.join(odd)}")


def check_shared_memory(host: MachineFacts) -> Finding:
    if not host.memfd:
        return Finding("shared memory", "good", "memfd works; /dev/shm is not used")
    found = f"memfd_create does not work: {host.memfd}"
    return Finding("shared memory", "bad", found, "use Linux, and a sandbox that allows it")


def check_memory(host: MachineFacts, plan: DoctorPlan) -> Finding:
    available = _least(host.memory, host.group_memory)
    if available is None:
        remedy = "look it up yourself: offbeat knows how to on Linux only"
        return Finding("memory", "warn", "cannot be read here", remedy)
    whom = _workers(plan.workers)
    if plan.model_bytes is None:
        most = size(TIGHT * available / plan.memory(1))
        return Finding("memory", "good", f"{size(available)} free: enough for models up to {most}")
    need = plan.memory(plan.model_bytes)
    found = f"{size(available)} free; {whom} of a {size(plan.model_bytes)} model take {size(need)}"
    if need <= TIGHT * available:
        return Finding("memory", "good", found)
    fit = int((TIGHT * available / plan.model_bytes - OF_STORE - OF_OPTIMISER) // OF_WORKER)
    ways = [f"-n {fit}"] if fit > 0 else ["a smaller model"]
    limited = host.group_memory == available
    ways.append("a higher memory limit of the container" if limited else "a larger machine")
    if need <= available:
        return Finding("memory", "warn", f"{found}, which leaves little", " or ".join(ways))
    return Finding("memory", "bad", found, " or ".join(ways))


def check_files(host: MachineFacts, plan: DoctorPlan) -> Finding:
    need = FILES + FILES_OF_WORKER * plan.workers
    if host.files is None:
        return Finding("files", "good", "no limit on open files")
    found = f"{host.files:,} may be open, {_workers(plan.workers)} need about {need:,}"
    if host.files >= 2 * need:
        return Finding("files", "good", found)
    wanted = max(4096, 2 * need)
    possible = wanted if host.files_ceiling is None else min(wanted, host.files_ceiling)
    remedy = f"ulimit -n {possible}"
    if possible < need:
        fewer = (possible - FILES) // FILES_OF_WORKER
        fit = f"; -n {fewer} fits below it" if fewer > 0 else ""
        remedy = f"have the hard limit (nofile, {possible}) raised to {wanted}{fit}"
    if host.files >= need:
        return Finding("files", "warn", f"{found}: few are left for data", remedy)
    return Finding("files", "bad", found, remedy)


def check_processes(host: MachineFacts, plan: DoctorPlan) -> Finding:
    need = TASKS + (TASKS_OF_WORKER + plan.threads(host.cores)) * plan.workers
    room = _least(host.tasks, host.group_tasks)
    if room is None:
        return Finding("processes", "good", "no limit on processes and threads")
    found = f"{room:,} more may start, {_workers(plan.workers)} need about {need:,} with threads"
    if room >= need:
        return Finding("processes", "good", found)
    if host.group_tasks == room:
        remedy = "raise pids.max of the container, as in docker run --pids-limit 4096"
    else:
        remedy = "raise the limit of this user (ulimit -u), or end some programs"
    return Finding("processes", "bad", found, f"{remedy}, or fewer workers")


def check_start(host: MachineFacts, plan: DoctorPlan, trial: Callable[[int], str]) -> Finding:
    if host.platform != "linux":
        found = f"the local engine needs Linux, and this is {host.platform}"
        return Finding("start", "bad", found, "train with engine='sim', or on Linux")
    if host.pidfd:
        remedy = "use Linux 5.3 or newer, and a sandbox that allows it"
        return Finding("start", "bad", f"pidfd_open does not work: {host.pidfd}", remedy)
    threads = plan.threads(host.cores)
    trouble = trial(threads)
    if not trouble:
        return Finding(
            "start", "good", f"a forked worker computed with {_count(threads, 'thread')}"
        )
    remedy = "run it again; if that stays, reinstall torch with pip or try another version"
    return Finding("start", "bad", f"a forked worker {trouble}", remedy)


def check_disk(host: MachineFacts, plan: DoctorPlan) -> Finding:
    found = f"{size(host.disk)} free in this folder"
    if not host.writable:
        return Finding("disk", "warn", f"{found}, but it is read-only", "--out in another folder")
    need = SMALL_DISK
    if plan.model_bytes is not None:
        # The checkpoints that are kept and the one being written; weights of start and end.
        need = ((KEEP + 1) * (1 + OF_OPTIMISER) + 2) * plan.model_bytes
        found += f", a run with --out takes about {size(need)}"
    if host.disk >= need:
        return Finding("disk", "good", found)
    return Finding("disk", "warn", found, f"free {size(need)}, or --out on another disk")


def check_extras(host: MachineFacts) -> Finding:
    there = [f"{name} {version}" for name, version in host.extras.items() if version]
    missing = [name for name, version in host.extras.items() if not version]
    if missing:
        there.append(f"without {' and '.join(missing)}")
    return Finding("extras", "good", ", ".join(there))


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _workers(number: int) -> str:
    return _count(number, "worker")


# ---------------------------------------------------------------- the trial


def try_fork(
    threads: int, step: Callable[[int], None] | None = None, patience: float = PATIENCE
) -> str:
    """Fork a worker that takes one `step` in a fresh thread; what went wrong, or nothing."""
    with children_kept():
        return _tried(threads, step or tiny_step, patience)


def _tried(threads: int, step: Callable[[int], None], patience: float) -> str:
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            # Newer Pythons warn of a fork beside threads; the fresh thread is the answer to that.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return f"could not be started: {error.strerror}"
    if pid == 0:
        _be_the_worker(threads, step, patience, writer)
    os.close(writer)
    worker = os.pidfd_open(pid)
    try:
        ending = select.poll()
        ending.register(worker, select.POLLIN)
        answered = bool(ending.poll(1000 * patience))
    finally:
        # Also when Ctrl-C comes; to one that has ended, the signal does nothing.
        signal.pidfd_send_signal(worker, signal.SIGKILL)
        end = os.waitid(os.P_PIDFD, worker, os.WEXITED)
        os.close(worker)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read().decode(errors="replace")
    if not answered:
        return f"gave no answer within {patience:g} s"
    if end is None or end.si_code != os.CLD_EXITED:
        return "was killed" + (f" by {signal.Signals(end.si_status).name}" if end else "")
    return f"failed: {said}" if end.si_status else ""


def tiny_step(threads: int) -> None:
    """Forward and backward of a model just large enough to be shared among threads."""
    torch.set_num_threads(threads)
    model = nn.Linear(256, 256)
    model(torch.ones(512, 256)).square().mean().backward()
    if (used := torch.get_num_threads()) != threads:
        raise RuntimeError(f"torch computes with {_count(used, 'thread')}, not {threads}")


def _be_the_worker(
    threads: int, step: Callable[[int], None], patience: float, writer: int
) -> NoReturn:
    troubles: list[str] = []

    def careful(code: Callable[[], object]) -> None:
        try:
            code()
        except BaseException as error:
            troubles.append(f"{type(error).__name__}: {error}")

    def compute() -> None:
        # Should the doctor itself be killed, a worker that hangs still ends.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2 * patience)
        # A thread pool of the parent is not there after a fork; a fresh thread makes its own.
        fresh = threading.Thread(target=careful, args=(lambda: step(threads),))
        fresh.start()
        fresh.join()

    try:
        careful(compute)
        os.write(writer, "".join(troubles).encode()[:4096])
    finally:
        os._exit(len(troubles))
