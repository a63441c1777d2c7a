"""A part of a checkpoint: the tensors whose names begin alike, such as a module that drafts beside the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quire.layers.scheme import Weight
from quire.loader.checkpoint import Checkpoint, TensorInfo


class PartOfCheckpoint(Checkpoint):
    def __init__(self, whole: Checkpoint, prefix: str, name: str) -> None:
        """Tensors whose names begin with `prefix`, in place of which they begin with `name` here."""
        self.config, self._whole = whole.config, whole
        self._names = {
            name + stored[len(prefix) :]: stored for stored in whole.tensors() if stored.startswith(prefix)
        }

    def tensors(self) -> Mapping[str, TensorInfo]:
        found = self._whole.tensors()
        return {name: found[stored] for name, stored in self._names.items()}

    def get(self, name: str) -> Tensor:
        return self._whole.get(self._names[name])

    def stored(self, name: str) -> Weight:
        return self._whole.stored(self._names[name])

    def release(self, name: str) -> None:
        self._whole.release(self._names[name])

    def release_all(self) -> None:
        self._whole.release_all()
