"""`offbeat doctor`: whether this machine, a way to a store or a Ray cluster is fit for a run."""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table
from rich.text import Text

from offbeat.cli import network, options
from offbeat.cli.output import print_json
from offbeat.cli.run import on_ray
from offbeat.config.checks import at_least
from offbeat.config.limits import (
    OWN,
    available_memory,
    memory_left_in,
    quota_in,
    tasks_left_in,
    text_of,
    tightest_of,
)
from offbeat.engine.hosts.doctor import examine_way, reach
from offbeat.engine.local.doctor import (
    DoctorPlan,
    Finding,
    MachineFacts,
    examine,
    try_fork,
    verdict,
)
from offbeat.engine.ray.cluster import running
from offbeat.engine.ray.doctor import HostFacts, examine_hosts, visit
from offbeat.engine.ray.doctor import here as versions_here
from offbeat.errors import ConfigError, OffbeatError
from offbeat.report.tables import console, size
from offbeat.report.words import visible
from offbeat.transport.dial import Dialer

EXTRAS = ("scikit-learn", "matplotlib", "ray")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
STYLES = {"good": "green", "warn": "yellow", "bad": "bold red"}

Workers = Annotated[
    int, typer.Option("-n", "--workers", help="How many workers are to run here.", metavar="N")
]
ModelBytes = Annotated[
    int | None,
    typer.Option(help="Size of the model, to check that it fits.", metavar="BYTES"),
]


def doctor(
    workers: Workers = 4,
    model_bytes: ModelBytes = None,
    at: network.StoreAt = None,
    token_file: network.TokenFile = None,
    token_variable: network.TokenVariable = None,
    tls: network.Tls = None,
    authority: network.Authority = None,
    cluster: Annotated[
        bool, on_ray("Look at every host of a Ray cluster instead.", None, "--cluster")
    ] = False,
    address: Annotated[
        str | None,
        on_ray("Of the cluster: auto or HOST:6379; else the one this machine belongs to."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Check this machine, the way to a store or a Ray cluster, and say what to change."""
    at_least("--workers", workers, 1)
    if model_bytes is not None:
        at_least("--model-bytes", model_bytes, 1)
    if address is not None and not cluster:
        raise ConfigError("--address is of a Ray cluster: add --cluster, or leave it out")
    if cluster:
        if at is not None:
            raise ConfigError("--at looks at a store and --cluster at a Ray cluster: name one")
        _cluster(address, DoctorPlan(workers, model_bytes), tls, json)
        return
    if at is not None:
        token = network.token_from(token_file, token_variable)
        _way(network.dialer(at, token, tls, authority), json)
        return
    host, plan = here(Path()), DoctorPlan(workers, model_bytes)
    findings = examine(host, plan, try_fork)
    measured = {
        "workers": workers,
        "threads_per_worker": plan.threads(host.cores),
        "model_bytes": model_bytes,
    }
    _tell(findings, verdict(findings, plan), measured, json)


def _tell(
    findings: Sequence[Finding],
    words: str,
    measured: Mapping[str, Any],
    json: bool,
    above: Table | None = None,
) -> None:
    """All that was found, and the exit code that it means."""
    code = OffbeatError.exit_code if any(f.state == "bad" for f in findings) else 0
    if json:
        told = {"ready": not code, "verdict": words, "findings": findings, **measured}
        print_json(told | ({"error": words, "exit_code": code} if code else {}))
    else:
        screen = console(sys.stdout)
        if above is not None:
            screen.print(above)
            screen.print()
        screen.print(findings_table(findings))
        screen.print()
        screen.print(words)
    if code:
        raise typer.Exit(code)


def _way(dialer: Dialer, json: bool) -> None:
    """What lies between here and a store."""
    try:
        found = reach(dialer)
    except OSError as error:
        raise ConfigError(
            f"{dialer.address} cannot be reached ({error.strerror or error}): is a store listening "
            "there (offbeat store --listen), and does a firewall let you through?"
        ) from error
    findings = examine_way(found, available_memory(text_of(Path("/proc/meminfo"))))
    bad = [finding.name for finding in findings if finding.state == "bad"]
    words = "Ready to work there."
    if bad:
        words = f"Not ready to work there: see what to do about {', '.join(bad)}."
    measured = {"round_trip": found.round_trip, "bandwidth": found.bandwidth}
    _tell(findings, words, measured, json)


def _cluster(address: str | None, plan: DoctorPlan, tls: bool | None, json: bool) -> None:
    """All hosts of a Ray cluster, and whether they fit each other."""
    with running(address) as cluster:
        if cluster is None:
            raise ConfigError(
                "this machine belongs to no Ray cluster: join it with ray start "
                "--address=HOST:6379, start one with ray start --head, or name one with --address"
            )
        hosts = visit(cluster, tls)
    findings = examine_hosts(hosts, plan, versions_here())
    measured = {"workers": plan.workers, "model_bytes": plan.model_bytes, "hosts": hosts}
    _tell(findings, verdict(findings, plan), measured, json, hosts_table(hosts))


def hosts_table(hosts: Iterable[HostFacts]) -> Table:
    """Every host of a cluster, and its way to the store's."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("\nhost", no_wrap=True, overflow="ellipsis", max_width=12)
    table.add_column("\naddress", no_wrap=True, overflow="ellipsis", max_width=15)
    for name in ("round\ntrip", "\nbandwidth", "free\nmemory", "free\nCPUs", "\nGPUs", "\nclock"):
        table.add_column(name, justify="right", no_wrap=True)
    for host in hosts:
        cells = [
            "-" if host.round_trip is None else f"{1e3 * host.round_trip:.3g} ms",
            "-" if host.bandwidth is None else f"{size(host.bandwidth)}/s",
            "-" if host.memory is None else size(host.memory),
            f"{host.free.get('CPU', 0):g}/{host.whole.get('CPU', 0):g}",
            str(host.gpus),
            "-" if host.skew is None else f"{round(-host.skew, 1) + 0.0:+.1f} s",
        ]
        table.add_row(Text(visible(host.name)), Text(host.address), *cells)
    return table


def findings_table(findings: Iterable[Finding]) -> Table:
    """What was found, each with its remedy below it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found")
    for finding in findings:
        found = Text(finding.found)
        if finding.remedy:
            found.append(f"\nto do: {finding.remedy}", style="bold")
        table.add_row(Text(finding.state, style=STYLES[finding.state]), finding.name, found)
    return table


# ---------------------------------------------------------------- reading the machine


def here(folder: Path) -> MachineFacts:
    """The machine this runs on; checkpoints would go to `folder`."""
    files, ceiling = _limit("RLIMIT_NOFILE")
    own = OWN.read()

    def tightest(controller: str, read: Callable[[Path], float | None]) -> float | None:
        return tightest_of(own, controller, read)

    return MachineFacts(
        platform=sys.platform,
        python=sys.version_info[:3],
        torch=torch.__version__,
        cuda=torch.version.cuda,
        devices=torch.cuda.device_count() if torch.version.cuda else 0,
        affinity=_affinity(),
        quota=tightest("cpu", quota_in),
        variables={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        memory=available_memory(text_of(Path("/proc/meminfo"))),
        group_memory=_whole(tightest("memory", memory_left_in)),
        files=files,
        files_ceiling=ceiling,
        tasks=_tasks_left(),
        group_tasks=_whole(tightest("pids", tasks_left_in)),
        memfd=trouble(_make_shared_memory),
        pidfd=trouble(lambda: os.close(os.pidfd_open(os.getpid()))),
        disk=shutil.disk_usage(folder).free,
        writable=os.access(folder, os.W_OK),
        extras={name: _version(name) for name in EXTRAS},
    )


def trouble(code: Callable[[], None]) -> str:
    """Why a call into the system does not work here, or nothing."""
    try:
        code()
    except AttributeError:
        return "this system does not have it"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _make_shared_memory() -> None:
    file = os.memfd_create("offbeat-doctor")
    try:
        os.posix_fallocate(file, 0, 1 << 20)
    finally:
        os.close(file)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _limit(name: str) -> tuple[int | None, int | None]:
    """A limit of this process and the most it can be raised to."""
    try:
        import resource
    except ImportError:  # not on every system; the doctor tells so without failing
        return None, None
    soft, hard = resource.getrlimit(getattr(resource, name))
    endless = resource.RLIM_INFINITY
    return None if soft == endless else soft, None if hard == endless else hard


def _tasks_left() -> int | None:
    limit, _ = _limit("RLIMIT_NPROC")
    if limit is None or os.getuid() == 0:  # the limit does not bind root
        return None
    return max(0, limit - tasks_of(os.getuid()))


def tasks_of(user: int) -> int:
    """Processes and threads of a user that can be seen from here."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == user:
                count += len(os.listdir(process / "task"))
        except OSError:
            continue  # it ended meanwhile
    return count


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
