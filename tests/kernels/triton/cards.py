"""Compiles kernels for GPUs, in the shapes that real models give them, without having one.

    python -m tests.kernels.triton.cards CARD PART [--all]

CARD is one of CARDS below, PART one of PARTS.

Kernels are launched as ever, on tensors in host memory; a driver of our own compiles them and leaves it at that. What
a GPU would refuse shows: code that only the interpreter takes, and more shared memory than a multiprocessor has.
Prints how many variants of each kernel there were, as JSON. It must be the first in its process to import Triton.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

MULTIPROCESSORS = 132
# Compute capability, and the bytes of shared memory that a program may have: H200, A100, RTX 4090, RTX 5090.
CARDS = {"hopper": (90, 232448), "ampere": (80, 166912), "ada": (89, 101376), "blackwell": (120, 101376)}
FIRST_WITH_FP8 = 89
VOCAB = 151936
BLOCK_SIZE, MAX_LEN = 16, 4096
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

compiled: Counter[str] = Counter()


class CompileOnly:
    """Stands in for Triton's CUDA driver."""

    def __init__(self, capability: int, shared_memory: int) -> None:
        self._capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": shared_memory},
            load_binary=self._load,
            unload_module=lambda module: None,
        )

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        compiled[name] += 1
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(card: str) -> None:
    """There is such a GPU; what is left to libraries is not computed."""
    capability, shared_memory = CARDS[card]
    properties = SimpleNamespace(
        name=card, multi_processor_count=MULTIPROCESSORS, shared_memory_per_block_optin=shared_memory
    )
    triton.runtime.driver.set_active(CompileOnly(capability, shared_memory))
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    torch.cuda.get_device_properties = lambda device: properties
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_empty(x.shape[0], weight.shape[0])
    torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, **how: torch.empty_like(q)


def numbers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)  # never touched, so never taken


def has_fp8() -> bool:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor >= FIRST_WITH_FP8


def matmuls(all_shapes: bool) -> None:
    from quire.kernels.triton import fixed_matmul, fp8, lora, matmul

    fixed_matmul._library_agrees = lambda *of: False
    weights = [(1024, 3072), (6144, 1024), *([(4096, 1024), (28672, 4096)] if all_shapes else []), (4096, 14336)]
    for rows, (n, k) in product((1, 16, 64, 128, 160) if all_shapes else (1, 16, 160), weights):
        x, weight = numbers(rows, k), numbers(n, k)
        matmul.linear_transposed(x, weight)
        fixed_matmul.linear_transposed(x, weight)
        matmul.linear_split_k(x, weight, None)
        if n > k:
            matmul.gated_linear(x, weight, None, "silu")
            fixed_matmul.gated_linear(x, weight, None, "gelu_tanh")
    fixed_matmul.linear_transposed(numbers(2048, 1024), numbers(4096, 1024))
    ranks = numbers(8, dtype=torch.int32)
    for rows, widths in product((1, 64, 4096) if all_shapes else (1, 4096), ((4096, 1024, 1024), (14336, 14336))):
        lora.gather_adapters(ranks, numbers(rows, dtype=torch.int64), numbers(rows + 1, dtype=torch.int32), rows)
        tiles = lora.tile_adapters(numbers(rows, dtype=torch.int32), 8)
        x, down = numbers(rows, 4096), numbers(8, len(widths), 16, 4096)
        matmul.linear_shrinking(x, numbers(4096, 4096), None, down, tiles, tiles, ranks, True)
        shrunk = lora.shrink_lora(x, down, tiles, ranks)
        for dtype in (BF16, torch.float32):
            out = numbers(rows, sum(widths), dtype=dtype)
            lora.expand_lora(out, shrunk, numbers(8, 16, sum(widths)), tiles, ranks, widths)
        lora.expand_lora_gated(numbers(rows, 28672), shrunk, numbers(8, 16, 28672), tiles, ranks, "silu")
    if not has_fp8():
        return
    for rows in (1, 64) if all_shapes else (1,):
        quantized = numbers(28672, 4096, dtype=FP8), numbers(28672, dtype=torch.float32)
        fp8.linear_fp8(numbers(rows, 4096), *quantized)
        fp8.linear_fp8_fixed(numbers(rows, 4096), *quantized)


def widest_matmuls(all_shapes: bool) -> None:
    """Those that want the most shared memory."""
    from quire.kernels.triton import fixed_matmul, matmul

    fixed_matmul._library_agrees = lambda *of: False
    for rows in (1, 16, 160):
        x, weight = numbers(rows, 14336), numbers(4096, 14336)
        matmul.linear_transposed(x, weight)
        fixed_matmul.linear_transposed(x, weight)
        matmul.gated_linear(numbers(rows, 4096), numbers(28672, 4096), None, "silu")


def experts(all_shapes: bool) -> None:
    """Mixtures of experts with plain and with packed weights, and linear layers with packed ones."""
    from quire.kernels.packed import PackedWeight
    from quire.kernels.triton import (
        add_shared,
        expert_slots,
        packed_fragments,
        packed_matmul,
        packed_mlp,
        routing,
        sparse_mlp,
    )
    from quire.ops.routing import Routing

    def packed(count: int, n: int, k: int, group: int, kind: str) -> PackedWeight:
        grid = (count, n, k // group)
        scales = numbers(*grid, dtype=torch.uint8 if kind == "e2m1" else torch.float16)
        zeros = numbers(*grid, dtype=torch.uint8) if kind == "zeros" else None
        return PackedWeight(numbers(count, n, k // 2, dtype=torch.uint8), scales, zeros, kind == "e2m1")

    count, k, hidden, width = 128, 8, 2048, 768
    many = numbers(count, 2 * width, hidden), None, numbers(count, hidden, width), None
    for rows in (1, 64, 256, 2048) if all_shapes else (1, 256, 2048):
        x, ids = numbers(rows, hidden), numbers(rows, k, dtype=torch.int32)
        for in_parts in (False, True):
            sparse_mlp.sparse_mlp(x, ids, numbers(rows, k, dtype=torch.float32), *many, "silu", in_parts)
        shared = numbers(4 * width, hidden), numbers(hidden, 2 * width)
        sparse_mlp.sparse_mlp(x, ids, numbers(rows, k, dtype=torch.float32), *many, "silu", True, shared)
        logits = routing.router_logits(x, numbers(count, hidden, dtype=torch.float32), None)
        routing.route(logits, None, Routing(k, renormalize=True))
    expert_slots.sort_slots(numbers(8192, 10, dtype=torch.int32), 512, 64)
    count, hidden, width, top = 32, 2880, 2880, 4
    for rows in (1, 16, 512, 4096) if all_shapes else (1, 4096):
        x, shares = numbers(rows, hidden), numbers(rows, top, dtype=torch.float32)
        ids = numbers(rows, top, dtype=torch.int32)
        gate_up, down = (packed(count, n, k, 32, "e2m1") for n, k in ((2 * width, hidden), (hidden, width)))
        for in_parts in (False, True):
            given = (x, ids, shares, gate_up, numbers(count, 2 * width), down, numbers(count, hidden))
            packed_mlp.packed_sparse_mlp(*given, "clamped_swiglu", in_parts)
        add_shared.add_shared(x, x, numbers(rows, 1))
    kinds = [
        (128, "zeros"),
        *([(32, "zeros"), (64, "implied"), (32, "e2m1"), (4096, "implied")] if all_shapes else []),
    ]
    for rows, (group, kind) in product((1, 32, 200, 300), kinds):
        weight = packed(1, 28672, 4096, group, kind)
        packed_mlp.packed_linear(numbers(rows, 4096), weight, None, "silu")
        packed_mlp.packed_linear_fixed(numbers(rows, 4096), weight, numbers(28672), "")
    codes, halves = numbers(1, 2048, 4096, dtype=torch.int8), numbers(1, 2048, 2048, dtype=torch.uint8)

    def grid(group: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return numbers(1, 2048, 4096 // group, dtype=dtype)

    fine = [
        PackedWeight(codes.view(FP8), grid(128)),
        PackedWeight(halves, grid(16, FP8), is_float=True, line_scale=numbers(1, 2048, dtype=torch.float32)),
        PackedWeight(halves, grid(32), minima=grid(32)),
        PackedWeight(codes, grid(16)),
        *([PackedWeight(codes, grid(32), minima=grid(32)), PackedWeight(codes, grid(4096))] if all_shapes else []),
    ]
    for rows, weight in [(64, fine[0]), *product((1, 300), fine)]:
        packed_mlp.packed_linear(numbers(rows, 4096), weight, None, "")
    in_blocks = [
        PackedWeight(numbers(128, n, k, dtype=FP8), numbers(128, n, k // 128, dtype=torch.float32))
        for n, k in ((1536, 2048), (2048, 768))
    ]
    for rows in (1, 64, 512) if all_shapes else (64,):
        x, ids = numbers(rows, 2048), numbers(rows, 8, dtype=torch.int32)
        shares = numbers(rows, 8, dtype=torch.float32)
        packed_mlp.packed_sparse_mlp(x, ids, shares, in_blocks[0], None, in_blocks[1], None, "silu", True)
    if packed_matmul.has_packed_arithmetic():
        few = [packed(1, 28672, 4096, 128, "zeros"), packed(1, 5760, 2880, 32, "e2m1")]
        few += [PackedWeight(codes.view(FP8), grid(128)), PackedWeight(codes, grid(128))]
        for weight, splits in product(few, (1, 8)):
            x = numbers(1, weight.sizes[2])
            packed_fragments.packed_fragments(x, None, weight, None, "silu", splits=splits)


def lines(all_shapes: bool) -> None:
    from quire.kernels.triton import activation, encoder, gather, layer_norm, norm, rank_sum, scale_rows

    for rows, width in ((1, 1024), (200, 4096 if all_shapes else 1024)):
        x, weight = numbers(rows, width), numbers(width)
        norm.rms_norm(x, weight, 1e-6)
        norm.add_rms_norm(x, x, weight, 1e-6)
        layer_norm.layer_norm(x, weight, weight, 1e-6)
        layer_norm.add_layer_norm(x, x, weight, weight, 1e-6)
        norm.add_rms_norm_split_k(numbers(4, rows, width, dtype=torch.float32), x, weight, 1e-6)
        norm.add_rms_norm_split_k(numbers(2, rows, width), x, weight, 1e-6)  # of two ranks
        for ranks in (2, 3, 8):
            rank_sum.rank_sum(numbers(ranks, rows, width))
        if has_fp8():
            norm.rms_norm_fp8(x, weight, 1e-6)
            norm.add_rms_norm_fp8(x, x, weight, 1e-6)
            activation.silu_and_mul_fp8(numbers(rows, 2 * 14336))
        gather.gather_rows(x, torch.arange(rows))
        scale_rows.scale_rows(x, numbers(rows, 1), width // 2)
        gather.gather_rotation(numbers(40, 128, dtype=torch.float32), torch.arange(rows), BF16)
        for run in (activation.silu_and_mul, activation.gelu_tanh_and_mul, activation.gelu_and_mul):
            run(numbers(rows, 2 * 14336))
        for act in (activation.gelu, activation.gelu_tanh, activation.relu):
            act(numbers(rows, 3072))
        places = torch.arange(rows)
        for positions, types in ((x, x), (x, None), (None, x)):
            encoder.add_places(x, positions, types, places, 0)
        encoder.prompt_sums(x, [0] * rows, [1] * rows)


def batch(queries: list[int], contexts: list[int]) -> Any:
    from quire.attention.base import AttentionBatch, HostLengths

    rows, tokens = len(queries), sum(queries)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
    return AttentionBatch(
        tables=torch.zeros(rows + 1, MAX_LEN // BLOCK_SIZE + 1, dtype=torch.int32),
        rows=torch.arange(rows),
        contexts=torch.tensor(contexts, dtype=torch.int32),
        query_starts=starts,
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        block_size=BLOCK_SIZE,
        num_tokens=tokens,
        max_context=MAX_LEN,
        padding_row=rows,
        lengths=HostLengths(queries, contexts),
    )


def attention(all_shapes: bool) -> None:
    """Both backends, with prompts, prefix hits, single queries, and decode steps of few and many rows."""
    from quire.attention.base import AttentionSpec, HeadNorm, LayerCache
    from quire.attention.triton import DecodeKind, TritonAttention
    from quire.attention.triton_fixed import FixedTritonAttention
    from quire.kernels.triton.limited_attention import limited_attention

    starts, tiles = numbers(3, dtype=torch.int32), numbers(2, dtype=torch.int32)
    for head_dim, window, kind in ((64, 0, torch.float16), (64, 64, torch.float16), (256, 0, torch.float32)):
        qkv = numbers(3, 100, 12, head_dim, dtype=kind)
        out = numbers(100, 12 * head_dim, dtype=kind)
        limited_attention(*qkv, starts, tiles, tiles, tiles, out, 0.1, window)
    kinds = [(128, None, None, BF16), (256, 512, 50.0, BF16)]
    if all_shapes:
        kinds += [(8, None, None, BF16), (64, None, None, BF16), *([(128, None, None, FP8)] if has_fp8() else [])]
    for backend, (head_dim, window, cap, kept) in product((TritonAttention(), FixedTritonAttention()), kinds):
        sinks = numbers(16, dtype=torch.float32) if head_dim == 64 else None
        spec = AttentionSpec(16, 8, head_dim, 0.1, window, cap, sinks, norms_rotated=head_dim == 64)
        cache = numbers(*backend.cache_shape(64, BLOCK_SIZE, 8, head_dim, kept), dtype=kept)
        norm = HeadNorm(numbers(head_dim), numbers(head_dim), 1e-6, 0.0)
        turned = min(head_dim, 128)  # of wider heads only a part
        angles = (numbers(2700, 1, turned), numbers(2700, 1, turned))
        mixed = batch([1, 9, 300, 2200], [40, 1000, 700, 2200])
        steps = [backend.prepare_eager(mixed), backend.prepare_eager(batch([2100], [2100]))]
        steps.append(
            backend.prepare_eager(batch([1, 9, 9, 300], [40, 1000, 990, 700]))
        )  # whose lists begin elsewhere
        for rows in (1, 3, 32, 64) if all_shapes else (3, 64):
            step = batch([1] * rows, [999] * rows)
            steps += [backend.prepare(step, DecodeKind(alike), ()) for alike in (False, True)]
        for metadata in steps:
            tokens = int(metadata.batch.query_starts[-1])
            rotation = (angles[0][:tokens], angles[1][:tokens])
            qkv = numbers(tokens, 32 * head_dim)
            at = LayerCache(spec, cache, metadata)
            backend.attend(at, backend.write(at, qkv, norm if head_dim in (64, 128) else None, rotation))


def latent(all_shapes: bool) -> None:
    """Latent attention of DeepSeek-V2-Lite's and V3's heads, dense and sparse, in both modes."""
    from quire.attention.base import AttentionSpec, LayerCache, Written
    from quire.attention.latent import IndexInputs, LatentWeights
    from quire.attention.triton import DecodeKind
    from quire.attention.triton_latent import (
        FixedTritonLatentAttention,
        FixedTritonSparseAttention,
        TritonLatentAttention,
        TritonSparseAttention,
    )

    torch.bmm = lambda a, b: a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    kinds = [
        (16, BF16),
        *([(128, BF16), (40, BF16)] if all_shapes else []),
        *([(16, FP8)] if all_shapes and has_fp8() else []),
    ]
    for backend, (heads, kept) in product((TritonLatentAttention(), FixedTritonLatentAttention()), kinds):
        spec = AttentionSpec(heads, 1, 576, 0.1, value_dim=512)
        cache = numbers(*backend.cache_shape(64, BLOCK_SIZE, 1, 576, kept), dtype=kept)
        weights = LatentWeights(numbers(512), 1e-6, numbers(heads, 128, 512), numbers(heads, 512, 128))
        steps = [
            backend.prepare_eager(batch([1, 9, 300], [40, 1000, 700])),
            backend.prepare_eager(batch([2100], [2100])),
            backend.prepare_eager(batch([1100, 40, 1200], [1100, 90, 1200])),
        ]
        for rows in (1, 16, 64, 256) if all_shapes else (1, 256):
            steps.append(backend.prepare(batch([1] * rows, [999] * rows), DecodeKind(), ()))
        for metadata in steps:
            tokens = int(metadata.batch.query_starts[-1])
            projected = numbers(tokens, heads * 192 + 576)
            q, kv = projected[:, : heads * 192].unflatten(-1, (heads, 192)), projected[:, heads * 192 :]
            rotation = (numbers(tokens, 1, 64), numbers(tokens, 1, 64))
            at = LayerCache(spec, cache, metadata)
            backend.attend_latent(at, weights, backend.write_latent(at, weights, q, kv, rotation))
    in_types = (BF16, FP8) if has_fp8() else (BF16,)
    for backend, kept in product((TritonSparseAttention(), FixedTritonSparseAttention()), in_types):
        spec = AttentionSpec(128, 1, 576, 0.1, value_dim=512, index_dim=128, top_k=2048)  # as in DeepSeek-V3.2
        cache = numbers(*backend.cache_shape(64, BLOCK_SIZE, 1, spec.line_width(kept), kept), dtype=kept)
        weights = LatentWeights(numbers(512), 1e-6, numbers(128, 128, 512), numbers(128, 512, 128))
        for step in (batch([1], [4000]), batch([300, 1], [3000, 40])):
            tokens = int(step.query_starts[-1])
            index = IndexInputs(numbers(tokens, 64, 128), numbers(tokens, 128), numbers(tokens, 640)[:, :64])
            at = LayerCache(spec, cache, backend.prepare_eager(step))
            rotation = (numbers(tokens, 1, 64), numbers(tokens, 1, 64))
            written = Written(numbers(tokens, 128, 576), of_index=backend.write_index(at, index, rotation))
            backend.attend_latent(at, weights, written)


def sampling(all_shapes: bool) -> None:
    from quire.kernels.triton import candidates, drafts, logprobs, sampling, shaping, step
    from quire.kernels.triton.rows import start_rows, write_blocks
    from quire.runner.sampling.edits import MAX_BEFORE, MAX_EDITS
    from quire.runner.sampling.mask_buffer import MaskBuffer

    rows, length = 64, 1000
    index, known = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    token_ids = torch.zeros(rows + 1, length, dtype=torch.int32)
    for dtype in (BF16, torch.float32):
        logits = numbers(rows, VOCAB, dtype=dtype)
        for some in (rows, 3, 1):
            sampling.sample_within(logits[:some], numbers(4, some, dtype=torch.float64), index[:some], index[:some])
        for count in (0, 5, 20) if all_shapes else (5,):
            logprobs.logprobs(logits, index, count)
        step.append_greedy(logits, index, token_ids, known, known, rows)
    sampled = numbers(4, rows, dtype=torch.float64), index, index
    for count, of_rows in ((1, None), (64, sampled)):
        offers = candidates.offer_candidates(numbers(rows, VOCAB // 2), VOCAB // 2 + 1, count, of_rows)
        candidates.sample_among(offers.repeat(1, 2), 2, of_rows)
    highest = numbers(rows, dtype=torch.float32)
    step.append_tokens(index.to(torch.int32), highest, index, token_ids, known, known, rows, highest.unsqueeze(1))
    tables, starts = torch.zeros(1, rows + 1, 64, dtype=torch.int32), torch.zeros(rows + 1, dtype=torch.int32)
    write_blocks(tables, torch.zeros(4, 9, dtype=torch.int32))
    start_rows(token_ids, torch.zeros(4, rows + 1, dtype=torch.int64), starts, 1, length)
    step.gather_decode(index, token_ids, known, tables, 16)
    step.gather_mixed(index, starts[:-1], starts, token_ids, known, tables, 16, 256)
    buffer = MaskBuffer(VOCAB, rows, rows, index.device)
    shaping.keep_allowed(numbers(rows, VOCAB), index, buffer.masks, buffer.lines)
    shaped = numbers(rows, VOCAB, dtype=torch.float32)
    edits = torch.zeros(rows * MAX_EDITS, 4 + MAX_BEFORE, dtype=torch.int32)
    shaping.edit_logits(shaped, index, edits, starts, starts, token_ids, known, known)
    penalties = numbers(3, rows + 1, dtype=torch.float32)
    shaping.penalize(shaped, index, penalties, token_ids, known, known)
    ahead = torch.zeros(rows, dtype=torch.int32)
    shaping.keep_allowed(numbers(rows, VOCAB), index, buffer.masks, buffer.lines, ahead)
    shaping.edit_logits(shaped, index, edits, starts, starts, token_ids, known, known, ahead)
    shaping.penalize(shaped, index, penalties, token_ids, known, known, ahead)
    step.append_greedy(shaped, index, token_ids, known, known, rows, ahead)
    drafts.place_drafts(index, starts, starts[:-1], index, ahead, ahead, ahead, token_ids, known, known)


def states(all_shapes: bool) -> None:
    """Qwen3-Next, Kimi-Linear, Granite-4, LFM2 and Mamba."""
    from quire.kernels.triton import chunked_states, states
    from quire.kernels.triton import short_conv as around
    from quire.ops.states import StatePlaces, StateShape

    rows, wide = 8, torch.float32
    for tokens, kernels in ((8, states), (2048, states), (2048, chunked_states)):
        places = StatePlaces(
            numbers(64, 512, dtype=torch.int32),
            numbers(rows, dtype=torch.int64),
            numbers(rows, dtype=torch.int32),
            numbers(rows + 1, dtype=torch.int32),
            16,
        )
        delta = StateShape(8192, 4, 32, 16, 128, 128)
        cache = numbers(3, delta.size, dtype=wide)
        projected = numbers(tokens, 12352)
        around.short_conv(projected[:, :8192], numbers(8192, 4), None, True, cache, places, delta)
        gates = projected[:, 12288:12320], projected[:, 12320:]
        vectors = numbers(32, dtype=wide), numbers(32, dtype=wide)
        kernels.gated_delta(numbers(tokens, 8192), *gates, *vectors, cache, places, delta)
        around.gated_norm(numbers(tokens, 4096), projected[:, 8192:12288], numbers(128), 1e-6, 32, True)
        kimi = StateShape(0, 1, 32, 32, 128, 128, decay_dim=128)
        given = (numbers(tokens, 3 * 4096), numbers(tokens, 4096), numbers(tokens, 32), numbers(32, dtype=wide))
        states_of = numbers(3, kimi.size, dtype=wide), places, kimi
        kernels.gated_delta(*given, numbers(4096, dtype=wide), *states_of)
        space = StateShape(1792, 4, 48, 1, 128, 32)
        cache, heads = numbers(3, space.size, dtype=wide), numbers(48, dtype=wide)
        given = (numbers(tokens, 1792), numbers(tokens, 48), heads, heads, heads, (0.0, float("inf")))
        kernels.state_space(*given, cache, places, space)
        conv = StateShape(1024, 3)
        cache = numbers(3, conv.size, dtype=wide)
        around.gated_conv(numbers(tokens, 3072), numbers(1024, 3), None, cache, places, conv)
        scan = StateShape(1536, 4, 1536, 1, 16, 1, 16)
        cache, x = numbers(3, scan.size, dtype=wide), numbers(tokens, 1536)
        parts = numbers(tokens, 16), numbers(tokens, 16), numbers(1536, 16, dtype=wide), numbers(1536, dtype=wide)
        states.selective_scan(x, x, *parts, cache, places, scan)
        around.gate(x, x, True)


PARTS = {
    "states": states,
    "matmuls": matmuls,
    "widest_matmuls": widest_matmuls,
    "experts": experts,
    "lines": lines,
    "attention": attention,
    "latent": latent,
    "sampling": sampling,
}


def main() -> None:
    pretend(sys.argv[1])
    PARTS[sys.argv[2]](all_shapes="--all" in sys.argv[3:])
    print(json.dumps(dict(sorted(compiled.items()))))


if __name__ == "__main__":
    main()
