"""Split-K matmuls whose partial sums are left as they are: the kernel that reads them next adds them up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.base import Op, triton
from quire.ops.linear import linear_transposed
from quire.ops.norm import add_rms_norm


class PartialSums(NamedTuple):
    """Partial sums of a matmul: of split-K, or of ranks that share it."""

    values: Tensor  # [parts, n, width] float32; results of ranks in their own type
    dtype: torch.dtype  # of their sum

    def summed(self) -> Tensor:
        return sum_of(self.values, self.dtype)


def whole_or_parts(values: Tensor, dtype: torch.dtype) -> Tensor | PartialSums:
    """What an op left as [parts, n, width]: a tensor where there is one part."""
    return values[0] if len(values) == 1 else PartialSums(values, dtype)


def sum_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of parts [parts, n, width], taken one after the other and then rounded."""
    total = values[0].to(torch.float32)
    for part in values[1:]:
        total = total + part
    return total.to(dtype)


def linear_split_k(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, K] @ weight [N, K].T + bias as float32 [parts, n, N], or whole as [1, n, N] in x's type."""
    return linear_transposed(x, weight, bias).unsqueeze(0)


def add_rms_norm_split_k(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(the norm of sum + residual, sum + residual), both [n, width], sum being that of parts [parts, n, width]."""
    return add_rms_norm(sum_of(parts, residual.dtype), residual, weight, eps, weight_offset)


LINEAR_SPLIT_K = Op(linear_split_k, 1e-4, triton("matmul", varies=True))
ADD_RMS_NORM_SPLIT_K = Op(add_rms_norm_split_k, 1e-5, triton("norm", varies=True))
