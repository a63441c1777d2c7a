"""Shared by all tests: hypothesis without deadlines, none of the user's own settings, Ctrl-C, and how Triton runs."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from contextlib import ExitStack

# Two workers share two cores: torch's own threads would spin in each other's way, and make its ops ten times as slow.
# OpenMP reads this when torch is imported.
assert "torch" not in sys.modules, "torch was imported before it was told to use one thread"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.kernels import interpreter  # noqa: E402
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

# Tests of real processes and sockets, which a stalled machine can fail: one that fails is run once more.
REAL_PROCESSES = tuple(
    f"tests/{folder}/" for folder in ("agents", "cli", "docs", "e2e", "engine", "server", "worker")
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all modules without collecting garbage, and never walk over what they made: a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else extensions report what they find alive in the end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return  # a machine with a GPU that has not all of the test packages
    for item in items:
        if item.nodeid.startswith(REAL_PROCESSES):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why a test was run again: each is a race that wants to be found."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"failed, then run again: {report.nodeid}", yellow=True)
        terminalreporter.line(report.longreprtext)


def pytest_runtest_setup() -> None:
    interpreter.hasten()


@pytest.fixture
def contexts() -> Generator[ExitStack]:
    """Contexts that a test enters and that end with it, such as entries of a registry."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without the native library: what the torch references do."""
    from quire.kernels.cpu import library

    monkeypatch.setattr(library, "load", lambda: None)
