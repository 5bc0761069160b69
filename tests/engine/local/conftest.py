"""A brake for runs that are struck, and a folder of their own for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.common import scratch
from tests.engine.local.common import Gate, nothing_left


@pytest.fixture
def gate(unhurried: None) -> Iterator[Gate]:
    made = Gate()
    with nothing_left():
        yield made
    made.close()


@pytest.fixture
def out() -> Iterator[Path]:
    with scratch() as folder:
        yield folder / "run"
