from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quire.loader.gguf_config import config_from_gguf, sampling_from_gguf
from quire.loader.gguf_file import GgufFile
from quire.types.errors import CheckpointError
from tests.loader.gguf_tiny import TINY_MODELS, tiny_hf_model, write_tiny_gguf

BASIC: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": 16,
    "block_count": 2,
    "feed_forward_length": 32,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def write(path: Path, arch: str = "llama", tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> GgufFile:
    """A file with metadata and the embedding only; `None` leaves a key out, dots are written as two underscores."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**BASIC, **{key.replace("__", "."): value for key, value in changes.items()}}.items():
        if value is None:
            continue
        full = key.removeprefix("/") if key.startswith("/") else f"{arch}.{key}"
        kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{kinds[type(value)]}")(full, value)
    for name, tensor in {"token_embd.weight": np.zeros((12, 16), np.float32), **(tensors or {})}.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_config_equals_the_original_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(name, path)
    found = config_from_gguf(GgufFile(path))
    original = tiny_hf_model(name).config
    expected = original.to_dict()
    assert found["architectures"] == [type(tiny_hf_model(name)).__name__]
    # rope has its own spelling here; head_dim, hidden_act and the biases are said even where HF leaves them out.
    implied = {"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "architectures"}
    for key in found.keys() - implied:
        if key in expected:
            assert found[key] == expected[key], key
    assert found["head_dim"] == expected.get("head_dim", 16)


def test_a_float_is_the_shortest_decimal(tmp_path: Path) -> None:
    config = config_from_gguf(write(tmp_path / "m.gguf"))
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] is None


@pytest.mark.parametrize("key", [key for key in BASIC if key != "attention.head_count_kv"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"m\.gguf has no metadata key llama\.{key}, which .* convert"):
        config_from_gguf(write(tmp_path / "m.gguf", **{key.replace(".", "__"): None}))


def test_the_logit_scale_of_granite_is_required(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"granite\.logit_scale"):
        config_from_gguf(write(tmp_path / "m.gguf", "granite"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rope__freq_base", 1.0, "above 1"),
        ("block_count", 0, "a positive whole number"),
        ("block_count", (1 << 32) - 1, "at most 10000"),
        ("expert_count", 1 << 20, "at most 4096"),
        ("attention__head_count", "four", "a positive whole number"),
        ("attention__head_count_kv", [2, 1], "the same for all layers"),
        ("attention__layer_norm_rms_epsilon", "small", "a number"),
        ("rope__scaling__type", 3, "a string"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"llama\.{key.replace('__', '.')} is .*; it must be {message}"):
        config_from_gguf(write(tmp_path / "m.gguf", **{key: value}))


def test_values_per_layer_may_be_equal(tmp_path: Path) -> None:
    config = config_from_gguf(write(tmp_path / "m.gguf", attention__head_count_kv=[2, 2]))
    assert config["num_key_value_heads"] == 2


def test_heads_are_not_grouped_unless_the_file_says_so(tmp_path: Path) -> None:
    config = config_from_gguf(write(tmp_path / "m.gguf", attention__head_count_kv=None))
    assert config["num_key_value_heads"] == 4


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"architecture 'rwkv7'; supported: llama, .*qwen2"):
        config_from_gguf(write(tmp_path / "m.gguf", "rwkv7"))


def test_different_key_and_value_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"value_length is 4 but heads have 8"):
        config_from_gguf(write(tmp_path / "m.gguf", attention__key_length=8, attention__value_length=4))


def test_an_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type is 'odd'; supported: none, linear, yarn"):
        config_from_gguf(write(tmp_path / "m.gguf", rope__scaling__type="odd", rope__scaling__factor=2.0))


def test_yarn_takes_its_betas_from_the_file(tmp_path: Path) -> None:
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_beta_fast": 16.0}
    config = config_from_gguf(write(tmp_path / "m.gguf", rope__scaling__original_context_length=32, **scaling))
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
    }


def test_rope_factors_must_be_float32(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.ones(2, np.float16)}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has type F16"):
        config_from_gguf(write(tmp_path / "m.gguf", tensors=tensors))


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_gemmas_scale_attention_by_hidden_size(tmp_path: Path, arch: str, layers: int) -> None:
    changes = {"attention__key_length": 8, "attention__value_length": 8}
    large = config_from_gguf(write(tmp_path / "l.gguf", arch, block_count=layers, **changes))
    small = config_from_gguf(write(tmp_path / "s.gguf", arch, **changes))
    assert (large["query_pre_attn_scalar"], small["query_pre_attn_scalar"]) == (4, 8)


def test_layers_may_be_listed_one_by_one(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"attention__sliding_window_pattern": [False, True], "attention__sliding_window": 8}
    config = config_from_gguf(write(tmp_path / "m.gguf", "gemma3", **changes))
    assert config["layer_types"] == ["full_attention", "sliding_attention"]


def test_gemma3_without_a_window_sees_everything(tmp_path: Path) -> None:
    config = config_from_gguf(write(tmp_path / "m.gguf", "gemma3"))
    assert (config["sliding_window"], config["layer_types"]) == (None, ["full_attention"] * 2)


def test_olmo2_with_a_window_is_olmo3(tmp_path: Path) -> None:
    config = config_from_gguf(write(tmp_path / "m.gguf", "olmo2", attention__sliding_window=8))
    assert config["architectures"] == ["Olmo3ForCausalLM"]


def test_suggestions_for_sampling(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"/general.sampling.temp": 0.6, "/general.sampling.penalty_repeat": 1.05}
    found = sampling_from_gguf(write(tmp_path / "m.gguf", **changes))
    assert found == {"temperature": 0.6, "repetition_penalty": 1.05}
    assert sampling_from_gguf(write(tmp_path / "none.gguf")) == {}
