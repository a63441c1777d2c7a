"""Kernels that are used only where they agree with simpler ones on this device, by this compiler.

Inline assembly and copies by the tensor memory unit depend on what the compiler makes of them. Each such kernel is
compared once, on made-up activations, with one that has neither.

Where bits are promised, random activations say little: sums in another order differ in the last bits of float32,
which rounding to 16 bits hides but for one result in tens of thousands. `cancelling` makes activations whose results
are nothing but those last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from quire.utils.log import get_logger

logger = get_logger(__name__)

_TOLERANCE = 0.02  # of the norm; sums of 16-bit activations in another order differ by a tenth of that
_agreed: dict[Hashable, bool] = {}


def cancelling(lines: Tensor) -> Tensor:
    """Activations x [n, K] whose dot products with lines of a weight [n, K] are 0 but for rounding, in that type.

    Four entries of each row are chosen so that they take back what the others add up to, each what the last one left.
    The others are of many sizes: sums of 16-bit numbers of one size would need no rounding.
    """
    exact, generator = lines.double(), torch.Generator(lines.device).manual_seed(0)
    sizes = 1 - 16 * torch.rand(lines.shape, generator=generator, device=lines.device)
    x = 64 * torch.randn(lines.shape, generator=generator, device=lines.device) * sizes.exp2()
    x = x.to(lines.dtype).double()
    columns = exact.abs().topk(min(4, exact.shape[1]), dim=1).indices
    x.scatter_(1, columns, 0.0)
    for column in columns.T[:, :, None]:
        left = (x * exact).sum(1, keepdim=True)
        given = (-left / exact.gather(1, column)).nan_to_num(0.0, 0.0, 0.0)  # of a line of zeros
        x.scatter_(1, column, given.to(lines.dtype).double())
    return x.to(lines.dtype)


def agrees(
    kernel: Hashable,
    x: Tensor,
    fast: Callable[[Tensor], Tensor],
    simple: Callable[[Tensor], Tensor],
    *,
    exactly: bool = False,
) -> bool:
    """Whether `fast` gives what `simple` gives on activations of x's shape. Syncs the device once for each kernel.

    While a CUDA graph is captured nothing can be compared, and a kernel that was not compared before is not used.
    """
    known = _agreed.get(kernel)
    if known is not None:
        return known
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    wanted, found = simple(noise).float(), fast(noise).float()
    error, norm = float((found - wanted).norm()), float(wanted.norm())
    _agreed[kernel] = error <= (0.0 if exactly else _TOLERANCE * norm)
    if not _agreed[kernel]:
        logger.warning(
            "kernel %s is not used: its result differs by %.3g from the simpler one's, whose norm is %.3g",
            kernel,
            error,
            norm,
        )
    return _agreed[kernel]
