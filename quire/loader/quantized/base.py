"""QuantizedCheckpoint: presents what a quantized checkpoint stores as logical tensors whose formats are schemes.

It is a decorator of a checkpoint: everything above sees schemes, never the name of a checkpoint's format.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

import msgspec
import torch
from torch import Tensor

from quire.layers.scheme import GRIDS, Role, ScaleGrid, Scheme, StoredMatrix, Weight, as_tensor
from quire.loader.checkpoint import Checkpoint, TensorInfo, natural_key
from quire.types.errors import CheckpointError

logger = logging.getLogger(__name__)
LISTED = 10  # problems in an error message
Leaves = Mapping[str, TensorInfo]  # the tensors of one layer by the last part of their names
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ELEMENTS = {"INT8": torch.int8, "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
KV_SCALES = ("*.k_scale", "*.v_scale", "*.kv_scale", "*.k_proj.output_scale", "*.v_proj.output_scale")
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class _Matrix:
    """A logical matrix and the stored tensors that it is made of."""

    scheme: Scheme
    path: str
    stored: dict[Role, str]
    shape: tuple[int, ...]  # of several matrices: their number in front


class QuantizedCheckpoint(Checkpoint):
    """Every stored tensor is a role of one logical tensor, or is named as ignored; checked when it is opened.

    A subclass says which layers are quantized how. Tensors that play no role in a scheme keep their own names.
    """

    reads: ClassVar[str] = ""
    """What the format holds that can be read, for the page of supported ones."""
    ignored: tuple[str, ...] = ()
    """Patterns (fnmatch) of stored names that have no place in a model on purpose."""
    scales_kv: bool = False
    """Whether names of KV_SCALES are those of an fp8 KV cache, which is no part of a model."""
    beside: tuple[str, ...] = ()
    """Patterns of leaves that belong to a quantized matrix without playing a role in its scheme."""
    flat: bool = False
    """Whether weights and scales are stored one after the other, without the shape of their matrix."""

    def __init__(self, stored: Checkpoint) -> None:
        self.config = stored.config
        self.settings: dict[str, Any] = stored.config.get("quantization_config") or {}
        self._stored = stored
        self._matrices: dict[str, _Matrix] = {}  # by logical name
        self._problems: list[str] = []
        self.configure()
        self._infos = self._present(stored.tensors())

    def configure(self) -> None:
        """Read `settings`, before the first layer is asked for; CheckpointError for values that cannot be served."""
        return None

    @abstractmethod
    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        """How the matrix of the layer at `path` is stored, whose tensors are path.leaf; None: as plain numbers."""

    def split(self, name: str) -> tuple[str, str]:
        """A stored tensor's layer and the rest of its name."""
        path, _, leaf = name.rpartition(".")
        return path, leaf

    def join(self, path: str, leaf: str) -> str:
        """The inverse of `split`."""
        return f"{path}.{leaf}" if path else leaf

    def logical_name(self, path: str) -> str:
        """What models call the matrix of a layer."""
        return f"{path}.weight" if path else "weight"

    def shape(self, path: str, scheme: Scheme, leaves: Leaves) -> tuple[int, ...] | None:
        """The shape of a layer's matrix; None: that of its packed weight."""
        name = dict(scheme.roles).get("shape")
        if name is None or leaves[name].shape != (2,) or leaves[name].dtype.is_floating_point:
            return None
        rows, columns = self._stored.get(f"{path}.{name}").tolist()
        return rows, columns

    def role_shape(self, scheme: Scheme, role: Role, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a role's tensor is stored in, before `present`; dimensions of 1 may be left out."""
        return stored_shape(scheme, role, shape)

    def dtypes(self, scheme: Scheme, role: Role) -> tuple[torch.dtype, ...]:
        """The types that a role's tensor may have; none: any."""
        return _dtypes(scheme, role)

    def present(self, path: str, tensors: dict[Role, Tensor]) -> None:
        """Change what is stored into what the scheme describes; for layouts that need more than a transpose."""
        return None

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def get(self, name: str) -> Tensor:
        return as_tensor(self.stored(name))

    def stored(self, name: str) -> Weight:
        if name not in self._matrices:
            return self._stored.stored(name)
        matrix = self._matrices[name]
        tensors = {role: self._stored.get(stored) for role, stored in matrix.stored.items()}
        self.present(matrix.path, tensors)
        for role in tensors.keys() & set(GRIDS):
            tensors[role] = tensors[role].reshape(stored_shape(matrix.scheme, role, matrix.shape))
            tensors[role] = tensors[role].mT if matrix.scheme.transposed else tensors[role]
        for role in tensors.keys() & {"second_scale", "input_scale"}:  # a number, in however many dimensions
            tensors[role] = tensors[role].reshape(stored_shape(matrix.scheme, role, matrix.shape))
        _check_index(matrix, tensors)
        _check_scales(matrix, tensors)
        tensors.pop("ordered_index", None)
        return StoredMatrix(matrix.scheme, matrix.shape, tensors)

    def kv_scales(self) -> Mapping[str, Tensor]:
        return {name: self._stored.get(name) for name in self._kv_scales}

    def release(self, name: str) -> None:
        for stored in self._matrices[name].stored.values() if name in self._matrices else (name,):
            self._stored.release(stored)

    def release_all(self) -> None:
        self._stored.release_all()

    def read_setting(self, schema: type[S], values: Any = None, name: str = "quantization_config") -> S:
        """The config's values as a struct; CheckpointError that names what cannot be served."""
        values = self.settings if values is None else values
        try:
            return msgspec.convert(values, schema)
        except msgspec.ValidationError as error:
            shown = repr(values)
            raise CheckpointError(
                f"the model config's {name} cannot be served: {error}; it is"
                f" {shown if len(shown) < 300 else shown[:300] + '...'}; use the model in another format"
            ) from error

    def _present(self, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        layers: dict[str, dict[str, TensorInfo]] = {}
        unused = _fitting(stored, self.ignored)
        if unused:
            logger.info(
                "%d tensors of the checkpoint are not used: scales of queries or latents in fp8, or bounds of"
                " activations (such as %s)",
                *(len(unused), unused[0]),
            )
        self._kv_scales = _fitting(stored, KV_SCALES) if self.scales_kv else []
        left_out = {*unused, *self._kv_scales}
        for name, info in stored.items():
            if name not in left_out:
                path, leaf = self.split(name)
                layers.setdefault(path, {})[leaf] = info
        infos: dict[str, TensorInfo] = {}
        for path, leaves in layers.items():
            for name, info in self._layer(path, leaves).items():
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

    def _layer(self, path: str, leaves: Leaves) -> dict[str, TensorInfo]:
        """The logical tensors of one layer."""
        scheme = self.scheme(path, leaves)
        roles = {} if scheme is None else dict(scheme.roles)
        beside = self.beside if scheme is not None else ()
        infos = {
            self.join(path, leaf): info
            for leaf, info in leaves.items()
            if leaf not in roles.values() and not any(fnmatchcase(leaf, pattern) for pattern in beside)
        }
        self._problems += [
            f"{name} is of {info.dtype}, which the quantization_config says nothing of"
            for name, info in infos.items()
            if info.dtype not in _FLOATS
        ]
        if scheme is None:
            return infos
        missing = [leaf for leaf in roles.values() if leaf not in leaves]
        if missing:
            self._problems += [f"{self.join(path, leaf)} is missing" for leaf in missing]
            return infos
        name = self.logical_name(path)
        if name in infos:
            self._problems.append(f"{name} is stored twice")
        shape = self._shape(path, scheme, leaves)
        if shape is not None:
            stored = {role: self.join(path, leaf) for role, leaf in roles.items()}
            self._matrices[name] = _Matrix(scheme, path, stored, shape)
            num_bytes = sum(leaves[leaf].num_bytes for leaf in roles.values())
            infos[name] = TensorInfo(shape, torch.float32, num_bytes, scheme)
        return infos

    def _shape(self, path: str, scheme: Scheme, leaves: Leaves) -> tuple[int, ...] | None:
        """The logical shape, by a tensor that says so or by the packed weight; None if the roles' shapes differ."""
        packed = dict(scheme.roles)["weight"]
        shape = self.shape(path, scheme, leaves)
        if shape is None and len(leaves[packed].shape) not in (2, 3):
            name = self.join(path, packed)
            self._problems.append(f"{name} has the shape {list(leaves[packed].shape)}, which is no matrix")
            return None
        shape = shape or packed_shape(scheme, leaves[packed].shape)
        before = len(self._problems)
        for role, leaf in scheme.roles:
            expected, found, name = self.role_shape(scheme, role, shape), leaves[leaf].shape, self.join(path, leaf)
            if self.flat and role in GRIDS:
                good = math.prod(found) == math.prod(expected)
            else:
                good = found == expected if role == "weight" else _without_ones(found) == _without_ones(expected)
            if not good:
                self._problems.append(f"{name} has the shape {list(found)} instead of {list(expected)}")
            dtypes = self.dtypes(scheme, role)
            if dtypes and leaves[leaf].dtype not in dtypes:
                self._problems.append(f"{name} is of {leaves[leaf].dtype} instead of {dtypes[0]}")
        return shape if len(self._problems) == before else None


def _fitting(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _check_index(matrix: _Matrix, tensors: Mapping[Role, Tensor]) -> None:
    """An index beyond the scales would read what is not there; one out of order would be read wrong."""
    if "ordered_index" in tensors:
        assert matrix.scheme.scales is not None
        index = tensors["ordered_index"].long()
        if not torch.equal(index, torch.arange(len(index)) // (matrix.scheme.scales.columns or len(index))):
            raise CheckpointError(
                f"{matrix.stored['ordered_index']} has groups in another order than the config says; set"
                " quantization_config.desc_act to true in the model's config.json"
            )
    if "group_index" not in tensors:
        return
    lowest, highest = (int(end) for end in tensors["group_index"].aminmax())
    groups = tensors["scales"].shape[1]
    if lowest < 0 or highest >= groups:
        raise CheckpointError(
            f"{matrix.stored['group_index']} names groups {lowest} to {highest} but there are {groups}; download the"
            " file again"
        )


def _check_scales(matrix: _Matrix, tensors: Mapping[Role, Tensor]) -> None:
    """One scale that is no number would spoil every answer."""
    for role in ("scales", "minima", "second_scale"):
        if role in tensors and not _is_finite(tensors[role], matrix.scheme.scales if role == "scales" else None):
            raise CheckpointError(f"{matrix.stored[role]} has values that are no numbers; download the file again")
    if matrix.scheme.second_scale == "divides" and not tensors["second_scale"].all():
        raise CheckpointError(
            f"{matrix.stored['second_scale']} is 0, and scales are divided by it; download the file again"
        )


def _is_finite(values: Tensor, grid: ScaleGrid | None) -> bool:
    if not values.numel():
        return True
    if grid is not None and grid.dtype == torch.float8_e8m0fnu:
        return int(values.view(torch.uint8).max()) < 255
    if values.dtype == torch.float8_e4m3fn:  # of which torch cannot tell
        return int((values.view(torch.uint8) & 127).max()) < 127
    return bool(torch.isfinite(values.max())) and bool(torch.isfinite(values.min()))


def scale_type(scale: TensorInfo | None, otherwise: torch.dtype) -> torch.dtype:
    """The type of stored scales if it is one of floats, which a format leaves open; else `otherwise` is asked for."""
    return otherwise if scale is None or scale.dtype not in _FLOATS else scale.dtype


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(side for side in shape if side != 1)


def packed_shape(scheme: Scheme, stored: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix, or of several, whose packed weight has this one, all words being full."""
    sides, packing = stored[-2:], scheme.packing
    sides = sides[::-1] if scheme.transposed else sides
    if packing is not None:
        words = [packing.words if axis == packing.axis else 1 for axis in (0, 1)]
        sides = tuple(packing.unit(axis) * side // words[axis] for axis, side in enumerate(sides))
    return (*stored[:-2], *sides)


def stored_shape(scheme: Scheme, role: Role, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor that plays `role` for a matrix of this shape; dimensions of 1 may be left out."""
    *several, rows, columns = shape
    if role in GRIDS:
        sides = tuple(scheme.stored_count(axis, role, side) for axis, side in enumerate((rows, columns)))
        return (*several, *(sides[::-1] if scheme.transposed else sides))
    return (
        (*several, columns) if role in ("group_index", "ordered_index") else (2,) if role == "shape" else (*several,)
    )


def _dtypes(scheme: Scheme, role: Role) -> tuple[torch.dtype, ...]:
    """The types that a role's tensor may have; none: any."""
    if role == "scales" and scheme.scales is not None:
        dtype = scheme.scales.dtype
        return (dtype, torch.uint8) if dtype == torch.float8_e8m0fnu else (dtype,)
    if role == "zeros" and scheme.zeros is not None and scheme.zeros.packing is not None:
        return (scheme.zeros.packing.word,)
    if role in ("group_index", "ordered_index"):
        return torch.int32, torch.int64
    if role != "weight":
        return ()
    if scheme.packing is not None:
        return (scheme.packing.word,)
    return (_ELEMENTS[scheme.element],) if scheme.element in _ELEMENTS else ()
