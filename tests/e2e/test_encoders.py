"""Encoders through the whole engine, beside transformers on the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from quire.attention.base import AttentionSpec, HostLengths, LayerCache, Written, make_batch
from quire.attention.cpu_native import NativeAttention
from quire.attention.torch_ref import TorchAttention
from quire.attention.triton import TritonAttention, both_directions
from quire.engine.core import EngineCore
from quire.kernels.triton.limited_attention import limited_tiles
from quire.models.registry import model_class
from quire.types.errors import ConfigError, ModelError
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams
from tests.attention.bidirectional import both_ways
from tests.e2e.test_pooling import PROMPTS, pool, vector
from tests.e2e.tiny import LATENT, VOCAB, make_engine, make_model
from tests.e2e.tiny import SIZES as DECODER
from tests.runner.engines import run_eagerly, spy_on, worker_of

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "initializer_range": 0.15,
}
DISTIL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 160,
    "initializer_range": 0.15,
}
ENCODERS = (
    *("Bert", "Roberta", "XLMRoberta", "DistilBert", "ModernBert", "EuroBert", "NomicBert", "MPNet", "DebertaV2"),
    *("Gte", "JinaEmbeddingsV3"),
)
WINDOWS: dict[str, dict[str, Any]] = {
    "ModernBert": {"local_attention": 16, "pad_token_id": 0},
    "EuroBert": {"pad_token_id": 0, "num_key_value_heads": 2, "head_dim": 16},
    "DebertaV2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    },
    "Gemma3Text": {
        "sliding_window": 16,
        "use_bidirectional_attention": True,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
BIASED = ("MPNet", "DebertaV2")  # no kernel has their attention
WHOLE = PoolingParams(pooling="all", use_activation=False)
MEAN = PoolingParams(pooling="mean")


def make_encoder(folder: Path, name: str, head: bool = False, **keys: Any) -> torch.nn.Module:
    sizes = DISTIL if name == "DistilBert" else SIZES
    config = getattr(transformers, f"{name}Config")(**{**sizes, **WINDOWS.get(name, {}), **keys})
    torch.manual_seed(1)
    auto = transformers.AutoModelForMaskedLM if head else transformers.AutoModel
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path.lower() or path.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def engine(folder: Path, **settings: Any) -> EngineCore:
    return make_engine(folder, **{"max_model_len": 150, **settings})


@pytest.mark.parametrize("backend", ["cpu_native", "torch_ref"])
@pytest.mark.parametrize("name", [*ENCODERS, "Gemma3Text"])
def test_hidden_states_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    theirs = make_encoder(tmp_path, name)
    core = engine(tmp_path, attention_backend=backend)
    outputs = pool(core, PROMPTS, WHOLE)
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).last_hidden_state[0]
        assert expected.std() > 0.3, "the reference must vary, or the comparison says nothing"
        np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-4)
    # The same bits alone and, where the budget takes two prompts at most, beside others.
    small = engine(tmp_path, attention_backend=backend, max_num_batched_tokens=150, max_num_seqs=2)
    assert [output.pooled for output in pool(small, PROMPTS, WHOLE)] == [output.pooled for output in outputs]
    assert pool(core, PROMPTS[4:], WHOLE)[0].pooled == outputs[4].pooled


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [("qwen2", {}), ("qwen3", {}), ("mistral", {"sliding_window": 9}), ("gemma3_text", {"sliding_window": 9})],
)
def test_decoders_that_are_not_causal_are_encoders(model_type: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """As GTE-Qwen2's config says it."""
    make_model(tmp_path, model_type, is_causal=False, **keys)
    theirs = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    outputs = pool(engine(tmp_path), PROMPTS, WHOLE)
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).last_hidden_state[0]
        np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-3)
    with pytest.raises(ConfigError, match="is a model that only pools; set --runner auto"):
        engine(tmp_path, runner="generate")


@pytest.mark.parametrize(
    ("architecture", "keys", "kind"),
    [
        ("Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}, "mamba2"),
        ("DeepseekV3ForCausalLM", {**LATENT, "num_attention_heads": 4}, "latent"),
    ],
)
def test_layers_that_cannot_look_ahead_are_refused(architecture: str, keys: dict[str, Any], kind: str) -> None:
    config = {**DECODER, **keys, "architectures": [architecture]}
    model_class(config).describe(config)
    with pytest.raises(ModelError, match=f"is_causal is false in the model config, but {kind} layers"):
        model_class(config).describe({**config, "is_causal": False})


@pytest.mark.parametrize(
    ("name", "keys"), [("Bert", {"hidden_act": "relu"}), ("DistilBert", {"activation": "gelu_new"})]
)
def test_other_activations(name: str, keys: dict[str, str], tmp_path: Path) -> None:
    theirs = make_encoder(tmp_path, name, **keys)
    with torch.inference_mode():
        expected = theirs(torch.tensor(PROMPTS[4:])).last_hidden_state[0]
    output = pool(engine(tmp_path), PROMPTS[4:], WHOLE)[0]
    np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", [name for name in ENCODERS if name not in BIASED])
def test_steps_are_recorded_on_cpus(name: str, tmp_path: Path) -> None:
    make_encoder(tmp_path, name)
    core = engine(tmp_path)
    spy = spy_on(core)
    recorded = [[output.pooled for output in pool(core, PROMPTS, params)] for params in (WHOLE, MEAN)]
    assert spy.ran
    assert not spy.refused
    run_eagerly(core)
    assert [[output.pooled for output in pool(core, PROMPTS, params)] for params in (WHOLE, MEAN)] == recorded


@pytest.mark.parametrize("name", ENCODERS)
def test_checkpoints_with_a_head_are_read_below_it(name: str, tmp_path: Path) -> None:
    theirs = make_encoder(tmp_path, name, head=True)
    with torch.inference_mode():
        expected = theirs.base_model(torch.tensor(PROMPTS[4:])).last_hidden_state[0]
    output = pool(engine(tmp_path), PROMPTS[4:], WHOLE)[0]
    np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-4)


def test_prompts_are_computed_whole_and_never_cached(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert")
    core = engine(tmp_path, max_model_len=None)
    assert worker_of(core).plan.settings.max_num_batched_tokens >= 160
    for _ in range(2):
        assert pool(core, PROMPTS[:1], PoolingParams(pooling="last"))[0].num_cached_tokens == 0
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 64, but this model attends in both directions"):
        engine(tmp_path, max_num_batched_tokens=64)


def test_what_an_encoder_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert", hidden_act="silu")
    with pytest.raises(Exception, match="unknown activation 'silu' in the config of an encoder; known: gelu, relu"):
        engine(tmp_path)
    make_encoder(tmp_path, "Bert")
    with pytest.raises(ConfigError, match="is a model that only pools; set --runner auto"):
        engine(tmp_path, runner="generate")


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("DebertaV2", {"share_att_key": False}, "share_att_key is False"),
        ("DebertaV2", {"conv_kernel_size": 3}, "conv_kernel_size is 3"),
        ("NomicBert", {"num_shared_experts": 1}, "num_shared_experts is 1"),
        ("NomicBert", {"mlp_fc2_bias": True}, "qkv_proj_bias and mlp_fc2_bias differ"),
        ("NomicBert", {"activation_function": "relu"}, "unknown activation 'relu' in .*; known: swiglu, geglu, gelu"),
        ("NomicBert", {"hidden_act": "relu"}, "unknown activation 'relu'"),
        ("Gte", {"hidden_act": "relu"}, "unknown activation 'relu' in the config of an encoder; known: gelu, silu"),
    ],
)
def test_variants_are_refused_by_name(name: str, keys: dict[str, Any], message: str) -> None:
    config = {**SIZES, **WINDOWS.get(name, {}), **keys, "architectures": [f"{name}Model"]}
    with pytest.raises(ModelError, match=message):
        model_class(config).describe(config)


def test_triton_attention_says_what_it_does_not_do(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert")
    spec = worker_of(engine(tmp_path)).model.attention_layers()[0].spec
    backend = TritonAttention.__new__(TritonAttention)
    assert backend.lacks(spec) is None
    assert backend.lacks(replace(spec, soft_cap=30.0)) == "bidirectional attention with a soft cap or sinks"
    assert "generates" not in model_class({"architectures": ["BertModel"]}).capabilities


@pytest.mark.parametrize("name", [*ENCODERS, "Gemma3Text"])
def test_tokens_at_the_end_that_no_token_attends_to(name: str, tmp_path: Path) -> None:
    """Their vectors count too, as of ColBERT's mask tokens; rows that attend to all tokens run beside them."""
    theirs = make_encoder(tmp_path, name)
    lengths = [(150, 145), (64, 60), (17, 12), (65, 65)]
    prompts, some = [PROMPTS[0][:length] for length, _ in lengths], [seen for _, seen in lengths]

    def ask(core: EngineCore, at: list[int]) -> list[Any]:
        for number in at:
            params = msgspec.structs.replace(WHOLE, attended_tokens=some[number] if number < 3 else None)
            core.add_request(EngineRequest(request_id=str(number), token_ids=prompts[number], params=params))
        found = {}
        while core.has_unfinished():
            found.update({int(output.request_id): output.pooled for output in core.step().outputs})
        return [found[number] for number in at]

    core = engine(tmp_path)
    spy, every = spy_on(core), list(range(len(prompts)))
    together = ask(core, every)
    assert bool(spy.refused) is (name in BIASED), "a kernel list takes such steps"
    for tokens, seen, pooled in zip(prompts, some, together, strict=True):
        mask = torch.tensor([[1] * seen + [0] * (len(tokens) - seen)])
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens]), attention_mask=mask).last_hidden_state[0]
        found = np.frombuffer(pooled.data, np.float32).reshape(pooled.shape)
        count = seen if name == "DebertaV2" else None  # there such tokens are zeros that attend to nothing
        np.testing.assert_allclose(found[:count], expected[:count].numpy(), atol=1e-4)
    assert [ask(core, [number])[0] for number in every] == together, "alone"
    plain = [output.pooled for output in pool(core, prompts, WHOLE)]
    assert [one == other for one, other in zip(plain, together, strict=True)] == [False, False, False, True]
    run_eagerly(core)
    assert ask(core, every) == together
    reference = ask(engine(tmp_path, attention_backend="torch_ref"), every)
    for mine, other in zip(reference, together, strict=True):
        np.testing.assert_allclose(*(np.frombuffer(each.data, np.float32) for each in (mine, other)), atol=1e-4)


@pytest.mark.parametrize("kind", ["last", "cls", "mean"])
def test_other_vectors_of_prompts_that_are_not_attended_to_whole(kind: str, tmp_path: Path) -> None:
    theirs = make_encoder(tmp_path, "Bert")
    with torch.inference_mode():
        mask = torch.tensor([[1] * 9 + [0] * 8])
        hidden = theirs(torch.tensor(PROMPTS[4:]), attention_mask=mask).last_hidden_state[0]
    expected = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[kind]
    params = PoolingParams(pooling=kind, use_activation=False, attended_tokens=9)
    np.testing.assert_allclose(vector(pool(engine(tmp_path), PROMPTS[4:], params)[0]), expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("attended", [None, [3, 1, 70]])
@pytest.mark.parametrize("window", [None, 5])
def test_both_directions_are_the_same_on_every_backend(window: int | None, attended: list[int] | None) -> None:
    """Whole prompts beside each other: the reference, the CPU's kernel, and what a GPU does in float32."""
    lengths, heads, dim, block = [70, 1, 130], 2, 16, 16
    spec = AttentionSpec(heads, heads, dim, 0.3, sliding_window=window, causal=False)
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3 * heads * dim)
    blocks = [-(-length // block) for length in lengths]
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    slots, first = [], 1
    for row, (count, length) in enumerate(zip(blocks, lengths, strict=True)):
        tables[row, :count] = torch.arange(first, first + count)
        slots += [first * block + place for place in range(length)]
        first += count
    batch = make_batch(lengths, lengths, tables, torch.tensor(slots), block)
    if attended is not None:
        limits = torch.tensor(attended, dtype=torch.int32)
        batch = replace(batch, lengths=HostLengths(lengths, lengths, attended), attended=limits)
    q, k, v = qkv.view(-1, 3, heads, dim).unbind(1)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), attended or lengths, strict=True)
    expected = torch.cat([both_ways(spec, *part) for part in parts]).float()
    limited = [torch.tensor(part, dtype=torch.int32) for part in limited_tiles(lengths, attended or lengths)]
    of_gpu = both_directions(spec, Written(q, k, v), batch, (limited[0], limited[1]))
    torch.testing.assert_close(of_gpu, expected, atol=1e-5, rtol=1e-5)
    for backend in (NativeAttention(), TorchAttention()):
        cache = torch.zeros(backend.cache_shape(first, block, heads, dim))
        at = LayerCache(spec, cache, backend.prepare_eager(batch))
        found = backend.attend(at, backend.write(at, qkv, None, None))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
