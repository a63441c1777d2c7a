"""Shared by all tests: hypothesis without deadlines, and none of the user's own settings."""

from __future__ import annotations

import os

from hypothesis import settings

# A shared machine may stall any single example; the timeout of pytest still bounds a test.
settings.register_profile("quire", deadline=None)
settings.load_profile("quire")

# A user's own settings must not change what the tests see. QUIRE_CACHE stays: it saves a download.
for name in ("QUIRE_LOG_LEVEL", "QUIRE_DEBUG"):
    os.environ.pop(name, None)
