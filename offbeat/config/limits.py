"""What the machine and this process's control groups allow: memory, cores, processes."""

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class GroupFiles(NamedTuple):
    """Files in which the kernel tells a process of its control groups, or what they say."""

    membership: str
    mounts: str

    def read(self) -> "GroupFiles":
        return GroupFiles(text_of(Path(self.membership)), text_of(Path(self.mounts)))


OWN = GroupFiles("/proc/self/cgroup", "/proc/self/mountinfo")
MEMINFO = Path("/proc/meminfo")


def memory_left(own: GroupFiles = OWN, meminfo: Path = MEMINFO) -> int | None:
    """Bytes that this process may still take: what the machine has, and its control groups allow.

    Whoever takes more than its group may have is killed without a word.
    """
    found = (available_memory(text_of(meminfo)), tightest_of(own.read(), "memory", memory_left_in))
    return min((int(limit) for limit in found if limit is not None), default=None)


def tightest_of(
    own: GroupFiles, controller: str, read: Callable[[Path], float | None]
) -> float | None:
    """The least that `read` finds in any of this process's control groups."""
    found = map(read, group_folders(controller, *own))
    return min((limit for limit in found if limit is not None), default=None)


def group_folders(controller: str, membership: str, mounts: str) -> Iterator[Path]:
    """Folders of this process's control groups, own and parents': the limits of all bind it.

    `membership` and `mounts` are the texts of /proc/self/cgroup and /proc/self/mountinfo. Both
    versions of control groups are understood, and the mixture of them.
    """
    paths: dict[str, str] = {}
    for line in membership.splitlines():
        _, controllers, own = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), own)
    for line in mounts.splitlines():
        place, _, filesystem = line.partition(" - ")
        root, point = place.split()[3:5]
        kind, _, settings = filesystem.split()[:3]
        if kind == "cgroup2":
            path = paths.get("")
        elif kind == "cgroup" and controller in settings.split(","):
            path = paths.get(controller)
        else:
            continue
        if path is None:
            continue
        inside = PurePosixPath(path)
        # Within a container the path may be the host's, and lead nowhere from here.
        inside = inside.relative_to(root) if inside.is_relative_to(root) else PurePosixPath()
        folder = Path(point) if ".." in inside.parts else Path(point) / inside
        yield folder
        yield from (above for above in folder.parents if above.is_relative_to(point))


def quota_in(folder: Path) -> float | None:
    """Cores that a control group may use."""
    quota, _, period = text_of(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (text_of(folder / f"cpu.cfs_{word}_us") for word in ("quota", "period"))
    allowed, each = number_in(quota), number_in(period)
    return allowed / each if allowed and each and allowed > 0 else None


def memory_left_in(folder: Path) -> int | None:
    """Bytes that a control group may still use; files that are merely cached count as free."""
    names = (
        # Above `high` a group is not killed, but slowed down until nothing moves.
        (("memory.max", "memory.high"), "memory.current", "inactive_file"),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    )
    for limit_files, used_file, cached in names:
        limits = [number_in(text_of(folder / name)) for name in limit_files]
        limit = min((one for one in limits if one is not None), default=None)
        used = number_in(text_of(folder / used_file))
        if limit is not None and used is not None:
            counts = dict(line.split() for line in text_of(folder / "memory.stat").splitlines())
            return max(0, limit - used + int(counts.get(cached, 0)))
    return None


def tasks_left_in(folder: Path) -> int | None:
    """Processes and threads that a control group may still start."""
    limit, used = (number_in(text_of(folder / name)) for name in ("pids.max", "pids.current"))
    return None if limit is None or used is None else max(0, limit - used)


def available_memory(meminfo: str) -> int | None:
    """Bytes that can be had without swapping, from the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return None


def text_of(file: Path) -> str:
    """What a file of the system says; nothing where it does not exist."""
    try:
        return file.read_text()
    except OSError:
        return ""


def number_in(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.lstrip("-").isdigit() else None
