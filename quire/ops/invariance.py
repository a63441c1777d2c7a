"""Self-checks that find how matmuls must be called so that a row's bits never depend on its batch.

BLAS libraries choose their inner loops by the number of rows, and the choice can change the order of a sum.
Measured on AVX2 and AVX-512 machines, the differences sit at few rows (vector instead of matrix code) and at
long sums (blocking of the inner dimension that depends on the rows). So two knobs are enough: pad to a minimal
number of rows, and cut long sums into chunks that are added one after the other. The knobs are found by trying:
every admitted number of rows is run, and every row of every result must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_ROWS = (4, 8, 16, 32)
MIN_CHUNK = 64


@dataclass(frozen=True)
class MatmulRecipe:
    """How to call a matmul: at least `min_rows` rows, the inner dimension in chunks of `k_chunk`.

    Where no such pair is invariant, `row_tile` cuts the rows into tiles of exactly that many.
    """

    min_rows: int
    k_chunk: int | None = None
    row_tile: int | None = None


def row_ladder(min_rows: int, max_rows: int) -> list[int]:
    """The numbers of rows that are ever run; a batch is padded up to the next one.

    Steps grow with the size, so padding wastes little, and the list is short enough to check completely.
    """
    sizes, size = [], min_rows
    while size < max_rows:
        sizes.append(size)
        size += 4 if size < 16 else 8 if size < 64 else 32 if size < 256 else 64
    sizes.append(max(size, min_rows))
    return sizes


def all_rows_equal(run: Callable[[Tensor], Tensor], row: Tensor, sizes: Sequence[int]) -> bool:
    """Whether `run` maps `row` to the same bits at every position of every batch size."""
    reference = run(row.expand(sizes[0], -1).contiguous())[0]
    # Broken weights make columns that are equal to nothing; they must not cost the others their recipe.
    finite = None if bool(reference.isfinite().all()) else reference.isfinite().nonzero().flatten()

    def agrees(size: int) -> bool:
        equal = run(row.expand(size, -1).contiguous()) == reference
        return bool((equal if finite is None else equal[:, finite]).all())

    return all(agrees(size) for size in (sizes[0], *reversed(sizes[1:])))


def find_recipe(matmul: Callable[[Tensor, int | None], Tensor], row: Tensor, max_rows: int) -> MatmulRecipe:
    """The cheapest recipe under which `matmul(rows, k_chunk)` is invariant up to `max_rows` rows."""
    inner = row.shape[-1]
    chunks: list[int | None] = [None]
    chunk = inner // 2
    while chunk >= MIN_CHUNK:
        chunks.append(chunk)
        chunk //= 2
    for k_chunk in chunks:

        def chunked(rows: Tensor, k_chunk: int | None = k_chunk) -> Tensor:
            return matmul(rows, k_chunk)

        for min_rows in MIN_ROWS:
            if all_rows_equal(chunked, row, row_ladder(min_rows, max_rows)):
                return MatmulRecipe(min_rows, k_chunk)
    return MatmulRecipe(min_rows=MIN_ROWS[-1], row_tile=MIN_ROWS[-1])


def probe_row(length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, length, generator=generator).to(dtype)
