"""No quantization: matrices in the model's dtype, multiplied by the platform's matmul."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from quire.layers.quant.base import (
    GroupedMethod,
    Joined,
    LinearMethod,
    MatrixSpec,
    Quantization,
    Shared,
    Shrinking,
    TableMethod,
)
from quire.layers.scheme import Scheme, Weight, as_tensor
from quire.layers.weights import empty_parameter
from quire.ops.base import Target
from quire.ops.gated_linear import GATED_LINEAR
from quire.ops.grouped import GROUPED_DOWN, GROUPED_GATE_UP, SPARSE_MLP
from quire.ops.invariance import MatmulRecipe
from quire.ops.linear import DIRECT, LINEAR_TRANSPOSED, Matmul, choose_matmul, linear, linear_transposed
from quire.ops.lora import LINEAR_SHRINKING
from quire.ops.select import EMBED
from quire.ops.split_k import LINEAR_SPLIT_K, PartialSums, whole_or_parts

# Transposing in blocks that fit the cache was measured 5 to 20 times faster than one strided copy.
TRANSPOSE_ROWS = 64


class PlainLinear(LinearMethod):
    """weight is [in, out], or [out, in] if `transposed`: whichever the platform multiplies by best."""

    def __init__(self, spec: MatrixSpec) -> None:
        super().__init__(spec)
        self._matmul, self.transposed = self._choose(spec.target)
        sides = (spec.out_features, spec.in_features)
        self.weight = empty_parameter(*(sides if self.transposed else sides[::-1]), dtype=spec.target.dtype)
        self.recipe = DIRECT  # how to call the matmul batch-invariantly; set by the self-check at start

    def _choose(self, target: Target) -> tuple[Matmul, bool]:
        return choose_matmul(target)

    def load(self, piece: int, rows: Weight) -> None:
        rows, start = as_tensor(rows), sum(self.spec.pieces[:piece])
        if self.transposed:
            self.weight.data[start : start + rows.shape[0]].copy_(rows)
            return
        target = self.weight.data[:, start : start + rows.shape[0]]
        for first in range(0, rows.shape[0], TRANSPOSE_ROWS):
            block = slice(first, first + TRANSPOSE_ROWS)
            target[:, block].copy_(rows[block].to(target.dtype).t())

    def multiply(self, x: Tensor) -> Tensor:
        return self._matmul(x, self.weight, self.bias, self.recipe)

    def gated(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        run = GATED_LINEAR.bind(self.spec.target)
        if run is GATED_LINEAR.reference:
            return None
        return lambda x: run(x, self.weight, self.bias, activation)

    def split_k(self) -> Callable[[Tensor], Tensor | PartialSums] | None:
        run = LINEAR_SPLIT_K.bind(self.spec.target)
        if run is LINEAR_SPLIT_K.reference:
            return None

        return lambda x: whole_or_parts(run(x, self.weight, self.bias), x.dtype)

    def shrinking(self) -> Shrinking | None:
        run = LINEAR_SHRINKING.bind(self.spec.target)
        if run is LINEAR_SHRINKING.reference:
            return None
        return lambda x, *adapters: run(x, self.weight, self.bias, *adapters)

    @property
    def is_invariant(self) -> bool:
        """Whether a row's result never depends on the other rows. If not, the self-check looks for a recipe."""
        return self._matmul is not linear and self._matmul is not linear_transposed

    def probe(self, x: Tensor, k_chunk: int | None) -> Tensor:
        """The matmul as a recipe with this chunk would call it."""
        return self._matmul(x, self.weight, self.bias, MatmulRecipe(min_rows=1, k_chunk=k_chunk))

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        return self.spec.out_features * self.spec.in_features * self.spec.target.dtype.itemsize


class PlainTable(PlainLinear, TableMethod):
    """Kept [tokens, hidden] everywhere, because rows are looked up."""

    def __init__(self, spec: MatrixSpec) -> None:
        super().__init__(spec)
        self._embed = EMBED.bind(spec.target)

    def _choose(self, target: Target) -> tuple[Matmul, bool]:
        return LINEAR_TRANSPOSED.bind(target), True

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embed(self.weight, token_ids)


class PlainGrouped(GroupedMethod):
    """weight is [experts, out, in]."""

    def __init__(self, spec: MatrixSpec) -> None:
        super().__init__(spec)
        self.weight = empty_parameter(spec.count, spec.out_features, spec.in_features, dtype=spec.target.dtype)
        self._gate_up, self._down = GROUPED_GATE_UP.bind(spec.target), GROUPED_DOWN.bind(spec.target)
        if self.backend == "torch":
            self._gate_up, self._down = GROUPED_GATE_UP.reference, GROUPED_DOWN.reference

    @property
    def backend(self) -> str:
        asked, found = self.spec.target.moe_backend, SPARSE_MLP.bind(self.spec.target)
        return "torch" if asked == "torch" or found is SPARSE_MLP.reference else "triton"

    def load(self, expert: int, piece: int, rows: Weight) -> None:
        start = sum(self.spec.pieces[:piece])
        self.weight.data[expert, start : start + rows.shape[0]].copy_(as_tensor(rows))

    def gate_up(self, x: Tensor, expert_ids: Tensor, activation: str) -> Tensor:
        return self._gate_up(x, expert_ids, self.weight, self.bias, activation)

    def down(self, a: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        return self._down(a, expert_ids, weights, self.weight, self.bias)

    def joined(self, down: GroupedMethod, activation: str, in_parts: bool, shared: Shared = None) -> Joined | None:
        run = SPARSE_MLP.bind(self.spec.target)
        plain = (one for one in shared or () if isinstance(one, PlainLinear) and one.transposed and one.bias is None)
        beside = [one.weight for one in plain]
        if self.backend == "torch" or not isinstance(down, PlainGrouped) or len(beside) != len(shared or ()):
            return None
        second, both = (down.weight, down.bias), (beside[0], beside[1]) if beside else None

        def multiply(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor | PartialSums:
            parts = run(x, expert_ids, weights, self.weight, self.bias, *second, activation, in_parts, both)
            return whole_or_parts(parts, x.dtype)

        return multiply

    def planned_bytes(self, schemes: Sequence[Scheme]) -> int:
        return self.spec.count * self.spec.out_features * self.spec.in_features * self.spec.target.dtype.itemsize


class Plain(Quantization):
    name = "none"

    def method(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> LinearMethod:
        return PlainTable(spec) if spec.role == "table" else PlainLinear(spec)

    def grouped(self, spec: MatrixSpec, schemes: Sequence[Scheme]) -> GroupedMethod:
        return PlainGrouped(spec)
