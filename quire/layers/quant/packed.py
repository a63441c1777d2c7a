"""Weights in panels for the native CPU kernels: as the checkpoint stores them, or quantized while they are loaded.

What lies in memory differs, and for quantized weights the arithmetic may: see `Matmul`. Knows schemes, not
files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cpu.grouped import GroupedMatmul, grouped_workspace
from quire.kernels.cpu.library import multiplies_integers
from quire.kernels.cpu.matrix import BLOCK_TYPES, Matmul, PackedMatrix, packed_bytes, runs_in_order
from quire.layers.quant.base import GroupedMethod, LinearMethod, MatrixMethod, MatrixSpec, Quantization, TableMethod
from quire.layers.quant.packed_weights import PackedWeights
from quire.layers.quant.panels import integer_bits, panel_format, panel_parts
from quire.layers.quant.rounding import Rounding
from quire.layers.scheme import Scheme, StoredMatrix, Weight, as_tensor, scheme_of
from quire.ops.base import Implementation, Target
from quire.types.errors import CheckpointError, ConfigError

KERNELS = Implementation("native", "cpu.matrix:Matmul", ("cpu",), (torch.float32,), "cpu.library:unavailable")
Storage = str | Rounding | None
# Float types of checkpoints and what they are kept as; other float types and other schemes become float32.
_STORAGES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class _Packed(MatrixMethod):
    """One packed matrix per piece of each matrix, each in its own format."""

    _matmul: Matmul | GroupedMatmul

    def __init__(self, spec: MatrixSpec, storage: Storage) -> None:
        """`storage`: what float weights are kept as, "int8", "int4" or by a rounding; None: as they come."""
        super().__init__(spec)
        self._storage = storage
        self._matrices: dict[tuple[int, int], PackedMatrix] = {}  # by the indices of a matrix and of its piece

    def _take(self, index: int, piece: int, rows: Weight) -> None:
        self._matrices[index, piece] = _packed(self.spec, self._storage, rows)

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        return sum(
            packed_bytes(_kept_as(self.spec, self._storage, scheme), size, self.spec.in_features)
            for size, scheme in zip(self.spec.pieces * self.spec.count, schemes, strict=True)
        )

    @property
    def kept(self) -> str:
        return " and ".join(sorted({matrix.format for matrix in self._matrices.values()}))

    @property
    def arithmetic(self) -> str:
        return "" if self.kept in _STORAGES.values() else f"activations in {self._matmul.activations}"

    def quantizes(self, scheme: Scheme) -> bool:
        return self.spec.target.activations == "int8" and integer_bits(scheme.element) is not None

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + sum(matrix.num_bytes for matrix in self._matrices.values())


class PackedLinear(_Packed, LinearMethod):
    _matmul: Matmul

    def load(self, piece: int, rows: Weight) -> None:
        self._take(0, piece, rows)

    def finish(self) -> None:
        activations = self.spec.target.activations
        if activations == "int8" and (self.spec.role in ("table", "head") or self.spec.path.endswith("o_proj")):
            activations = "int16"  # these cost little time and most of what 8 bits would do to perplexity
        self._matmul = Matmul(self.matrices, self.bias, activations)

    @property
    def matrices(self) -> list[PackedMatrix]:
        """In the order of the pieces."""
        return [self._matrices[key] for key in sorted(self._matrices)]

    def multiply(self, x: Tensor) -> Tensor:
        return self._matmul(x)

    def decodes(self, scheme: Scheme) -> bool:
        return not scheme.is_float and _kept_as(self.spec, self._storage, scheme) == "float32"


class PackedTable(PackedLinear, TableMethod):
    """One table for looking up rows and, if the head is tied, for its matmul."""

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._matrices[0, 0].embed(token_ids.long())


class PackedGrouped(_Packed, GroupedMethod):
    backend = "native"
    _matmul: GroupedMatmul

    def load(self, expert: int, piece: int, rows: Weight) -> None:
        self._take(expert, piece, rows)

    def finish(self) -> None:
        pieces = range(len(self.spec.pieces))
        experts = [[self._matrices[expert, piece] for piece in pieces] for expert in range(self.spec.count)]
        if any(len(runs_in_order(expert)) > 1 for expert in experts):
            raise CheckpointError(
                f"the matrices of an expert of {self.spec.path} have their inputs in different orders (act order);"
                " set --quantization none"
            )
        self._matmul = GroupedMatmul(experts, self.bias, self.spec.target.activations)

    def gate_up(self, x: Tensor, expert_ids: Tensor, activation: str) -> Tensor:
        return self._matmul.gate_up(x, expert_ids, activation)

    def down(self, a: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return self._matmul.down(a, expert_ids, weights)

    def slots(self, a: Tensor, expert_ids: Tensor) -> Tensor:
        return self._matmul.down(a, expert_ids, None)

    def tensors_of(self, expert: int) -> list[Tensor]:
        matrices = [self._matrices[expert, piece] for piece in range(len(self.spec.pieces))]
        orders = [matrix.order for matrix in matrices if matrix.order is not None]
        return [*super().tensors_of(expert), *(matrix.panels for matrix in matrices), *orders]

    def workspace_bytes(self, num_tokens: int, top_k: int) -> int:
        return grouped_workspace(self.spec.in_features, self.spec.out_features, num_tokens, top_k)


def _packed(spec: MatrixSpec, storage: Storage, rows: Weight) -> PackedMatrix:
    if isinstance(storage, Rounding):
        rows, storage = storage.stored(spec, rows, torch.device("cpu")), None
    kept = _kept_as(spec, storage, scheme_of(rows))
    if isinstance(rows, StoredMatrix) and kept in BLOCK_TYPES:
        return PackedMatrix.from_blocks(kept, rows.tensors["weight"].numpy(), spec.in_features)
    if isinstance(rows, StoredMatrix) and panel_format(rows.scheme) is not None:
        return PackedMatrix.from_codes(*panel_parts(rows, spec.path))
    return PackedMatrix.from_float(as_tensor(rows), kept)


def _kept_as(spec: MatrixSpec, storage: Storage, scheme: Scheme) -> str:
    """What the kernels call the form in which weights of this scheme are kept."""
    if isinstance(storage, Rounding):
        storage.check(spec, scheme)
        return panel_format(storage.scheme) or "float32"
    if storage is None:
        element = scheme.element if scheme.block is not None or scheme.is_float else ""
        return element if element in BLOCK_TYPES else panel_format(scheme) or _STORAGES.get(element, "float32")
    if not scheme.is_float:
        raise ConfigError(
            f"quantization is {spec.target.quantization!r}, which quantizes float weights while they are"
            f" loaded, but this checkpoint is quantized already (weights in it are {scheme.element}); leave"
            " --quantization out to keep its weights as they are, or load a float checkpoint of the model"
        )
    return storage


class Stored(Quantization):
    """Weights keep the format they have in the checkpoint, if there are kernels for it."""

    name = "stored"
    rounds_activations = True
    storage: Storage = None
    table_storage: Storage = None
    rounding: Rounding | None = None
    """To what float weights are rounded on GPUs; None: they stay as they are stored."""

    def on(self, target: Target) -> Quantization:
        elsewhere = PackedWeights(self.name, self.rounding)
        return elsewhere if elsewhere.serves(target) else self

    def refuses(self, target: Target) -> str | None:
        if target.platform not in KERNELS.platforms:
            return f"it runs on {', '.join(KERNELS.platforms)}, not on {target.platform}; leave --quantization out"
        if target.dtype not in KERNELS.dtypes:
            return f"it computes in float32, not in {target.dtype}; leave --dtype out"
        reason = KERNELS.refuses(target)
        return None if reason is None else f"{reason}; install a C++ compiler, for example g++"

    def activations(self, target: Target) -> str:
        return "int16" if multiplies_integers() else "float32"

    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        if spec.role == "router":  # small, and a rounded one would send tokens to other experts
            return PackedLinear(spec, None)
        kind = PackedTable if spec.role == "table" else PackedLinear
        return kind(spec, self.table_storage if spec.role in ("table", "head") else self.storage)

    def grouped(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> GroupedMethod:
        return PackedGrouped(spec, self.storage)
