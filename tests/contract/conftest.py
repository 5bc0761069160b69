"""The engines that must keep the contract: every test of this folder runs on each of them."""

import pytest

from tests.contract import common

ENGINES = ["sim", "local"]


def pytest_configure(config: pytest.Config) -> None:
    common.links.over = str(config.getoption("--over"))


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The name of an engine, as `ob.train(engine=...)` takes it."""
    return str(request.param)


@pytest.fixture(scope="session")
def sim_only() -> str:
    """The simulator's name, for what only virtual time can promise; the test says why."""
    return "sim"


@pytest.fixture(scope="session")
def local_only() -> str:
    """The local engine's name, for what only real processes do."""
    return "local"


@pytest.fixture(scope="session", params=["local", "hosts"])
def real(request: pytest.FixtureRequest) -> str:
    """What has real processes: on this machine, or as on others, over TCP."""
    return str(request.param)


@pytest.fixture(autouse=True, scope="session")
def _over_ray(request: pytest.FixtureRequest) -> None:
    if common.links.over == "ray":
        request.getfixturevalue("ray_cluster")


def pytest_runtest_setup(item: pytest.Item) -> None:
    common.turns.begin()


@pytest.fixture(autouse=True)
def _patient(unhurried: None) -> None:
    """Faults come and go; that one worker is given up again and again is another test's matter."""
