"""Grouped matmuls and routing over tensors: the sparse MLP's kernels of the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.library import bound
from quire.kernels.cpu.matrix import KERNEL_PREFIXES, Matmul, PackedMatrix
from quire.kernels.cpu.tracing import empty

# As gate.h and routing.cpp number them.
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
_SCORES = ("softmax", "sigmoid", "sqrt_softplus", "logits")
_WEIGHTINGS = ("scores", "softmax", "sigmoid", "sparse_mixer")

# As grouped.h: elements of gathered rows and their results at a time, and tokens that are taken nevertheless.
_MOST_GROUPED, _LEAST_TOKENS = 1 << 24, 64


def grouped_workspace(inner: int, outputs: int, num_tokens: int, top_k: int) -> int:
    """Most memory that a grouped matmul takes beside its arguments and result."""
    most = max(_MOST_GROUPED, _LEAST_TOKENS * top_k * (inner + outputs))
    gathered = min(most, num_tokens * top_k * (inner + outputs))
    return 4 * (gathered + gathered * inner // (inner + outputs))  # and rows as integers


class GroupedMatmul:
    """Each row times the matrix of its expert: the two stages of a sparse MLP.

    `experts` has each expert's matrices, one above the other; `bias` is [experts, outputs]. See Matmul about
    `activations`.
    """

    def __init__(
        self, experts: Sequence[Sequence[PackedMatrix]], bias: Tensor | None = None, activations: str = "auto"
    ) -> None:
        biases: Sequence[Tensor | None] = [None] * len(experts) if bias is None else list(bias)
        self._matmuls = [
            Matmul(matrices, of_expert, activations) for matrices, of_expert in zip(experts, biases, strict=True)
        ]
        if len({matmul.activations for matmul in self._matmuls}) > 1:  # experts in different formats
            self._matmuls = [
                Matmul(matrices, of_expert, "float32") for matrices, of_expert in zip(experts, biases, strict=True)
            ]
        first = self._matmuls[0]
        self.inner, self.outputs, self.activations = first.inner, first.outputs, first.activations
        self._plans = (ctypes.c_int64 * len(experts))(*(matmul.address for matmul in self._matmuls))
        self._address = ctypes.addressof(self._plans)
        prefix = KERNEL_PREFIXES[self.activations] + "grouped"
        self._names = (f"{prefix}_gate_up", f"{prefix}_down")
        self._kernels = bound()

    def gate_up(self, x: Tensor, expert_ids: Tensor, activation: str) -> Tensor:
        """x [n, inner] float32, expert_ids [n, k] int32 -> [n, k, outputs / 2]."""
        x, expert_ids = x.contiguous(), expert_ids.contiguous()
        n, k = expert_ids.shape
        out = empty(n, k, self.outputs // 2)
        getattr(self._kernels, self._names[0])(
            self._address,
            x.data_ptr(),
            expert_ids.data_ptr(),
            out.data_ptr(),
            n,
            k,
            len(self._matmuls),
            ACTIVATIONS.index(activation),
        )
        return out

    def down(self, a: Tensor, expert_ids: Tensor, weights: Tensor | None) -> Tensor:
        """a [n, k, inner], expert_ids [n, k], weights [n, k] -> [n, outputs].

        Without weights [n, k, outputs], each result by itself; rows of experts beyond the last are 0.
        """
        a, expert_ids = a.contiguous(), expert_ids.contiguous()
        weights = None if weights is None else weights.contiguous()
        n, k = expert_ids.shape
        out = empty(n, self.outputs) if weights is not None else empty(n, k, self.outputs)
        getattr(self._kernels, self._names[1])(
            self._address,
            a.data_ptr(),
            expert_ids.data_ptr(),
            None if weights is None else weights.data_ptr(),
            out.data_ptr(),
            n,
            k,
            len(self._matmuls),
        )
        return out


def route(logits: Tensor, bias: Tensor | None, routing: Any) -> tuple[Tensor, Tensor]:
    """See quire/ops/routing.py, where `routing` is from."""
    logits = logits.contiguous()
    rows, experts = logits.shape
    ids, weights = empty(rows, routing.top_k, dtype=torch.int32), empty(rows, routing.top_k)
    bound().route(
        logits.data_ptr(),
        None if bias is None else bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        rows,
        experts,
        routing.top_k,
        _SCORES.index(routing.score),
        _WEIGHTINGS.index(routing.weighting),
        int(routing.renormalize),
        routing.scale,
        routing.num_groups,
        routing.top_groups,
        int(routing.group_score == "top2"),
        routing.least_sum,
        routing.mixer_margin,
    )
    return ids, weights


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
    """See quire/ops/grouped.py."""
    routed, shared = routed.contiguous(), shared.contiguous()
    out = empty(*routed.shape)
    bound().add_shared(
        routed.data_ptr(),
        shared.data_ptr(),
        None if gate is None else gate.contiguous().data_ptr(),
        out.data_ptr(),
        *routed.shape,
    )
    return out
