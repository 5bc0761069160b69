"""What the tests of hosts share: runs over TCP on this machine, and a network on the way."""

import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  optimisers import it, which takes each fork a second or more

import offbeat as ob
from offbeat.cli import main
from offbeat.config.run_config import Hosts
from offbeat.engine.hosts import store as module
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.tcp_link import DialedStore
from tests.contract.common import Problem, optimizer_for
from tests.engine.hosts.proxy import Proxy

LONG = 40.0  # seconds: a bound, and not what anything takes


def over_tcp(what: Problem, discipline: ob.Discipline | str, **options: Any) -> ob.Run:
    """Train a copy with workers that are processes of this machine, and dial."""
    options = {"batch_size": 4, "epochs": 2, "threads": 1} | options
    if "optimizer" not in options:
        options["optimizer"] = optimizer_for(discipline)
    fresh = what._replace(model=copy.deepcopy(what.model))
    return ob.train(*fresh, discipline=discipline, engine=Hosts(), **options)


@contextmanager
def through(proxy: Proxy, connections: int = 1) -> Iterator[Proxy]:
    """Workers of `over_tcp` reach their store by way of a proxy, over so many connections."""
    listen = module.listen

    def listening(address: Address) -> Any:
        found = listen(address)
        proxy.target = found.getsockname()[1]
        return found

    def dialer(address: Address, *rest: Any) -> Dialer:
        return Dialer(Address("127.0.0.1", proxy.port), *rest)

    def dialed(*what: Any) -> DialedStore:
        return DialedStore(*what, connections)

    proxy.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "listen", listening)
            patch.setattr(module, "Dialer", dialer)
            patch.setattr(module, "DialedStore", dialed)
            yield proxy
    finally:
        proxy.close()


def until(true: Callable[[], bool], what: str = "it") -> None:
    """Wait for something that another thread or process is about to do."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, f"{what} does not happen"
        time.sleep(0.005)  # which orders nothing: it lets others have the processor


class Command:
    """An `offbeat` command in a process of its own, forked from here, so that it starts quickly."""

    def __init__(self, *words: object, folder: Path | None = None):
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                for handle in (1, 2):
                    os.dup2(self.output.fileno(), handle)
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
                sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
                if folder is not None:
                    os.chdir(folder)
                code = main([str(word) for word in words])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        self.handle = os.pidfd_open(self.pid)
        self.code: int | None = None

    @property
    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def says(self, words: str) -> None:
        until(lambda: words in self.said or self.ended, f"saying {words!r}")
        assert words in self.said, self.said

    @property
    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def signal(self, number: int) -> None:
        if not self.ended:
            os.kill(self.pid, number)

    def end(self) -> int:
        """Wait for it; the code that it ends with."""
        until(lambda: self.ended, "the end")
        assert self.code is not None
        return self.code

    def close(self) -> None:
        self.signal(9)
        self.end()
        os.close(self.handle)
        self.output.close()
