"""Every implementation of every op against the op's reference, on the inputs that the op itself makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quire.ops.base import Implementation, Op
from quire.ops.split_k import sum_of
from quire.platform.base import HOST
from tests.kernels.device import DEVICE, HAS_TRITON, NATIVE
from tests.ops.inputs import INPUTS, OPS

CASES = [
    pytest.param(op, implementation, id=f"{op.name}-{implementation.name}")
    for op in OPS
    for implementation in op.implementations
]
TILES = (
    "triton.fixed_matmul:",
    "triton.sparse_mlp:",
    "triton.packed_mlp:",
    "triton.lora:",
    "triton.matmul:linear_shrinking",
    "triton.latent:",
)  # modules whose matmuls are always of tiles
HALF_CASES = [
    pytest.param(op, implementation, dtype, id=f"{op.name}-{implementation.name}-{dtype}")
    for op in OPS
    for implementation in op.implementations
    for dtype in (torch.bfloat16, torch.float16)
    if dtype in implementation.dtypes
    # The interpreter multiplies the bits of bfloat16 in a matmul of tiles instead of its values.
    and (NATIVE or dtype != torch.bfloat16 or not implementation.path.startswith(TILES))
]
# Arguments that have a type of their own, whatever the activations are: weights in fp8, scales, weights of experts.
OWN_TYPE = {
    "linear_fp8": (1, 2),
    "prequantized_linear_fp8": (0, 1, 2, 3),
    "sparse_mlp": (2,),
    "packed_sparse_mlp": (2,),
    # States, and the vectors that decays are made of.
    "short_conv": (4, 5),
    "gated_conv": (3, 4),
    "gated_delta": (3, 4, 5, 6),
    "state_space": (2, 3, 4, 5, 6, 7),
    "selective_scan": (4, 5, 6, 7),
    "linear_attention": (1, 2, 3),
}
FLOAT32_RESULTS = ("shrink_lora", "linear_shrinking", "prompt_sums")
READS_LOGITS = ("append_greedy", "sample_within", "keep_allowed", "offer_candidates")
HALF_TOLERANCE = 2e-2  # relative to the largest value


def load(implementation: Implementation) -> Any:
    if implementation.path.startswith("triton.") and not HAS_TRITON:
        pytest.skip("triton is not installed")
    if not NATIVE and "cpu" not in implementation.platforms and not implementation.path.startswith("triton."):
        pytest.skip(f"runs on {', '.join(implementation.platforms)} only, and has no interpreter")
    run = implementation.load()
    if implementation.path.endswith(("sparse_mlp", "sparse_mlp_fixed")):  # its parts are for the reader to add up
        return lambda x, *others: sum_of(run(x, *others), x.dtype).unsqueeze(0)
    if implementation.path.endswith("shrink_lora"):
        return lambda *inputs: sum_of(run(*inputs), torch.float32).unsqueeze(0)
    if implementation.path.endswith("linear_shrinking"):
        return lambda x, *others: tuple(sum_of(parts, torch.float32).unsqueeze(0) for parts in run(x, *others))
    return run


def place(implementation: Implementation, values: Sequence[Any]) -> list[Any]:
    """Where it runs: an implementation for CPUs reads host memory, also on a machine with a GPU."""
    device = HOST if "cpu" in implementation.platforms else DEVICE
    return [
        tree_map(lambda part: part.to(device, copy=True) if isinstance(part, Tensor) else part, value)
        for value in values
    ]


def pairs_of(actual: Any, expected: Any) -> list[tuple[Tensor, Tensor]]:
    """What is to be compared. Lines in fp8, which come before their scales, are the values that they stand for."""
    mine, theirs = (list(result) if isinstance(result, tuple) else [result] for result in (actual, expected))
    assert len(mine) == len(theirs)
    if theirs[0].dtype == torch.float8_e4m3fn:
        # The interpreter forgets the carry of what rounds up to a power of two: its mantissa is 0, or 7 just below.
        bits = theirs[0].view(torch.uint8)
        kept = torch.ones_like(bits) if NATIVE else (bits + 1) & 7 > 1
        assert mine[0].dtype == theirs[0].dtype
        for side in (mine, theirs):
            side[:2] = [side[0].float() * side[1][:, None] * kept.to(side[0].device), side[1]]
    return list(zip(mine, theirs, strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2, 4])
@pytest.mark.parametrize(("op", "implementation"), CASES)
def test_float32(op: Op[Any], implementation: Implementation, seed: int) -> None:
    run, inputs = load(implementation), INPUTS[op.name](seed)
    placed = place(implementation, inputs)
    before = place(implementation, placed)
    for mine, theirs in pairs_of(run(*placed), op.reference(*inputs)):
        torch.testing.assert_close(mine.cpu(), theirs, atol=op.tolerance, rtol=op.tolerance)
        assert mine.is_contiguous()
    for index, (was, now) in enumerate(zip(before, placed, strict=True)):
        if index in op.changes:
            torch.testing.assert_close(now.cpu(), inputs[index], atol=op.tolerance, rtol=op.tolerance)
        same = all(map(_is_same, tree_leaves(was), tree_leaves(now)))
        assert same != (index in op.changes), "an op leaves its inputs alone"


@pytest.mark.parametrize(("op", "implementation", "dtype"), HALF_CASES)
def test_half_precision(op: Op[Any], implementation: Implementation, dtype: torch.dtype) -> None:
    run, inputs = load(implementation), INPUTS[op.name](5)
    kept = OWN_TYPE.get(op.name, ())
    rounded = [_to(dtype, value) if index not in kept else value for index, value in enumerate(inputs)]
    wide = [_to(torch.float32, value) if index not in kept else value for index, value in enumerate(rounded)]
    placed = place(implementation, rounded)
    tolerance = max(HALF_TOLERANCE, op.tolerance)
    for mine, theirs in pairs_of(run(*placed), op.reference(*wide)):
        assert mine.dtype == dtype or op.name.endswith("_fp8") or op.name in FLOAT32_RESULTS
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine.cpu().float(), theirs, atol=HALF_TOLERANCE * scale, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("op", "implementation"),
    [case for case in CASES if case.values[0].name in READS_LOGITS],
)
def test_logits_of_half_precision(op: Op[Any], implementation: Implementation, dtype: torch.dtype) -> None:
    """Sampling reads the logits of every model by the same kernels, in the type that the model computes in."""
    run, (logits, *others) = load(implementation), INPUTS[op.name](1)
    rounded = logits.to(dtype)
    found = run(*place(implementation, [rounded, *others]))
    for mine, theirs in pairs_of(found, op.reference(rounded.float(), *others)):
        assert torch.equal(mine.cpu(), theirs)


def _is_same(was: Any, now: Any) -> bool:
    return torch.equal(was, now) if isinstance(was, Tensor) else bool(was == now)


def _to(dtype: torch.dtype, value: Any) -> Any:
    """An argument in another type: a tensor of floats, several of them, or a type itself. Stored bytes stay."""
    if isinstance(value, torch.dtype):
        return dtype
    if isinstance(value, tuple):
        return tree_map(lambda part: _to(dtype, part), value)
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1
    return value.to(dtype) if is_float else value
