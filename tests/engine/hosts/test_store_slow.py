"""A link that is slow on purpose: its worker is in its link, and only the other one waits."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.config.run_config import Hosts
from offbeat.engine.hosts import store as hosts
from offbeat.log.log import read
from offbeat.log.records import Linked, Measured
from offbeat.report.digest import digest
from offbeat.report.grid import side_by_side
from offbeat.report.page import page
from offbeat.report.tables import figures
from offbeat.store.board import LinkState, Row
from offbeat.transport.dial import Address
from offbeat.transport.tcp_link import DialedStore
from offbeat.watch.state import IN_LINK, WAITING, RunState
from tests.contract.common import scratch

RATE = 2e6  # bytes a second through the slow link, each way
SLOW, FAST = 0, 1  # workers
PIECE = 1 << 13


def forward(source: socket.socket, sink: socket.socket) -> None:
    """Pass bytes on, as slowly as they are to go."""
    try:
        while some := source.recv(PIECE):
            time.sleep(len(some) / RATE)  # the slow link itself: nothing is ordered by it
            sink.sendall(some)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        sink.close()


class SlowWay:
    """A place to dial behind which everything goes on to a store, slowly; threads of a worker."""

    def __init__(self, to: Address):
        self.to = to
        self.listening = socket.create_server(("127.0.0.1", 0))
        # Little is under way at a time, as in a network of that speed.
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        self._thread(self._meet)

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.listening.getsockname()[1])

    def _thread(self, what: Any, *about: Any) -> None:
        threading.Thread(target=what, args=about, daemon=True).start()

    def _meet(self) -> None:
        while True:
            near, _ = self.listening.accept()
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
            far.connect((self.to.host, self.to.port))
            for wire in (near, far):
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE)
            self._thread(forward, near, far)
            self._thread(forward, far, near)


def dialed(dialer: Any, request: Any, patience: float) -> DialedStore:
    if request.number == SLOW:
        dialer = replace(dialer, address=SlowWay(dialer.address).address)
    return DialedStore(dialer, request, patience)


class Watching(ob.Listener):
    """What the live page would have shown of each worker's state."""

    def __init__(self) -> None:
        self.state: RunState | None = None
        self.seen: set[tuple[int, str, str]] = set()
        self.links: set[int] = set()

    def begin(self, store: Any, samples: int) -> None:
        self.store, self.state = store, RunState(store.cells.shape[1])

    def see(self, record: Any) -> None:
        assert self.state is not None
        self.state.see(record)
        self.idle()

    def idle(self) -> None:
        assert self.state is not None
        cells = self.store.cells
        now = self.state.time + 1e-3
        picture = self.state.picture(now, 0, 0, 100, "", cells)
        self.seen |= {(row.number, row.state, row.about) for row in picture.rows}
        self.links |= {int(one) for one in cells[Row.LINK]}
        self.flows = [row.link for row in picture.rows]


@pytest.fixture(scope="module")
def out() -> Iterator[Path]:
    with scratch() as folder:
        yield folder / "run"


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(32, 200), torch.randn(32, 200))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(200, 200)  # 160 kB


@pytest.fixture(scope="module")
def slow(out: Path) -> tuple[ob.Run, Watching]:
    """A run of two workers in lock-step, of which one has a slow link."""
    watching = Watching()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "DialedStore", dialed)
        run = ob.train(
            model(), data(), F.mse_loss, discipline="bsp", workers=2, batch_size=4, epochs=3,
            optimizer=partial(torch.optim.SGD, lr=0.01), engine=Hosts(), out=out,
            listeners=[watching],
        )  # fmt: skip
    return run, watching


def test_who_is_in_its_link_does_not_wait_and_who_waits_is_not_in_its_link(slow: Any) -> None:
    summary = slow[0].summary()
    at = summary.per_worker
    assert at[SLOW].link_share > 0.7
    assert at[SLOW].in_link > 5 * at[SLOW].wait
    assert at[FAST].wait > 5 * at[FAST].in_link
    told = dict(figures(summary))
    assert told["slow link"].startswith(f"worker {SLOW} on {at[SLOW].link.host} spent ")
    assert "worker 1" not in told["slow link"]


def test_bandwidth_is_that_of_the_link_in_both_directions(slow: Any) -> None:
    at = slow[0].summary().per_worker
    # No more gets through, and on a slow machine less; the other link carries hundreds of times it.
    for rate in (at[SLOW].link.up, at[SLOW].link.down):
        assert 0 < rate < 2 * RATE
    assert at[SLOW].link.round_trip > 0
    each = at[SLOW].contributions * 160_000
    assert each < at[SLOW].link.sent < 1.1 * each
    assert each < at[SLOW].link.received < 1.3 * each  # the first pull, and the end


def test_the_log_tells_it_in_few_records_that_a_replay_passes_over(slow: Any, out: Path) -> None:
    records = list(read(out / "log.jsonl"))
    measured = [one for one in records if isinstance(one, Measured)]
    assert {one.worker for one in measured} == {SLOW, FAST}
    assert len(measured) <= 2 * (2 + slow[0].summary().seconds)
    assert sum(one.sent + one.received for one in measured) == slow[0].summary().wire_bytes
    assert {one.worker for one in records if isinstance(one, Linked)} == {SLOW, FAST}
    assert ob.replay(out, model(), data(), F.mse_loss).check().identical


def test_a_report_from_the_folder_has_the_same_figures(slow: Any, out: Path) -> None:
    found, told = digest(out), slow[0].summary()
    assert [one.link for one in found.summary.per_worker] == [one.link for one in told.per_worker]
    assert found.summary.wire_bytes == told.wire_bytes
    written = json.loads((out / "summary.json").read_text())
    assert written["per_worker"][SLOW]["link"]["up"] == told.per_worker[SLOW].link.up
    text = page(side_by_side([found]))
    assert "time in its link" in text
    assert f"Worker {SLOW} on" in text


def test_the_live_page_shows_the_link_and_not_a_wait(slow: Any) -> None:
    watching = slow[1]
    of = {number: {state for n, state, _ in watching.seen if n == number} for number in range(2)}
    assert {LinkState.SENDING, LinkState.RECEIVING} <= watching.links
    assert IN_LINK in of[SLOW]
    assert WAITING in of[FAST]
    assert any(
        n == FAST and state == WAITING and "in its link" in about
        for n, state, about in watching.seen
    )
    assert "↑" in watching.flows[SLOW]
    assert "↓" in watching.flows[SLOW]


def test_one_machine_has_no_links() -> None:
    run = ob.train(
        model(), data(), F.mse_loss, discipline="asp", workers=2, batch_size=4, epochs=1,
        optimizer=partial(torch.optim.SGD, lr=0.01), engine="local",
    )  # fmt: skip
    summary = run.summary()
    assert all(one.link is None for one in summary.per_worker)
    assert all("link" not in one for one in summary.to_dict()["per_worker"])
    assert not {"network", "slow link"} & dict(figures(summary)).keys()
