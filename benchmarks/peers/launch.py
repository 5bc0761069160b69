"""Start functions in processes of their own, and take their results as JSON."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
READY = "ready"
Start = Callable[..., subprocess.Popen[str]]  # of a command, in a session of its own
QUIET = {
    # One machine: loopback, whatever its host name resolves to.
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the user's home
    # Warnings are for those who develop the peers.
    "PYTHONWARNINGS": "ignore",
}


class PeerMissing(Exception):
    """A peer that is not installed here; the message says how to get it."""


class PeerFailed(Exception):
    """A peer that ended without a result; the message is what it said last."""


def alone(
    target: str, arguments: Mapping[str, Any], threads: int = 1, timeout: float = 900
) -> dict[str, Any]:
    """What `module:function`, the module counted from this package, returns in a fresh process."""
    return together(target, [arguments], threads, timeout)[0]


def together(
    target: str,
    each: Sequence[Mapping[str, Any]],
    threads: int = 1,
    timeout: float = 900,
    on: Sequence[Start] = (),
    more: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The same with one process for each set of arguments, all at once.

    With `on` each is started by one of these; `more` is added to their environment.
    """
    late = threading.Event()
    with ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in each]
        processes: list[subprocess.Popen[str]] = []

        def too_late() -> None:
            late.set()
            _kill(processes)

        watchdog = threading.Timer(timeout, too_late)
        watchdog.start()
        try:
            for arguments, said, start in zip(each, errors, on or [_here] * len(each), strict=True):
                words = [sys.executable, "-m", __name__, target, str(threads)]
                process = start(
                    *words,
                    json.dumps(arguments),
                    environment={**QUIET, "OMP_NUM_THREADS": str(threads), **(more or {})},
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                )
                processes.append(files.enter_context(process))
            results = _conversation(processes)
        finally:
            watchdog.cancel()
            _kill(processes)
        for result, said in zip(results, errors, strict=True):
            if result is None:
                why = f"nothing within {timeout:.0f} s" if late.is_set() else _last_words(said)
                raise PeerFailed(f"{target}: {why}")
    return [result for result in results if result is not None]


def _here(*words: str, environment: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, env={**os.environ, **environment}, start_new_session=True, **options
    )


def _conversation(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any] | None]:
    """Let those who say that they are ready go on together; the last line of each is its result."""
    lines = [process.stdout.readline().strip() for process in processes if process.stdout]
    if all(line == READY for line in lines):
        for process in processes:
            print("go", file=process.stdin, flush=True)
        lines = [process.stdout.readline().strip() for process in processes if process.stdout]
    for process, line in zip(processes, lines, strict=True):
        if line:
            process.wait()
    return [json.loads(line) if line.startswith("{") else None for line in lines]


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End each process with all that it started."""
    for process in processes:
        with suppress(ProcessLookupError):  # it ended by itself, as it should
            os.killpg(process.pid, signal.SIGKILL)


def _last_words(said: IO[str]) -> str:
    said.seek(0)
    lines = [line.strip() for line in said.read().splitlines() if line.strip()]
    # A traceback ends with its error; what follows are the complaints of the clean-up.
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return (errors or lines or ["ended without a word"])[-1]


def gate() -> None:
    """Wait in a started process until the others that were started with it are here too."""
    print(READY, flush=True)
    sys.stdin.readline()


def main() -> None:
    """Call one function in this process and print what it returns."""
    target, threads, arguments = sys.argv[1:]
    import torch

    torch.set_num_threads(int(threads))
    module, name = target.split(":")
    function = getattr(import_module(f"benchmarks.{module}"), name)
    print(json.dumps(function(**json.loads(arguments))), flush=True)


if __name__ == "__main__":
    # Under its real name, so that `gate` and the errors are the ones that the peers import.
    import_module("benchmarks.peers.launch").main()
