"""How kernels are launched.

Dependent launches: on Hopper and later a kernel may start while the one before it drains. Every kernel of a chain
first lets its successor start and then waits for its predecessor; between the two it may read what no kernel writes,
such as weights. That hides most of the gap between small kernels.

Triton compiles a kernel anew for a number that is 1, or a multiple of 16, or neither, and for addresses likewise.
Numbers of rows and places of lists, which differ from step to step, are therefore named `do_not_specialize`:
compiling takes seconds, in which nobody gets a token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER = (9, 0)
_SHARED_MEMORY = 232448  # bytes, of Hopper
_BESIDE_KEYS = 12 << 10  # bytes: queries and weights
# What Triton does unasked, up to a version that will not.
FUSED: dict[str, Any] = {"enable_fp_fusion": True}


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


@triton.jit
def prefetch(at):
    """Ask for the cache lines at these addresses, so that they are in the L2 cache when they are read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_tile(tile_ptr, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same of a tile of a matrix whose rows are `stride` elements apart; ROWS rows, all of them there.

    Only of tiles whose sizes are powers of 2, as `tl.arange` wants them.
    """
    LINE: tl.constexpr = 128 // (tile_ptr.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = COLUMNS // LINE
    IS_EVEN: tl.constexpr = (ROWS & (ROWS - 1)) == 0 and (LINES & (LINES - 1)) == 0
    if IS_EVEN and LINES > 0:
        prefetch(tile_ptr + tl.arange(0, ROWS)[:, None] * stride + (tl.arange(0, LINES) * LINE)[None, :])


@triton.jit
def prefetch_lines(weight_ptr, outputs, K, begin, end, N, BK: tl.constexpr, PIECES: tl.constexpr):
    """The same of the first pieces of some lines of a weight."""
    LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = PIECES * BK // LINE
    if LINES > 0:
        lines = begin + tl.arange(0, LINES) * LINE
        prefetch(
            weight_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * K + tl.minimum(lines, end - 1)[None, :]
        )


@triton.jit
def first_seen(positions, WINDOW: tl.constexpr):
    """The first keys that queries at these positions see; below 0 means the first of all.

    WINDOW is 0 for all keys, a number of keys that ends with the query, or with a minus the size of chunks.
    """
    if WINDOW > 0:
        return positions - WINDOW + 1
    if WINDOW < 0:
        return positions // -WINDOW * -WINDOW
    return positions * 0


@triton.jit
def add_sinks(sinks_ptr, heads, mask, highest, total):
    """Sums of weights exp2(score - highest) with those of the heads' sinks, if there are any, added.

    Scores are in base 2, sinks [heads] float32 in base e. Where a sink is so much higher that its weight overflows,
    what is divided by the sum becomes 0, as it should.
    """
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=mask, other=0.0)
        total += tl.exp2(tl.fma(sinks, tl.zeros_like(sinks) + 1.4426950408889634, -highest))
    return total


@cache
def launch_options(*, fused: bool = True) -> dict[str, Any]:
    """Keyword arguments for launches of kernels that call the functions above.

    `fused`: whether a multiplication and an addition may become one, with one rounding.
    """
    options = {"enable_fp_fusion": fused}
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER:
        return {"PDL": True, "launch_pdl": True, **options}
    return {"PDL": False, **options}


def heads_of(q: Tensor, cache: Tensor, soft_cap: float | None, window: int) -> dict[str, int]:
    """What kernels of attention know when they are compiled: q [n, heads, dim], a paged cache, and what is seen."""
    _, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "HAS_CAP": soft_cap is not None,
        "DIM": padded_dim(head_dim),
    }


def padded_dim(head_dim: int) -> int:
    """The width of tiles that hold heads: a power of two that matrix units take."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def unavailable() -> str | None:
    """Why kernels cannot run in this process; None if they can."""
    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        return None
    return "Triton's kernels need an NVIDIA GPU, and PyTorch finds none"


@cache
def shared_memory() -> int:
    """Bytes that a program may have of a multiprocessor's: on Hopper 227 KB, on cards for desktops 99."""
    if not torch.cuda.is_available():
        return _SHARED_MEMORY
    return int(getattr(torch.cuda.get_device_properties(0), "shared_memory_per_block_optin", _SHARED_MEMORY))


def stages_within(wanted: int, piece: int, beside: int = 0) -> int:
    """The number of pipeline stages of `piece` bytes that fit: the wanted number, or what shared memory holds."""
    return max(1, min(wanted, (shared_memory() - beside) // piece))


def kv_stages(wanted: int, keys: int, width: int) -> int:
    """The same for stages of `keys` keys and values, `width` bytes each."""
    return stages_within(wanted, 2 * keys * width, _BESIDE_KEYS)


@cache
def has_tensor_memory() -> bool:
    """Whether tiles are copied by a unit of their own; where there is no device, the interpreter does it."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= HOPPER


def has_large_tiles() -> bool:
    """The same, and shared memory for several large tiles: not on cards for desktops."""
    return has_tensor_memory() and shared_memory() >= _SHARED_MEMORY


@cache
def multiprocessors() -> int:
    """Of the device; some number where there is none, as in Triton's interpreter."""
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 4
