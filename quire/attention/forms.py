"""The attention backends of an engine: one name, and an implementation for each form that its layers keep.

A model's layers keep one form; the layers of what drafts for it may keep another, as a draft head with keys and
values does beside a target with latents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from quire.attention.base import AttentionBackend
from quire.attention.registry import BACKENDS, LATENT_BACKENDS, SPARSE_BACKENDS
from quire.types.cache import KVForm


class AttentionBackends:
    def __init__(self, name: str, forms: Iterable[KVForm | None]) -> None:
        """`forms`: of the model's layers, then of those of what drafts for it; None is a state."""
        self.name = name
        self._of_form: dict[bool, AttentionBackend] = {}
        kept = [form for form in forms if form is not None]
        is_sparse = any(form.index_dim for form in kept)
        for is_latent in dict.fromkeys(map(_is_latent, kept)) or [False]:
            kinds = BACKENDS if not is_latent else SPARSE_BACKENDS if is_sparse else LATENT_BACKENDS
            self._of_form[is_latent] = kinds.get(name)()

    def __iter__(self) -> Iterator[AttentionBackend]:
        return iter(self._of_form.values())

    @property
    def main(self) -> AttentionBackend:
        """That of the model's layers."""
        return next(iter(self))

    def of(self, form: KVForm | None) -> AttentionBackend:
        """That of layers which keep this form."""
        return self._of_form.get(_is_latent(form), self.main)

    def kv_dtypes(self, dtype: torch.dtype) -> Sequence[torch.dtype]:
        """Types that every cache may have beside activations of `dtype`, the default first."""
        others = [backend.kv_dtypes(dtype) for backend in self]
        return [kv for kv in self.main.kv_dtypes(dtype) if all(kv in possible for possible in others)]


def _is_latent(form: KVForm | None) -> bool:
    return form is not None and form.value_dim is not None
