"""Triton decides on import whether it compiles or interprets, so that is settled here, before any kernel."""

from __future__ import annotations

import os
import sys

from tests.kernels.device import HAS_TRITON, NATIVE

if HAS_TRITON and not NATIVE and os.environ.get("TRITON_INTERPRET") != "1":
    assert "triton" not in sys.modules, "a test imported triton before tests/kernels chose its interpreter"
    os.environ["TRITON_INTERPRET"] = "1"
