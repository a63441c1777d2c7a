"""All ops there are, and for each of them a function that makes its arguments from a seed.

A module here has the inputs of the ops in the module of quire/ops that has its name, in `INPUTS` by the ops' names.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import quire.ops
from quire.ops.base import Op


def _modules(package: str, paths: list[str]) -> list[ModuleType]:
    return [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(paths)]


OPS: tuple[Op[Any], ...] = tuple(
    {
        id(value): value
        for module in _modules("quire.ops", list(quire.ops.__path__))
        for value in vars(module).values()
        if isinstance(value, Op)
    }.values()
)
INPUTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    name: generate for module in _modules(__name__, list(__path__)) for name, generate in module.INPUTS.items()
}
