"""All ops there are, for whoever wants each of them: tests, and lists of what a platform would run."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import quire.ops
from quire.ops.base import Op


def _find_ops() -> tuple[Op[Any], ...]:
    """Those that the modules of this package define, in the order of the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(quire.ops.__path__) if module.name != "registry")
    modules = [importlib.import_module(f"quire.ops.{name}") for name in names]
    values = (value for module in modules for value in vars(module).values())
    return tuple({id(value): value for value in values if isinstance(value, Op)}.values())


OPS = _find_ops()
