"""The parts of the stack that other features stand on: captured states, embeddings as input, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.attention.base import make_batch
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.loader.dummy import fill_dummy
from quire.models.decoder import DecoderLM
from tests.models.architectures import GENERATORS, own_keys
from tests.models.harness import BACKEND, BLOCK_SIZE, PagedSequence, build
from tests.models.zoo import EXPERT_KEYS, SIZES, STATE_KEYS

TOKENS = [5, 250, 17, 33, 90, 2, 41]

# So that rounding cannot choose others.
ONE_EXPERT = {key: 1 for key, value in EXPERT_KEYS.items() if value in (2, 8)}


def make(architecture: str, dtype: torch.dtype = torch.float32, **keys: Any) -> DecoderLM:
    common = {"architectures": [architecture], "head_dim": 16, "sliding_window": 8}
    config = {**SIZES, **EXPERT_KEYS, **STATE_KEYS, **common, **own_keys(architecture), **keys}
    model = build(config, 64, dtype)
    fill_dummy(model, amplitude=0.2)
    return model


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "GraniteForCausalLM"]
)
def test_the_stream_between_layers_is_captured(architecture: str) -> None:
    model = make(architecture, residual_multiplier=0.5, embedding_multiplier=2.0)
    whole = PagedSequence(model, 16)
    inputs = whole.inputs(TOKENS)
    expected = model(*inputs)
    PagedSequence(model, 16)  # fresh caches
    ids, positions, batch = inputs
    hidden, residual, captured = model.model.run_layers(model.model.embed(ids), positions, batch, {0, 2, 4})
    assert torch.equal(model.model.finish(hidden, residual), expected)
    assert sorted(captured) == [0, 2, 4]
    assert torch.equal(captured[0], model.model.embed(ids))
    assert not torch.equal(captured[2], captured[0])
    assert torch.equal(model.model.norm(captured[4]), expected)


def test_what_taps_read_is_returned_and_not_left_on_the_model() -> None:
    model = make("LlamaForCausalLM")
    model.taps = (1, 2)
    ids, positions, batch = PagedSequence(model, 16).inputs(TOKENS)
    before = set(vars(model))
    hidden, tapped = model.forward_tapped(ids, positions, batch)
    assert set(vars(model)) == before
    _, _, expected = model.model.run_layers(model.model.embed(ids), positions, batch, {1, 2})
    assert [torch.equal(one, expected[layer]) for one, layer in zip(tapped, model.taps, strict=True)] == [True, True]
    assert torch.equal(model(ids, positions, batch), hidden)


@pytest.mark.parametrize("architecture", GENERATORS)
def test_wanted_tokens_are_what_the_whole_gives_there(torch_kernels: None, architecture: str) -> None:
    model = make(architecture)
    sequence = PagedSequence(model, 16)
    ids, positions, batch = sequence.inputs(TOKENS)
    expected = model(ids, positions, batch)
    caches = [layer.cache.clone() for layer in model.attention_layers()]
    for layer in model.attention_layers():
        layer.cache.zero_()
    tokens = torch.tensor([2, 6])
    alone = make_batch([1, 1], [3, 7], sequence.table.expand(2, -1), tokens[:0], BLOCK_SIZE)
    wanted = WantedTokens(tokens, [BACKEND.prepare_eager(alone)], torch.zeros(len(ids), dtype=torch.bool))
    hidden = model(ids, positions, ForwardBatch(batch.attention, wanted))
    assert torch.allclose(hidden, expected[tokens], atol=1e-5)
    assert wanted.finite.all()
    for layer, cache in zip(model.attention_layers(), caches, strict=True):
        assert torch.equal(layer.cache, cache)


def test_inputs_embeds_replace_the_tokens_and_are_not_written() -> None:
    model = make("Gemma2ForCausalLM")
    ids, positions, batch = PagedSequence(model, 16).inputs(TOKENS)
    expected = model(ids, positions, batch)
    embeds = model.model.embed(ids)
    before = embeds.clone()
    assert torch.equal(model(torch.zeros_like(ids), positions, batch, inputs_embeds=embeds), expected)
    assert torch.equal(embeds, before)


@pytest.mark.parametrize("architecture", GENERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_in_low_precision_close_to_float32(torch_kernels: None, architecture: str, dtype: torch.dtype) -> None:
    low, full = (make(architecture, kind, **ONE_EXPERT) for kind in (dtype, torch.float32))
    wide = ("router", "sinks", "A_log", "dt_bias", ".D")  # what is never rounded
    rounded = {parameter.dtype for name, parameter in low.named_parameters() if not any(w in name for w in wide)}
    assert rounded == {dtype}
    logits, expected = PagedSequence(low, 16).feed(TOKENS), PagedSequence(full, 16).feed(TOKENS)
    assert logits.dtype == dtype
    logits = logits.float()
    assert torch.isfinite(logits).all()
    difference = (logits - expected).norm() / expected.norm()
    assert difference < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_layers_with_equal_rope_share_a_table() -> None:
    assert len(make("LlamaForCausalLM").model.rotary) == 1
    assert len(make("Gemma3ForCausalLM", sliding_window_pattern=2).model.rotary) == 2
    assert len(make("SmolLM3ForCausalLM").model.rotary) == 1
    assert len(make("SmolLM3ForCausalLM", no_rope_layers=[0, 0, 0, 0]).model.rotary) == 0
