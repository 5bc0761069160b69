"""Hosts made of network namespaces: each has an address, a wire to a switch, and processes.

They share the kernel, the processors and the files of this machine, and nothing else: what one
says to another goes over its wire, which can be made slow, late, or cut. That needs root and the
tools of iproute2; `why_not` tries, and says what is missing.

Nothing stays behind: a process of its own waits for the end of the one that has made the hosts, and
removes them if that was killed; if both were, whoever makes hosts next sweeps.
"""

import ctypes
import fcntl
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

NAMES = re.compile(r"^(offbeat-[0-9a-f]{8})-\d+$")  # of our namespaces; the first part is a run's
LOCKS = Path("/run/offbeat-hosts")  # held while the run lives that has namespaces of that name
NAMESPACES = Path("/run/netns")
NETWORK, FIRST = "192.168.1", 5  # the first host has the address of the page about hosts
BURST, BURST_SECONDS = 32_000, 0.002  # bytes that may go at once, and of a fast wire more
QUEUE = 0.05  # seconds that a frame may wait before a wire that is full
DELAY = Path(__file__).with_name("delay.py")
LONG = 60.0  # seconds after which it is a fault if something has not happened
# Each command has a name of its host, and no other's /dev/shm; a sysfs of its own comes with ip.
ENTER = 'echo "$0" >/proc/sys/kernel/hostname && mount --bind "$1" /dev/shm && shift && exec "$@"'

NEW_MOUNTS, NEW_NAMES, NEW_NETWORK = 0x20000, 0x4000000, 0x40000000
DIES_WITH_PARENT = 1
BIND, SLAVE = 0x1000, 0x84000  # a mount that shows a folder; mounts that nobody outside sees
_system = ctypes.CDLL(None, use_errno=True)


class HostsError(Exception):
    """A host could not be made or changed; it says what the tool said."""


def tool(*words: str, lines: Sequence[str] = ()) -> str:
    """Run a tool, on `lines` of input if there are any; what it has printed."""
    done = subprocess.run(words, input="\n".join(lines), text=True, capture_output=True)
    if done.returncode:
        raise HostsError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def until(what: Callable[[], Any], told: str, seconds: float = LONG) -> Any:
    """Look again until something is true: for what nobody can be told of."""
    end = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:g} s still not: {told}")
        time.sleep(0.01)
    return found


def call(name: str, *arguments: Any) -> None:
    """Call the system, where Python has no function for it."""
    if getattr(_system, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


class Forked:
    """A process of ours, with as much of `subprocess.Popen` as is needed here."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, seconds: float = LONG) -> int:
        until(lambda: self.poll() is not None, f"process {self.pid} ends", seconds)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Host:
    """One machine: `run` starts processes there, everything else happens to it."""

    def __init__(self, switch: str, name: str, number: int, folder: Path):
        self.switch, self.namespace, self.number, self.folder = switch, name, number, folder
        self.name = f"lab{number}"
        self.address = f"{NETWORK}.{FIRST - 1 + number}"
        self.started: list[subprocess.Popen[Any] | Forked] = []
        for part in ("tmp", "shm"):
            (folder / part).mkdir(parents=True)

    def run(
        self, *words: str | Path, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in the host's folder, as a group of processes of its own."""
        before = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", ENTER]
        inside = [self.name, str(self.folder / "shm"), *map(str, words)]
        found = subprocess.Popen(
            before + inside,
            **{
                "cwd": self.folder,
                "start_new_session": True,
                "stdin": subprocess.DEVNULL,
                "env": {**os.environ, "TMPDIR": str(self.folder / "tmp"), **(environment or {})},
                **options,
            },
        )
        self.started.append(found)
        return found

    def fork(self, main: Callable[[], int], out: Path, complaints: Path) -> "Forked":
        """Call `main` in a process of this host that has everything imported already.

        What it prints goes to two files; what it returns is its exit code.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():  # threads of the parent are not there, and not missed
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            self._become(main, out, complaints)
        found = Forked(pid)
        self.started.append(found)
        return found

    def _become(self, main: Callable[[], int], out: Path, complaints: Path) -> NoReturn:
        """In the forked process: what `run` does with commands."""
        code = 1
        try:
            call("prctl", DIES_WITH_PARENT, signal.SIGKILL)
            os.setsid()
            for lock in _Lock.held:
                os.close(lock)
            for number, path in ((0, Path(os.devnull)), (1, out), (2, complaints)):
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(handle, number)
                os.close(handle)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            warnings.simplefilter("ignore")
            self._move_in()
            code = main()
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def _move_in(self) -> None:
        inside = os.open(NAMESPACES / self.namespace, os.O_RDONLY)
        call("setns", inside, NEW_NETWORK)
        os.close(inside)
        call("unshare", NEW_MOUNTS | NEW_NAMES)
        call("mount", None, b"/", None, SLAVE, None)
        call("mount", bytes(self.folder / "shm"), b"/dev/shm", None, BIND, None)
        socket.sethostname(self.name)
        vars(platform)["_uname_cache"] = None  # it may have asked before
        os.environ["TMPDIR"] = str(self.folder / "tmp")
        tempfile.tempdir = None
        os.chdir(self.folder)

    def processes(self) -> list[int]:
        """All that live here, whoever has started them."""
        return processes_in(self.namespace)

    def kill(self) -> None:
        """All its processes die at once; whoever was connected hears of it, unless it is cut off.

        Nobody can start another while the first ones die.
        """
        for process in self.started:  # one of a moment ago may not have come into the namespace
            process.kill()
        kill_in(self.namespace)
        for process in self.started:
            process.wait()

    # ------------------------------------------------------------ its wire

    def limit(self, bits: float | None) -> None:
        """So many bits a second go over its wire each way; None takes the limit away."""
        for namespace, device in self._ends():
            if bits is None:
                with suppress(HostsError):  # there was none
                    tool("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
                continue
            burst = max(BURST, int(bits / 8 * BURST_SECONDS))
            shape = [f"{int(bits)}bit", "burst", str(burst), "latency", f"{int(1000 * QUEUE)}ms"]
            place = ["dev", device, "root", "tbf", "rate"]
            tool("tc", "-n", namespace, "qdisc", "replace", *place, *shape)

    def cut(self) -> None:
        """From here on everything vanishes, and nobody is told: the wire still looks whole."""
        tool("ip", "-n", self.switch, "link", "set", self.name, "nomaster")

    def heal(self) -> None:
        tool("ip", "-n", self.switch, "link", "set", self.name, "master", "switch")

    def said(self) -> int:
        """Frames that have come from this host to the switch, whether or not they went on."""
        words = tool("ip", "-n", self.switch, "-s", "link", "show", self.name).splitlines()
        at = next(index for index, line in enumerate(words) if line.strip().startswith("RX:"))
        return int(words[at + 1].split()[1])

    def speaks_in_vain(self) -> None:
        """Wait, after a cut, until it has said something that nobody has heard."""
        before = self.said()
        until(lambda: self.said() > before, f"{self.name} says something")

    def dials_in_vain(self) -> None:
        """Wait, after a cut, until it has missed a connection and tries to make another."""
        until(lambda: self.ports("syn-sent"), f"{self.name} dials")

    def ports(self, state: str = "established") -> set[str]:
        """Its ends of TCP connections in that state."""
        words = ("ip", "netns", "exec", self.namespace, "ss", "-Htn", "state", state)
        return {line.split()[2] for line in tool(*words).splitlines()}

    def tear(self) -> None:
        """Its connections break, at both ends, and it can make others at once."""
        tool("ip", "netns", "exec", self.namespace, "ss", "-KHtn", "state", "established")

    def _ends(self) -> list[tuple[str, str]]:
        return [(self.namespace, "eth0"), (self.switch, self.name)]


class Hosts:
    """So many hosts on one switch, from `with` until its end; `hosts[1]` is the first.

    `delays` are seconds that each host's wire takes, one way.
    """

    def __init__(self, count: int, folder: Path, delays: Sequence[float] = ()):
        self.count, self.folder = count, folder
        self.delays = [*delays, *[0.0] * (count - len(delays))]
        self.all: list[Host] = []
        self.kept = ExitStack()

    def __getitem__(self, number: int) -> Host:
        return self.all[number - 1]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.all)

    def __enter__(self) -> Self:
        sweep()
        run = f"offbeat-{os.urandom(4).hex()}"
        try:
            self.kept.enter_context(_Lock(run))
            self._watch(run)
            self.kept.callback(remove, run)
            self._make(run)
        except BaseException:
            self.kept.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in self.all:
            host.kill()
        self.kept.close()
        for host in self.all:
            for process in host.started:
                for stream in (process.stdin, process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()

    def _watch(self, run: str) -> None:
        """Have a process remove them when this one is gone."""
        words = [sys.executable, "-I", "-S", __file__, run, str(os.getpid())]
        self.kept.callback(_end, subprocess.Popen(words, start_new_session=True))

    def _make(self, run: str) -> None:
        switch = f"{run}-0"
        tool("ip", "netns", "add", switch)
        tool("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        tool("ip", "-n", switch, "link", "set", "switch", "up")
        for number in range(1, self.count + 1):
            host = Host(switch, f"{run}-{number}", number, self.folder / f"lab{number}")
            tool("ip", "netns", "add", host.namespace)
            if self.delays[number - 1]:
                self._late(host, self.delays[number - 1])
            else:
                words = ["type", "veth", "peer", "name", "eth0", "netns", host.namespace]
                tool("ip", "-n", switch, "link", "add", host.name, *words)
            # Nothing says anything by itself: no addresses of IPv6 that have to be announced.
            port = [
                f"link set {host.name} {what}" for what in ("addrgenmode none", "master switch up")
            ]
            tool("ip", "-n", switch, "-batch", "-", lines=port)
            own = [f"link set eth0 {what}" for what in ("addrgenmode none", "up")]
            own += ["link set lo up", f"address add {host.address}/24 dev eth0"]
            tool("ip", "-n", host.namespace, "-batch", "-", lines=own)
            self.all.append(host)

    def _late(self, host: Host, seconds: float) -> None:
        ends = [host.switch, host.name, host.namespace, "eth0"]
        # Of another interpreter than ours it needs nothing; without `site` it starts at once.
        words = [sys.executable, "-I", "-S", str(DELAY), *ends, str(seconds)]
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.kept.callback(_end, process)
        assert process.stdout is not None
        said = process.stdout.readline()
        if said != "ready\n":
            raise HostsError(f"no wire with a delay: {said}{process.stdout.read()}".strip())


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.communicate()


# ---------------------------------------------------------------- namespaces, ours and others'


class _Lock:
    """Says that a run lives; the system opens it when its process is gone, however that went."""

    held: ClassVar[set[int]] = set()  # by this process: one that is forked lets go of them

    def __init__(self, run: str):
        LOCKS.mkdir(parents=True, exist_ok=True)
        self.path = LOCKS / run
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.file)
            raise
        self.held.add(self.file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        self.path.unlink(missing_ok=True)
        self.held.remove(self.file)
        os.close(self.file)


def ours() -> set[str]:
    """The namespaces that are there of any run of this kind."""
    if not NAMESPACES.is_dir():
        return set()
    return {name for name in os.listdir(NAMESPACES) if NAMES.match(name)}


def sweep() -> None:
    """Remove what runs have left behind that were killed; those that live hold a lock."""
    found = (NAMES.match(name) for name in ours())
    for run in {match[1] for match in found if match}:
        with suppress(OSError), _Lock(run):
            remove(run)


def remove(run: str) -> None:
    """The namespaces of one run, and every process in them."""
    for name in ours():
        if name.startswith(f"{run}-"):
            kill_in(name)
            with suppress(HostsError):  # another one sweeps at the same time
                tool("ip", "netns", "del", name)


def processes_in(namespace: str) -> list[int]:
    """Who lives in a namespace; one that is dead and not yet waited for does not."""
    found = []
    try:
        inside = os.stat(NAMESPACES / namespace)
    except FileNotFoundError:
        return []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                theirs = os.stat(f"/proc/{name}/ns/net")
                if (theirs.st_dev, theirs.st_ino) == (inside.st_dev, inside.st_ino):
                    found.append(int(name))
    return found


def kill_in(namespace: str) -> None:
    def all_gone() -> bool:
        found = processes_in(namespace)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    until(all_gone, f"nobody lives in {namespace}")


@cache
def why_not(delay: bool = False) -> str:
    """Why hosts cannot be made here, or nothing; with `delay` also wires that are late."""
    if os.geteuid():
        return "network namespaces need root"
    for name in ("ip", "tc", "unshare", "mount"):
        if shutil.which(name) is None:
            package = "iproute2" if name in ("ip", "tc") else "util-linux"
            return f"{name} was not found: install {package}"
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Hosts(1, Path(folder), [0.001] if delay else ()) as hosts,
        ):
            hosts[1].limit(1e6)
            hosts[1].cut()
            hosts[1].heal()
            process = hosts[1].run("true", stderr=subprocess.PIPE, text=True)
            said = process.communicate()[1]
            if process.returncode:
                return f"nothing runs in a network namespace: {said.strip()}"
    except (HostsError, OSError) as error:
        return f"hosts cannot be made of network namespaces: {error}"
    return ""


def outlive(run: str, maker: int) -> None:
    """Wait for the end of the one that has made these hosts, and remove what it left behind."""
    with suppress(ProcessLookupError), open(os.pidfd_open(maker), "rb") as handle:
        if os.getppid() == maker:
            select.select([handle], [], [])
    remove(run)
    (LOCKS / run).unlink(missing_ok=True)


def main(words: Sequence[str]) -> int:
    """With a run's name and maker its watch; else what `make cluster-test` asks."""
    if words:
        outlive(words[0], int(words[1]))
        return 0
    reason = why_not()
    if reason:
        print(reason)
    return bool(reason)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
