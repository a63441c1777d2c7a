"""QuantizedCheckpoint: presents what a quantized checkpoint stores as logical tensors whose formats are schemes.

It is a decorator of a checkpoint: everything above sees schemes, never the name of a checkpoint's format.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from quire.layers.scheme import Role, Scheme, StoredMatrix, Weight, as_tensor
from quire.loader.checkpoint import Checkpoint, TensorInfo, natural_key
from quire.types.errors import CheckpointError

LISTED = 10  # problems in an error message


@dataclass(frozen=True)
class _Matrix:
    """A logical matrix and the stored tensors that it is made of."""

    scheme: Scheme
    stored: dict[Role, str]
    shape: tuple[int, int] = (0, 0)


class QuantizedCheckpoint(Checkpoint):
    """Every stored tensor is a role of one logical tensor, or is named as ignored; checked when it is opened.

    A subclass says which layers are quantized how. Tensors that play no role in a scheme keep their own names.
    """

    ignored: tuple[str, ...] = ()
    """Patterns (fnmatch) of stored names that have no place in a model on purpose."""

    def __init__(self, stored: Checkpoint) -> None:
        self.config = stored.config
        self._stored = stored
        self._matrices: dict[str, _Matrix] = {}  # by logical name
        self._problems: list[str] = []
        self._infos = self._present(stored.tensors())

    @abstractmethod
    def scheme(self, path: str, leaves: frozenset[str]) -> Scheme | None:
        """How the matrix of the layer at `path` is stored, whose tensors are path.leaf; None: as plain numbers."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def get(self, name: str) -> Tensor:
        return as_tensor(self.stored(name))

    def stored(self, name: str) -> Weight:
        if name not in self._matrices:
            return self._stored.stored(name)
        matrix = self._matrices[name]
        tensors = {role: self._stored.get(stored) for role, stored in matrix.stored.items()}
        return StoredMatrix(matrix.scheme, matrix.shape, tensors)

    def release(self, name: str) -> None:
        for stored in self._matrices[name].stored.values() if name in self._matrices else (name,):
            self._stored.release(stored)

    def release_all(self) -> None:
        self._stored.release_all()

    def _present(self, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        layers: dict[str, set[str]] = {}
        for name in stored:
            if not any(fnmatchcase(name, pattern) for pattern in self.ignored):
                path, _, leaf = name.rpartition(".")
                layers.setdefault(path, set()).add(leaf)
        infos: dict[str, TensorInfo] = {}
        for path, leaves in layers.items():
            for name, info in self._layer(path, frozenset(leaves), stored).items():
                if name in infos:
                    self._problems.append(f"{name} is stored twice")
                infos[name] = info
        if self._problems:
            more = len(self._problems) - LISTED
            listed = "; ".join(self._problems[:LISTED]) + (f"; and {more} more" if more > 0 else "")
            raise CheckpointError(
                f"the checkpoint does not fit the quantization that its config names; is it complete? {listed}"
            )
        return {name: infos[name] for name in sorted(infos, key=natural_key)}

    def _layer(self, path: str, leaves: frozenset[str], stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The logical tensors of one layer."""
        scheme = self.scheme(path, leaves)
        roles = {} if scheme is None else dict(scheme.roles)
        plain = {f"{path}.{leaf}" if path else leaf for leaf in leaves - set(roles.values())}
        infos = {name: stored[name] for name in plain}
        if scheme is None:
            return infos
        matrix = _Matrix(scheme, {role: f"{path}.{leaf}" for role, leaf in roles.items()})
        missing = [name for name in matrix.stored.values() if name not in stored]
        if missing:
            self._problems += [f"{name} is missing" for name in missing]
            return infos
        name = f"{path}.weight"
        if name in infos:
            self._problems.append(f"{name} is stored twice")
        shape = self._shape(matrix, stored)
        if shape is not None:
            self._matrices[name] = _Matrix(scheme, matrix.stored, shape)
            num_bytes = sum(stored[each].num_bytes for each in matrix.stored.values())
            infos[name] = TensorInfo(shape, torch.float32, num_bytes, scheme)
        return infos

    def _shape(self, matrix: _Matrix, stored: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
        """The logical shape, by a tensor that says so or by the packed weight; None if the roles' shapes differ."""
        packed = matrix.stored["weight"]
        if len(stored[packed].shape) != 2:
            self._problems.append(f"{packed} has the shape {list(stored[packed].shape)}, which is no matrix")
            return None
        if "shape" in matrix.stored and stored[matrix.stored["shape"]].shape == (2,):
            rows, columns = (int(side) for side in self._stored.get(matrix.stored["shape"]))
        else:
            rows, columns = packed_shape(matrix.scheme, stored[packed].shape)
        good = True
        for role, name in matrix.stored.items():
            expected, found = stored_shape(matrix.scheme, role, (rows, columns)), stored[name].shape
            if found != expected if role == "weight" else _without_ones(found) != _without_ones(expected):
                self._problems.append(f"{name} has the shape {list(found)} instead of {list(expected)}")
                good = False
            dtype = _dtype(matrix.scheme, role)
            if dtype is not None and stored[name].dtype != dtype:
                self._problems.append(f"{name} is of {stored[name].dtype} instead of {dtype}")
                good = False
        return (rows, columns) if good else None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(side for side in shape if side != 1)


def packed_shape(scheme: Scheme, stored: tuple[int, ...]) -> tuple[int, int]:
    """The shape of a matrix whose packed weight has this one, all words being full."""
    rows, columns = stored
    if scheme.packing is None:
        return rows, columns
    return rows * scheme.packing.words(0), columns * scheme.packing.words(1)


def stored_shape(scheme: Scheme, role: Role, shape: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the tensor that plays `role` for a matrix of this shape; dimensions of 1 may be left out."""
    if role in ("weight", "scales", "zeros"):
        return tuple(scheme.stored_count(axis, role, shape[axis]) for axis in (0, 1))
    return (shape[1],) if role == "group_index" else (2,) if role == "shape" else ()


def _dtype(scheme: Scheme, role: Role) -> torch.dtype | None:
    """The type that the scheme names for a role's tensor; None: any."""
    if role == "scales" and scheme.scales is not None:
        return scheme.scales.dtype
    return scheme.packing.word if role == "weight" and scheme.packing is not None else None
