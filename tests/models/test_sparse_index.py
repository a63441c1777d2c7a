"""Sparse latent attention: short contexts have the dense bits, and no chunking changes the choice of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from quire.attention.forms import AttentionBackends
from quire.attention.native_latent import NativeSparseAttention
from quire.attention.torch_latent import TorchLatentAttention
from quire.loader.dummy import fill_dummy
from quire.models.base import BuildContext, CausalLM
from quire.models.registry import model_class
from quire.ops.latent import INDEX_SCALE
from quire.parallel.pipeline import Pipeline
from quire.planning.memory import kv_layout
from quire.types.cache import KVForm
from quire.types.errors import ConfigError, ModelError
from tests.kernels.cpu.isa import needs_library
from tests.kernels.triton.paged import needs_triton
from tests.models.harness import build, run_chunks
from tests.models.zoo import INDEX, LATENT, LENGTH, ROUTED_EXPERTS, SIZES

FP8 = torch.float8_e4m3fn
TOKENS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()


def make(top_k: int) -> CausalLM:
    keys: dict[str, Any] = {**SIZES, **ROUTED_EXPERTS, **LATENT, **INDEX, "index_topk": top_k, "num_hidden_layers": 2}
    config = transformers.DeepseekV32Config(**keys).to_dict() | {"architectures": ["DeepseekV32ForCausalLM"]}
    model = build(config, 64)
    fill_dummy(model, amplitude=0.3)
    return model


def test_contexts_no_longer_than_top_k_have_the_dense_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(LENGTH)
    sparse = run_chunks(model, TOKENS, [5, 1, 13])
    monkeypatch.setattr(TorchLatentAttention, "_not_chosen", lambda self, spec, index, keys, unit: unit.mask)
    assert torch.equal(run_chunks(model, TOKENS, [5, 1, 13]), sparse)


def test_no_chunking_changes_a_bit() -> None:
    model = make(9)
    whole = run_chunks(model, TOKENS, [LENGTH])
    assert not torch.equal(whole, run_chunks(make(LENGTH), TOKENS, [LENGTH])), "the choice must matter"
    for sizes in ([5, 1, 7, 13], [1]):
        assert torch.equal(run_chunks(model, TOKENS, sizes), whole)


GLM: dict[str, Any] = {**SIZES, **ROUTED_EXPERTS, **LATENT, **INDEX, "num_hidden_layers": 2}
GLM |= {"architectures": ["GlmMoeDsaForCausalLM"], "index_skip_topk_offset": 1, "index_topk": 9}


def make_shared(**keys: Any) -> CausalLM:
    model = build(GLM | keys, 64)
    fill_dummy(model, amplitude=0.3)
    return model


@pytest.mark.parametrize(
    "keys", [{"index_topk_freq": 2}, {"index_topk_pattern": "FS"}, {"indexer_types": ["full", "shared"]}]
)
def test_layers_share_a_choice_however_the_config_says_it(keys: dict[str, Any]) -> None:
    named = {name: value for name, value in GLM.items() if name != "architectures"}
    assert transformers.GlmMoeDsaConfig(**named, **keys).indexer_types == ["full", "shared"]
    model = make_shared(**keys)
    assert [layer.keeps.form for layer in model.cached_layers()] == [KVForm(1, 44, 32, 16), KVForm(1, 44, 32)]
    assert not [name for name, _ in model.named_parameters() if "layers.1." in name and "indexer" in name]


def test_a_shared_choice_is_that_of_the_layer_before_in_any_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_shared(index_topk_freq=2)
    whole = run_chunks(model, TOKENS, [LENGTH])
    for sizes in ([5, 1, 7, 13], [1]):
        assert torch.equal(run_chunks(model, TOKENS, sizes), whole)
    _, second = model.attention_layers()
    monkeypatch.setattr(second, "spec", replace(second.spec, top_k=None))
    assert not torch.equal(run_chunks(model, TOKENS, [LENGTH]), whole), "the shared choice must matter"


@needs_library
def test_native_kernels_share_the_choice_and_memory_without_index_keys() -> None:
    model, backend = make_shared(index_topk_freq=2), NativeSparseAttention()
    whole = run_chunks(model, TOKENS, [LENGTH], backend)
    torch.testing.assert_close(whole, run_chunks(model, TOKENS, [LENGTH]), atol=1e-4, rtol=0)
    assert torch.equal(run_chunks(model, TOKENS, [5, 1, 7, 13], backend), whole)
    assert [layer.cache.shape[-1] for layer in model.cached_layers()] == [44 + 16, 44]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_library)])
def test_no_chunking_changes_a_bit_of_an_indexer_in_fp8(native: bool) -> None:
    model = make_shared(index_topk_freq=2)
    backend = NativeSparseAttention() if native else TorchLatentAttention()
    whole = run_chunks(model, TOKENS, [LENGTH], backend, FP8)
    for sizes in ([5, 1, 7, 13], [1]):
        assert torch.equal(run_chunks(model, TOKENS, sizes, backend, FP8), whole)


def test_memory_counts_the_scales_of_fp8_index_keys() -> None:
    """And bytes that keep lines aligned; of layers that share a choice nothing."""
    layers = make_shared(index_topk_freq=2).cached_layers()
    for name in ("torch_ref", "cpu_native"):
        layout = kv_layout(layers, AttentionBackends(name, [layer.keeps.form for layer in layers]), FP8, 16)
        assert [pool.slots for pool in layout.pools] == [(16 * (44 + 16 + INDEX_SCALE), 16 * 44)]
        assert layout.groups[0].kind == "latent"


@needs_triton
@pytest.mark.parametrize("make_fixed", [False, True])
def test_triton_kernels_share_the_choice(make_fixed: bool) -> None:
    from quire.attention.triton_latent import FixedTritonSparseAttention, TritonSparseAttention

    model, backend = make_shared(index_topk_freq=2), (TritonSparseAttention, FixedTritonSparseAttention)[make_fixed]()
    found = run_chunks(model, TOKENS[:12], [11, 1], backend)
    torch.testing.assert_close(found, run_chunks(model, TOKENS[:12], [12]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("types", [["shared", "full"], ["full"], ["full", "half"]])
def test_wrong_types_are_refused(types: list[str]) -> None:
    with pytest.raises(ModelError, match="name 'full' or 'shared' for each, the first one 'full'"):
        build({**GLM, "indexer_types": types}, 64)


def test_no_stage_begins_with_a_shared_choice() -> None:
    config = {**GLM, "indexer_types": ["full", "shared"]}
    ctx = BuildContext(dtype=torch.float32, max_model_len=64, pipeline=Pipeline(1, 2, (1, 2)))
    with pytest.raises(ConfigError, match="begins with layer 1, which attends to the keys"):
        model_class(config).from_config(config, ctx)
