"""Attention backends by name."""

from __future__ import annotations

from quire.attention.base import AttentionBackend
from quire.utils.registry import Registry

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    "quire.attention",
    {
        "torch_ref": "torch_ref:TorchAttention",
        "cpu_native": "cpu_native:NativeAttention",
        "triton": "triton:TritonAttention",
        "triton_fixed": "triton_fixed:FixedTritonAttention",
    },
)
