"""Attention backends by name. Imports no torch: a wrong name is refused before that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.utils.registry import Registry

if TYPE_CHECKING:
    from quire.attention.base import AttentionBackend

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
# What serves the layers of latent attention, by the same names.
LATENT_BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "backend of latent attention",
    "quire.attention",
    {
        "torch_ref": "torch_latent:TorchLatentAttention",
        "cpu_native": "native_latent:NativeLatentAttention",
        "triton": "triton_latent:TritonLatentAttention",
        "triton_fixed": "triton_latent:FixedTritonLatentAttention",
    },
)
# The same for layers with a sparse indexer.
SPARSE_BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "backend of sparse latent attention",
    "quire.attention",
    {
        "torch_ref": "torch_latent:TorchLatentAttention",
        "cpu_native": "native_latent:NativeSparseAttention",
        "triton": "triton_latent:TritonSparseAttention",
        "triton_fixed": "triton_latent:FixedTritonSparseAttention",
    },
)
