"""Attention backends by name. Imports no torch: a wrong name is refused before that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quire.types.cache import KVForm
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


def choose_backend(name: str, forms: Iterable[KVForm | None]) -> type[AttentionBackend]:
    """The backend of this name for layers that keep these forms."""
    kept = [form for form in forms if form is not None]
    if any(form.index_dim for form in kept):
        return SPARSE_BACKENDS.get(name)
    return (LATENT_BACKENDS if any(form.value_dim is not None for form in kept) else BACKENDS).get(name)
