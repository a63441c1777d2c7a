"""The backends for structured output by name: one line each. A backend is imported when it is first asked for."""

from __future__ import annotations

from importlib.util import find_spec

from quire.structured.base import Backend
from quire.types.errors import ConfigError
from quire.utils.registry import Registry

BACKENDS: Registry[type[Backend]] = Registry(
    "structured output backend",
    "quire.structured",
    {
        "llguidance": "guidance:GuidanceBackend",
        "xgrammar": "xgrammar_backend:XGrammarBackend",
    },
)


def check_backend(name: str) -> None:
    """Refuse a backend that is not known or whose package is not installed. Does not import the package."""
    package = BACKENDS.get(name).package
    if package is not None and find_spec(package) is None:
        raise ConfigError(
            f"structured output backend {name!r} needs the Python package {package!r}, which is not installed;"
            " install it, or choose another --structured-outputs-backend"
        )
