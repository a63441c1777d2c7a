"""Shared by all tests: hypothesis without deadlines, none of the user's own settings, Ctrl-C, and how Triton runs."""

from __future__ import annotations

import os
import signal
import sys

# Two workers share two cores: torch's own threads would spin in each other's way, and make its ops ten times as slow.
# OpenMP reads this when torch is imported.
assert "torch" not in sys.modules, "torch was imported before it was told to use one thread"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.kernels.device import HAS_TRITON, NATIVE  # noqa: E402

# A shared machine may stall any single example; the timeout of pytest still bounds a test.
settings.register_profile("quire", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=4)
settings.load_profile("quire")

# A user's own settings must not change what the tests see. QUIRE_CACHE stays: it saves a download.
for name in ("QUIRE_LOG_LEVEL", "QUIRE_DEBUG", "QUIRE_SYSTEM_DATE"):
    os.environ.pop(name, None)

# A shell that starts them in the background has them ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton decides on import whether it compiles or interprets, and transformers imports it: settled before any test.
if HAS_TRITON and not NATIVE and os.environ.get("TRITON_INTERPRET") != "1":
    assert "triton" not in sys.modules, "triton was imported before it was told to interpret"
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without the native library: what the torch references do."""
    from quire.kernels.cpu import library

    monkeypatch.setattr(library, "load", lambda: None)
