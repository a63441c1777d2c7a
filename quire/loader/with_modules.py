"""A checkpoint with the tensors of sentence-transformers' modules, which stand in folders of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from quire.layers.scheme import Weight
from quire.loader.checkpoint import Checkpoint, TensorInfo
from quire.loader.safetensors import SafetensorsCheckpoint


def with_modules(checkpoint: Checkpoint, folders: Mapping[str, Path]) -> Checkpoint:
    """The same, with the tensors of each folder under the name that it has here."""
    return _WithModules(checkpoint, folders) if folders else checkpoint


class _WithModules(Checkpoint):
    def __init__(self, below: Checkpoint, folders: Mapping[str, Path]) -> None:
        self.config = below.config
        self._below = below
        parts = {name: SafetensorsCheckpoint(folder) for name, folder in folders.items()}
        self._owners = {
            f"{name}.{tensor}": (part, tensor, info)
            for name, part in parts.items()
            for tensor, info in part.tensors().items()
        }

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {**self._below.tensors(), **{name: info for name, (_, _, info) in self._owners.items()}}

    def get(self, name: str) -> Tensor:
        owner, inner = self._owner(name)
        return owner.get(inner)

    def stored(self, name: str) -> Weight:
        owner, inner = self._owner(name)
        return owner.stored(inner)

    def kv_scales(self) -> Mapping[str, Tensor]:
        return self._below.kv_scales()

    def release(self, name: str) -> None:
        owner, inner = self._owner(name)
        owner.release(inner)

    def release_all(self) -> None:
        for owner in (self._below, *{id(part): part for part, _, _ in self._owners.values()}.values()):
            owner.release_all()

    def _owner(self, name: str) -> tuple[Checkpoint, str]:
        if name not in self._owners:
            return self._below, name
        part, inner, _ = self._owners[name]
        return part, inner
