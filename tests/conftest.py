"""Shared by all tests: hypothesis without deadlines, none of the user's own settings, and how Triton runs."""

from __future__ import annotations

import os
import sys

from hypothesis import settings

from tests.kernels.device import HAS_TRITON, NATIVE

# A shared machine may stall any single example; the timeout of pytest still bounds a test.
settings.register_profile("quire", deadline=None)
settings.load_profile("quire")

# A user's own settings must not change what the tests see. QUIRE_CACHE stays: it saves a download.
for name in ("QUIRE_LOG_LEVEL", "QUIRE_DEBUG"):
    os.environ.pop(name, None)

# Triton decides on import whether it compiles or interprets, and transformers imports it: settled before any test.
if HAS_TRITON and not NATIVE and os.environ.get("TRITON_INTERPRET") != "1":
    assert "triton" not in sys.modules, "triton was imported before it was told to interpret"
    os.environ["TRITON_INTERPRET"] = "1"
