"""What the figures were measured on."""

import os
import platform
import resource
import time
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Cores, memory, versions and threads, as plain values."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def described(facts: dict[str, Any]) -> str:
    """The same in one line."""
    return (
        f"{facts['cores']} cores ({facts['processor']}), {facts['memory_bytes'] / 1e9:.0f} GB, "
        f"Python {facts['python']}, torch {facts['torch']}"
    )


class Others:
    """How busy other programs keep the machine while something is measured."""

    def __init__(self) -> None:
        self.start = (time.monotonic(), _all_seconds(), _own_seconds())

    def share(self) -> float:
        """Of all the cores since the start, the part that went to programs not started here."""
        elapsed, everyone, own = (
            now - then
            for now, then in zip(
                (time.monotonic(), _all_seconds(), _own_seconds()), self.start, strict=True
            )
        )
        return max(0.0, everyone - own) / (elapsed * len(os.sched_getaffinity(0)))


def _own_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in usage)


def _all_seconds() -> float:
    try:
        with open("/proc/stat") as lines:
            fields = [int(field) for field in lines.readline().split()[1:9]]
    except OSError:
        return _own_seconds()  # not Linux: nothing is known of others
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the general name has to do
    return platform.processor() or platform.machine()
