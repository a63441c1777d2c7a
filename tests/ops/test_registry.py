"""The list of ops: none is missing, and each can be tried out."""

from __future__ import annotations

import importlib
import pkgutil

import quire.ops
from quire.ops.base import Op
from quire.ops.registry import OPS


def test_every_op_is_listed_once() -> None:
    modules = [
        importlib.import_module(f"quire.ops.{module.name}") for module in pkgutil.iter_modules(quire.ops.__path__)
    ]
    defined = {
        id(value): value.name for module in modules for value in vars(module).values() if isinstance(value, Op)
    }
    assert sorted(defined.values()) == sorted(op.name for op in OPS)
    assert len({op.name for op in OPS}) == len(OPS)


def test_the_reference_takes_the_inputs_that_an_op_makes() -> None:
    for op in OPS:
        for seed in range(20):
            op.reference(*op.generate_inputs(seed))
