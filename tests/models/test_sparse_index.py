"""Sparse latent attention: short contexts have the dense bits, and no chunking changes the choice of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from quire.attention.torch_latent import TorchLatentAttention
from quire.loader.dummy import fill_dummy
from quire.models.base import CausalLM
from quire.types.errors import ModelError
from tests.models.harness import build, run_chunks
from tests.models.zoo import INDEX, LATENT, LENGTH, ROUTED_EXPERTS, SIZES

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
    monkeypatch.setattr(TorchLatentAttention, "_chosen", lambda self, spec, index, lines, unit: unit.mask)
    assert torch.equal(run_chunks(model, TOKENS, [5, 1, 13]), sparse)


def test_no_chunking_changes_a_bit() -> None:
    model = make(9)
    whole = run_chunks(model, TOKENS, [LENGTH])
    assert not torch.equal(whole, run_chunks(make(LENGTH), TOKENS, [LENGTH])), "the choice must matter"
    for sizes in ([5, 1, 7, 13], [1]):
        assert torch.equal(run_chunks(model, TOKENS, sizes), whole)


@pytest.mark.parametrize(
    "keys", [{"index_topk_freq": 2}, {"index_topk_pattern": "FS"}, {"indexer_types": ["full", "shared"]}]
)
def test_layers_that_share_a_choice_are_refused(keys: dict[str, Any]) -> None:
    """However the config says it, and whatever transformers makes of the keys."""
    sizes: dict[str, Any] = {**SIZES, **ROUTED_EXPERTS, **LATENT, **INDEX, "num_hidden_layers": 2}
    theirs = transformers.GlmMoeDsaConfig(**sizes, **keys, index_skip_topk_offset=1)
    assert theirs.indexer_types == ["full", "shared"]
    config = {**sizes, "architectures": ["GlmMoeDsaForCausalLM"], "index_skip_topk_offset": 1}
    with pytest.raises(ModelError, match="layers share the choice of keys"):
        build({**config, **keys}, 64)
    build({**config, **{"index_topk_freq": 1}}, 64)
