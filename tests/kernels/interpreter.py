"""Triton's interpreter without work that changes nothing, and with matmuls that add in one order.

Whenever a kernel calls a function, the interpreter searches all of Triton's language again for what it replaces,
though it did so when the kernel was launched. It computes for every sum whether integers overflow, and says so in
debug mode alone. And it makes the table of number formats anew whenever it looks one up. That was two thirds of its
time.

It multiplies matrices by NumPy, whose library chooses the order of a sum by the processor and the shape of the
matrices. A tensor core adds along the inner dimension in one order, and kernels that promise bits rely on that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

NAME = "triton.runtime.interpreter"
REPLACED = ("_LangPatchScope", "_patch_lang", "_get_np_dtype", "interpreter_builder")


def hasten() -> bool:
    """Make the interpreter faster once it is imported, if it is one that works like this; return whether it is."""
    interpreter = sys.modules.get(NAME)
    if interpreter is None or not all(hasattr(interpreter, name) for name in REPLACED):
        return False
    if getattr(interpreter, "is_hastened", False):
        return True
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "nobody would be told of overflows"
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = known_formats(interpreter)
    builder.__class__.create_dot = ordered_dot(interpreter)
    _patch_once_a_launch(interpreter)
    interpreter.__dict__["is_hastened"] = True
    return True


def ordered_dot(interpreter: ModuleType) -> Callable[..., Any]:
    """`create_dot` of the interpreter's builder, by `ordered_matmul`."""
    half, handle = interpreter.tl.float16, interpreter.TensorHandle

    def values(operand: Any) -> Any:
        if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
            return interpreter._convert_float(operand.data, operand.dtype, half, None).view(np.float16)
        return operand.data

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        return handle(ordered_matmul(values(a), values(b), d.data.dtype) + d.data, d.dtype.scalar)

    return create_dot


def ordered_matmul(a: Any, b: Any, dtype: Any) -> Any:
    """[..., M, K] times [..., K, N]: each element is the sum over k in rising order, whatever the sizes are."""
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        total = a[..., :, 0, None] * b[..., 0, None, :]
        product = np.empty_like(total)
        for k in range(1, a.shape[-1]):
            np.multiply(a[..., :, k, None], b[..., k, None, :], out=product)
            total += product
    return total


def known_formats(interpreter: ModuleType) -> Callable[[Any], Any]:
    language, original = interpreter.tl, interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def of(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        if isinstance(element, language.pointer_type):
            return original(element)
        if element not in known:
            known[element] = original(element)
        return known[element]

    return of


def _patch_once_a_launch(interpreter: ModuleType) -> None:
    language, original = interpreter.tl, interpreter._patch_lang
    patched: set[ModuleType] = set()  # modules of the language, by the launch that runs
    seen_by: dict[Callable[..., Any], set[ModuleType]] = {}

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch(function: Callable[..., Any]) -> Scope:
        if function not in seen_by:
            modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
            seen_by[function] = {module for module in modules if module in (language, language.core)}
        if seen_by[function] and seen_by[function] <= patched:
            return Scope()
        scope: Scope = original(function)
        patched.update(seen_by[function])
        return scope

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch
