"""The backends for structured output by name: one line each. A backend is imported when it is first asked for."""

from __future__ import annotations

from quire.structured.base import Backend
from quire.utils.registry import Registry

BACKENDS: Registry[type[Backend]] = Registry(
    "structured output backend",
    "quire.structured",
    {
        "llguidance": "guidance:GuidanceBackend",
        "xgrammar": "xgrammar_backend:XGrammarBackend",
    },
)
