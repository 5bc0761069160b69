"""Where hosts cannot be made, these tests are skipped, and say why."""

import pytest

from benchmarks.network.hosts import why_not


@pytest.fixture(autouse=True, scope="session")
def _hosts_can_be_made() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
