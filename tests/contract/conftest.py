"""The engines that must keep the contract: every test of this folder runs on each of them."""

import pytest

ENGINES = ["sim"]


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The name of an engine, as `ob.train(engine=...)` takes it."""
    return str(request.param)
