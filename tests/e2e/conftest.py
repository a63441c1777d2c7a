"""What the end-to-end tests of one process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Running, start


@pytest.fixture(scope="session")
def default_server() -> Iterator[Running]:
    """`quire serve` on the default model. Starting it takes seconds: for all tests that leave it as it is."""
    running = start("--max-model-len", "4096", "--kv-cache-memory", "256MiB")
    yield running
    assert running.stop() == 0, "".join(running.log)
