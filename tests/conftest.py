"""What every test shares: one thread of arithmetic, the same examples, the regenerate switch."""

import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from offbeat.config.run_config import OnRay
from offbeat.engine.ray.cluster import RayCluster, connected
from offbeat.protocol import server

# Several test processes share few cores, and sums in one thread always add in the same order.
torch.set_num_threads(1)

# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every machine. A slow machine is no finding, so nothing here reads a clock.
settings.register_profile(
    "offbeat",
    deadline=None,
    derandomize=True,
    print_blob=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("offbeat")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="write the golden trajectories anew instead of comparing with them",
    )
    parser.addoption(
        "--over",
        choices=("memory", "tcp", "ray"),
        default="memory",
        help="how the real processes of the contract suite talk to their server",
    )


@pytest.fixture(scope="session")
def regenerate(request: pytest.FixtureRequest) -> bool:
    """True when golden files are to be written, not compared with."""
    return bool(request.config.getoption("--regenerate"))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little patience a slow machine makes workers look silent; no run ends because of it."""
    monkeypatch.setattr(server, "IN_VAIN", 1_000_000)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """One Ray cluster of this machine for all tests: it takes seconds to start."""
    with connected(OnRay(worker_resources={"CPU": 1}), 4) as cluster:
        yield cluster


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Without a sandbox, which needs rights that a container does not give, and without its own errands.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser, for the tests of pages."""
    from playwright.sync_api import expect, sync_playwright  # only they need it

    expect.set_options(timeout=60_000)  # milliseconds; a slow machine is no finding
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(
            "pages are tested in Chromium, and none was found: install it with make browser, "
            "or by hand (Debian and Ubuntu: apt install chromium)"
        )
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A script that a test leaves in the middle of its loop still listens for its end."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
