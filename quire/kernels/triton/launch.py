"""Dependent launches: on Hopper and later a kernel may start while the one before it drains.

Every kernel of a chain first lets its successor start and then waits for its predecessor; between the two it may
read what no kernel writes, such as weights. That hides most of the gap between small kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

HOPPER = (9, 0)


@triton.jit
def begin_dependent(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def allow_dependents(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@cache
def launch_options() -> dict[str, Any]:
    """Keyword arguments for launches of kernels that call the functions above."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
