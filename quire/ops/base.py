"""Op: a torch reference that says what is computed, and implementations that compute it faster somewhere.

A layer binds its ops once, when the model is built, and then calls plain functions. An implementation is named by
its module, so nothing is imported that is not used, and kernels need not know of ops.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
F32 = (torch.float32,)


@dataclass(frozen=True)
class Target:
    """What implementations are chosen by: the platform's name, the type of activations, and how weights are kept."""

    platform: str = "cpu"
    dtype: torch.dtype = torch.float32
    quantization: str = "auto"  # a name in quire/layers/quant/registry.py, or "auto"
    deterministic: bool = False  # whether a row's result may never depend on the other rows
    activations: str = "auto"  # what rows are rounded to before matmuls with quantized weights on a CPU
    moe_backend: str = "auto"  # whose kernels experts take: native, triton or torch


@dataclass(frozen=True)
class Implementation:
    """`path` is "module:function" in quire.kernels; `platforms` are those it can run on."""

    name: str
    path: str
    platforms: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    unavailable: str | None = None
    """"module:function" in quire.kernels that says why it cannot run on this machine, or None if it can."""
    varies: bool = False
    """Whether a row's bits may depend on how many others there are."""

    def refuses(self, target: Target) -> str | None:
        """Why it cannot serve this target; None if it can."""
        if target.platform not in self.platforms:
            return f"runs on {', '.join(self.platforms)}"
        if target.dtype not in self.dtypes:
            return f"takes no {target.dtype}"
        if target.deterministic and self.varies:
            return "varies with the number of rows"
        return None if self.unavailable is None else _find(self.unavailable)()

    def load(self) -> Any:
        return _find(self.path)


def native(module: str = "ops", function: str = "{}") -> Implementation:
    """A function of the compiled CPU library; {} is the op's name."""
    return Implementation("native", f"cpu.{module}:{function}", ("cpu",), F32, "cpu.library:unavailable")


def triton(
    module: str,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    *,
    function: str = "{}",
    name: str = "triton",
    unavailable: str | None = None,
    varies: bool = False,
) -> Implementation:
    """A function around Triton kernels; {} is the op's name."""
    return Implementation(name, f"triton.{module}:{function}", ("cuda",), dtypes, unavailable, varies)


def triton_pair(module: str, unavailable: str | None = None) -> tuple[Implementation, Implementation]:
    """Kernels for the fast mode, and those that give a row the same bits in every step, which end in _fixed."""
    fixed = triton(module, function="{}_fixed", name="triton_fixed", unavailable=unavailable)
    return triton(module, unavailable=unavailable, varies=True), fixed


class Op(Generic[F]):
    """What `reference` computes, by whose name it is called.

    `tolerance` is how far float32 results may be apart; tests take inputs from tests/ops/inputs. `changes` are the
    arguments, by index, that the op is there to change.
    """

    def __init__(
        self, reference: F, tolerance: float, *implementations: Implementation, changes: tuple[int, ...] = ()
    ) -> None:
        self.reference, self.tolerance, self.changes = reference, tolerance, changes
        self.name: str = reference.__name__
        self.implementations = tuple(replace(each, path=each.path.format(self.name)) for each in implementations)

    def choose(self, target: Target) -> tuple[F, str]:
        """The first implementation that serves the target, else the reference, and why."""
        reasons = []
        for implementation in self.implementations:
            reason = implementation.refuses(target)
            if reason is None:
                return cast(F, implementation.load()), f"{implementation.name} serves {target.platform}"
            reasons.append(f"{implementation.name} {reason}")
        return self.reference, f"torch reference; {'; '.join(reasons) or 'no other implementation'}"

    def bind(self, target: Target) -> F:
        return self.choose(target)[0]


def _find(path: str) -> Any:
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(f"quire.kernels.{module}"), function)
