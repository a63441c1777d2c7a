"""Latents in an fp8 cache with the scale that a checkpoint has: what it divides, attention multiplies by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.attention.native_latent import NativeLatentAttention, NativeSparseAttention
from quire.attention.torch_latent import TorchLatentAttention
from quire.config.engine import EngineConfig
from quire.layers.attention import AttentionLayer
from quire.loader.checkpoint import Checkpoint, TensorInfo
from quire.loader.quantized.kv_cache import scale_caches
from quire.models.base import CausalLM
from quire.ops.latent import INDEX_SCALE
from quire.planning.engine_plan import plan_memory
from quire.runner.kernel_list import KernelList
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import make_engine, run_alone
from tests.kernels.cpu.isa import needs_library
from tests.kernels.triton.paged import needs_triton
from tests.models.harness import load, run_chunks
from tests.models.zoo import LATENTS, LENGTH
from tests.runner.engines import run_eagerly, runner_of, worker_of

FP8 = torch.float8_e4m3fn
TOKENS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
SCALE = 30.0


class Scales(Checkpoint):
    """A checkpoint of scales alone."""

    def __init__(self, **scales: float) -> None:
        blocks = [f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(4)]
        self.scales = {f"{block}.{leaf}": torch.tensor(value) for block in blocks for leaf, value in scales.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {}

    def get(self, name: str) -> Tensor:
        raise KeyError(name)

    def kv_scales(self) -> Mapping[str, Tensor]:
        return self.scales


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("deepseek-v3", "glm-moe-dsa-shared")
    found = {tiny.name: tmp_path_factory.mktemp(tiny.name) for tiny in LATENTS if tiny.name in names}
    for tiny in LATENTS:
        if tiny.name in found:
            tiny.make(found[tiny.name])
    return found


def wide(folder: Path) -> CausalLM:
    """A model whose latents are too large for fp8 by far, and whose up-projections make that good."""
    model = load(folder, 64)
    decoder: Any = model.model
    for layer in decoder.layers:
        block = layer.self_attn
        block.kv_a_layernorm.weight.data *= 4000.0
        block.kv_b_proj.key_up.data /= 4000.0
        block.kv_b_proj.value_up.data /= 4000.0
    return model


def backends(is_sparse: bool) -> list[AttentionBackend]:
    return [TorchLatentAttention(), NativeSparseAttention() if is_sparse else NativeLatentAttention()]


@needs_library
@pytest.mark.parametrize("name", ["deepseek-v3", "glm-moe-dsa-shared"])
@pytest.mark.parametrize("scales", [{"k_scale": SCALE}, {"kv_scale": SCALE}, {"k_scale": SCALE, "v_scale": 7.0}])
def test_a_scale_keeps_what_would_be_cut_off(folders: dict[str, Path], name: str, scales: dict[str, float]) -> None:
    """Four layers of random weights make of errors of 2^-5 a tenth, and of other keys that are chosen a quarter."""
    bound = 0.35 if "dsa" in name else 0.15
    model = wide(folders[name])
    exact = run_chunks(model, TOKENS, [LENGTH])
    for backend in backends("dsa" in name):
        model = wide(folders[name])
        cut = run_chunks(model, TOKENS, [LENGTH], backend, FP8)
        scale_caches(model.attention_layers(), Scales(**scales), torch.float32)
        assert torch.equal(run_chunks(model, TOKENS, [LENGTH], backend, FP8), cut), "only an fp8 cache has scales"
        scale_caches(model.attention_layers(), Scales(**scales), FP8)
        kept = run_chunks(model, TOKENS, [LENGTH], backend, FP8)
        errors = [float((x - exact).norm() / exact.norm()) for x in (cut, kept)]
        assert errors[1] < bound < 0.5 < errors[0], errors
        for sizes in ([5, 1, 7, 13], [1]):
            assert torch.equal(run_chunks(model, TOKENS, sizes, backend, FP8), kept)


def test_a_scale_changes_nothing_but_what_is_rounded(folders: dict[str, Path]) -> None:
    """In a cache of float32, with a number that is no power of two."""
    model = load(folders["deepseek-v3"], 64)
    expected = run_chunks(model, TOKENS, [LENGTH])
    scale_caches(model.attention_layers(), Scales(k_scale=SCALE), FP8)
    torch.testing.assert_close(run_chunks(model, TOKENS, [13, 1, 20]), expected, atol=1e-4, rtol=0)


@needs_triton
def test_triton_kernels_have_the_same_scale(folders: dict[str, Path]) -> None:
    from quire.attention.triton_latent import FixedTritonLatentAttention

    model = wide(folders["deepseek-v3"])
    exact = run_chunks(model, TOKENS[:8], [8])
    scale_caches(model.attention_layers(), Scales(k_scale=SCALE), FP8)
    found = run_chunks(model, TOKENS[:8], [7, 1], FixedTritonLatentAttention(), FP8)
    # The interpreter halves numbers that are rounded up to a power of two, which a GPU does not.
    assert (found - exact).norm() < 0.2 * exact.norm()
    assert torch.equal(run_chunks(model, TOKENS[:8], [8], FixedTritonLatentAttention(), FP8), found)


@needs_library
@pytest.mark.parametrize(("name", "indexers"), [("deepseek-v3", 0), ("glm-moe-dsa-shared", 2)])
def test_captured_steps_apply_it_and_the_ledger_has_half_the_bytes(
    name: str, indexers: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 16 bytes for the scale of an index key."""
    folder, settings = folders[name], {"max_model_len": 64, "max_num_batched_tokens": 32, "num_threads": 2}
    sizes = {
        kv: plan_memory(EngineConfig.from_flat(model=str(folder), kv_cache_dtype=kv, **settings)).layout.page_bytes
        for kv in ("fp8", "float16", "float32")
    }
    numbers = 16 * (4 * 44 + indexers * 16)
    assert sizes == {"fp8": numbers + 16 * indexers * INDEX_SCALE, "float16": 2 * numbers, "float32": 4 * numbers}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    answers = []

    def apply(layers: Iterable[AttentionLayer], checkpoint: Checkpoint, kv_dtype: torch.dtype) -> None:
        scale_caches(layers, Scales(k_scale=3.0), kv_dtype)

    monkeypatch.setattr("quire.worker.worker.scale_caches", apply)
    for eager in (False, True):
        core = make_engine(folder, kv_cache_dtype="fp8", **settings)
        assert {layer.spec.kv_scales for layer in worker_of(core).model.attention_layers()} == {(3.0, 3.0)}
        if eager:
            run_eagerly(core)
        else:
            assert isinstance(runner_of(core).ways[0], KernelList)
        answers.append(run_alone(core, TOKENS, params).content())
    assert answers[0] == answers[1]
