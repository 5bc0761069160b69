"""What control groups allow is read from files as the kernel writes them."""

from pathlib import Path

import pytest

from offbeat.config import limits
from offbeat.config.limits import GroupFiles, memory_left
from offbeat.errors import ConfigError
from tests.contract.common import problem, run


def own_groups(folder: Path, membership: str, mounts: str) -> GroupFiles:
    """Files that say so, as in /proc/self."""
    made = GroupFiles(str(folder / "cgroup"), str(folder / "mountinfo"))
    Path(made.membership).write_text(membership)
    Path(made.mounts).write_text(mounts)
    return made


def test_available_memory_is_read() -> None:
    assert limits.available_memory("MemTotal: 99 kB\nMemAvailable:   20 kB\n") == 20 * 1024
    assert limits.available_memory("") is None


def mounted(point: Path, kind: str, settings: str = "rw", root: str = "/") -> str:
    return f"32 31 0:29 {root} {point} rw,relatime shared:9 - {kind} cgroup {settings}\n"


def group(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")
    return folder


@pytest.mark.parametrize(
    ("membership", "kind", "settings", "root", "wanted"),
    [
        ("0::/a/b\n", "cgroup2", "rw", "/", ["a/b", "a", "."]),
        ("0::/\n", "cgroup2", "rw", "/", ["."]),
        ("4:memory:/a\n0::/z\n", "cgroup", "rw,memory", "/", ["a", "."]),
        ("4:cpu,memory:/a\n", "cgroup", "rw,memory,cpu", "/", ["a", "."]),
        ("4:memory:/box/a\n", "cgroup", "rw,memory", "/box", ["a", "."]),
        ("4:memory:/elsewhere\n", "cgroup", "rw,memory", "/box", ["."]),
        ("0::/../../up\n", "cgroup2", "rw", "/", ["."]),
        ("4:memory:/a\n", "cgroup", "rw,cpu", "/", []),
        ("4:memory:/a\n", "cgroup2", "rw", "/", []),
        ("", "cgroup2", "rw", "/", []),
    ],
)
def test_groups_are_found_with_their_parents(
    membership: str, kind: str, settings: str, root: str, wanted: list[str]
) -> None:
    point = Path("/groups")
    mounts = mounted(Path("/other"), "tmpfs") + mounted(point, kind, settings, root)
    assert list(limits.group_folders("memory", membership, mounts)) == [
        point / folder for folder in wanted
    ]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu__max": "150000 100000"}, 1.5),
        ({"cpu__max": "max 100000"}, None),
        ({"cpu__cfs_quota_us": 50000, "cpu__cfs_period_us": 100000}, 0.5),
        ({"cpu__cfs_quota_us": -1, "cpu__cfs_period_us": 100000}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_group(tmp_path: Path, files: dict[str, object], cores: object) -> None:
    assert limits.quota_in(group(tmp_path, **files)) == cores


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory__max": 1000, "memory__current": 300}, 700),
        (
            {
                "memory__max": 1000,
                "memory__current": 300,
                "memory__stat": "anon 1\ninactive_file 200",
            },
            900,
        ),
        ({"memory__max": "max", "memory__current": 300}, None),
        ({"memory__max": 1000, "memory__high": 400, "memory__current": 300}, 100),
        ({"memory__max": "max", "memory__high": 400, "memory__current": 300}, 100),
        ({"memory__max": 1000, "memory__high": "max", "memory__current": 300}, 700),
        ({"memory__max": 100, "memory__current": 300}, 0),
        (
            {
                "memory__limit_in_bytes": 1000,
                "memory__usage_in_bytes": 900,
                "memory__stat": "inactive_file 1\ntotal_inactive_file 50",
            },
            150,
        ),
        ({}, None),
    ],
)
def test_the_memory_left_in_a_group(tmp_path: Path, files: dict[str, object], left: object) -> None:
    assert limits.memory_left_in(group(tmp_path, **files)) == left


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"pids__max": 100, "pids__current": 30}, 70),
        ({"pids__max": "max", "pids__current": 30}, None),
        ({"pids__max": 10, "pids__current": 30}, 0),
        ({}, None),
    ],
)
def test_the_processes_left_in_a_group(
    tmp_path: Path, files: dict[str, object], left: object
) -> None:
    assert limits.tasks_left_in(group(tmp_path, **files)) == left


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_with_too_little_memory_refuses_a_run(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a parent binds too, and what the machine has is no use."""
    point, meminfo = tmp_path / "groups", tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 99999999 kB\n")
    if version == 2:
        own = own_groups(tmp_path, "0::/a/b\n", mounted(point, "cgroup2"))
        group(point / "a", memory__max=10**6, memory__current=10**6 - 5000)
        group(point / "a" / "b", memory__max="max", memory__current=0)
    else:
        own = own_groups(tmp_path, "4:memory:/a/b\n", mounted(point, "cgroup", "rw,memory"))
        group(point / "a", memory__limit_in_bytes=10**6, memory__usage_in_bytes=10**6 - 5000)
        group(point / "a" / "b", memory__limit_in_bytes=10**9, memory__usage_in_bytes=0)
    assert memory_left(own, meminfo) == 5000
    told = {limits.OWN.membership: own.membership, limits.OWN.mounts: own.mounts}
    told[str(limits.MEMINFO)] = str(meminfo)
    plain = limits.text_of
    monkeypatch.setattr(limits, "text_of", lambda f: plain(Path(told.get(str(f), str(f)))))
    with pytest.raises(ConfigError, match="container with more memory"):
        run("local", problem(), "bsp", workers=2)
