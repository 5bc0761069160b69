"""What every test shares: one thread of arithmetic, the same examples, the regenerate switch."""

import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from offbeat.engine import server

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


@pytest.fixture(scope="session")
def regenerate(request: pytest.FixtureRequest) -> bool:
    """True when golden files are to be written, not compared with."""
    return bool(request.config.getoption("--regenerate"))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little patience a slow machine makes workers look silent; no run ends because of it."""
    monkeypatch.setattr(server, "IN_VAIN", 1_000_000)
