"""What tests need of a machine: where CI has installed it, a test that lacks it fails; elsewhere it is skipped."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

CI = "QUIRE_CI"


def lacking(what: str) -> NoReturn:
    """Skip the test because of `what`, except where CI has seen to it."""
    if os.environ.get(CI):
        pytest.fail(f"{CI} is set, but {what}")
    pytest.skip(what)


def needs_program(name: str) -> str:
    """The path of a program; without it the test is skipped or fails."""
    return shutil.which(name) or lacking(f"{name} is not installed")
