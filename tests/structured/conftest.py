"""One backend for all tests here: building its tree of tokens takes longer than any test."""

from __future__ import annotations

import pytest

from quire.structured.guidance import GuidanceBackend
from tests.structured.words import VOCABULARY


@pytest.fixture(scope="session")
def backend() -> GuidanceBackend:
    return GuidanceBackend(VOCABULARY)
