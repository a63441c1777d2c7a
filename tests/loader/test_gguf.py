"""GGUF files against independent readers: llama.cpp for what they compute, transformers for what they hold."""

from __future__ import annotations

import contextlib
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from quire.layers.scheme import F32, StoredMatrix, as_tensor, part_of
from quire.loader.gguf import GgufCheckpoint
from quire.loader.gguf_file import GgufFile
from quire.loader.gguf_quants import SCHEMES
from quire.loader.hub import resolve_model
from quire.types.errors import CheckpointError
from tests.loader.gguf_tiny import TINY_MODELS, VOCAB_SIZE, write_tiny_gguf
from tests.loader.llama_cpp import LlamaCpp

# llama.cpp takes GELU from a float16 table, which shows in Gemma only.
TOLERANCES = {"gemma2": 2e-2, "gemma3": 2e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def state_dict(checkpoint: GgufCheckpoint) -> dict[str, Tensor]:
    return {name: checkpoint.get(name) for name in checkpoint.tensors()}


def hf_model(checkpoint: GgufCheckpoint) -> PreTrainedModel:
    """transformers' model of the checkpoint's own config and tensors; every tensor has to fit."""
    config = AutoConfig.for_model(**checkpoint.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = {name: tensor.float() for name, tensor in state_dict(checkpoint).items()}
    if checkpoint.config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    return model


@torch.no_grad()
def next_token_logprobs(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    return model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_config_and_tensors_compute_what_llama_cpp_computes(folder: Path, name: str) -> None:
    path = folder / f"{name}.gguf"
    write_tiny_gguf(name, path)
    checkpoint = GgufCheckpoint(path)
    model, oracle = hf_model(checkpoint), LlamaCpp(path, VOCAB_SIZE)
    for length in (1, 7, 40):
        found = next_token_logprobs(model, prompt_of(length))
        expected = oracle.next_token_logprobs(prompt_of(length))
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCES.get(TINY_MODELS[name].arch, 1e-4))


def test_long_factors_of_longrope_compute_what_llama_cpp_computes(folder: Path) -> None:
    path = folder / "long.gguf"
    write_tiny_gguf("phi3-longrope", path)
    model, oracle = hf_model(GgufCheckpoint(path)), LlamaCpp(path, VOCAB_SIZE, context=1024)
    prompt = prompt_of(600)  # beyond the original 512
    expected = oracle.next_token_logprobs(prompt)
    torch.testing.assert_close(next_token_logprobs(model, prompt), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_file_computes_what_llama_cpp_computes(folder: Path, quant: str) -> None:
    path = folder / f"{quant}.gguf"
    write_tiny_gguf("llama-tied", path, quant)
    model, oracle = hf_model(GgufCheckpoint(path)), LlamaCpp(path, VOCAB_SIZE)
    found, expected = next_token_logprobs(model, prompt_of(9)), oracle.next_token_logprobs(prompt_of(9))
    # llama.cpp rounds activations to 8 bits for block formats and to half floats for those, so only the shape
    # of the distribution is the same; a block decoded wrongly would leave nothing of it.
    assert (found - expected).std() < 0.1 * expected.std()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("quant", [None, "Q8_0"])
def test_tensors_equal_those_transformers_reads(folder: Path, name: str, quant: str | None) -> None:
    path = folder / f"{name}-{quant}.gguf"
    write_tiny_gguf(name, path, quant)
    # Of Qwen3, transformers does not read the size of heads, which is not the default.
    sizes = TINY_MODELS[name].config if name == "qwen3" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32, **sizes)
    expected, found = model.state_dict(), state_dict(GgufCheckpoint(path))
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.nightly
def test_the_default_model_equals_what_transformers_reads() -> None:
    source = resolve_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(source.path.parent, gguf_file=source.path.name, dtype=torch.float32)
    checkpoint = GgufCheckpoint(source.path)
    expected = model.state_dict()
    assert set(checkpoint.tensors()) == set(expected) - {"lm_head.weight"}
    for name in checkpoint.tensors():
        assert torch.equal(checkpoint.get(name), expected[name]), name


def test_the_default_model_equals_what_gguf_py_and_transformers_decode() -> None:
    """The test above without transformers' reader, which takes long over the vocabulary: its parts."""
    checkpoint = GgufCheckpoint(resolve_model("smollm2").path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    assert len(checkpoint.tensors()) == 30 * 9 + 2
    for name, info in checkpoint.tensors().items():
        stored = checkpoint.file.tensors[names.get_name(name, try_suffixes=(".weight",))]
        kind = gguf.GGMLQuantizationType[stored.type]
        data = checkpoint.file.data(stored)
        data = data.view(np.float32) if stored.type == "F32" else data.reshape(stored.shape[0], -1)
        expected = processor.process(gguf.quants.dequantize(data, kind), stored.name).weights
        tensor = checkpoint.get(name)
        assert torch.equal(tensor, torch.from_numpy(expected.copy())), name
        assert (tensor.shape, tensor.dtype) == (info.shape, info.dtype)


def test_config_of_the_default_model() -> None:
    checkpoint = GgufCheckpoint(resolve_model("smollm2").path)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["rope_theta"] == 100000.0
    assert checkpoint.config["rms_norm_eps"] == 1e-5
    assert checkpoint.config["vocab_size"] == 49152
    assert checkpoint.config["tie_word_embeddings"]


def test_names_are_in_natural_order(folder: Path) -> None:
    path = folder / "order.gguf"
    write_tiny_gguf("gemma3", path)
    names = list(GgufCheckpoint(path).tensors())
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)


def test_half_floats_keep_their_type(folder: Path) -> None:
    path = folder / "half.gguf"
    write_tiny_gguf("qwen2", path, "BF16")
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.get("model.layers.0.mlp.up_proj.weight").dtype == torch.bfloat16
    assert checkpoint.tensors()["model.layers.0.mlp.up_proj.weight"].num_bytes == 96 * 64 * 2


@pytest.mark.parametrize("kind", ["q_proj", "k_proj", "v_proj"])
def test_stored_blocks_decode_to_the_same_values(folder: Path, kind: str) -> None:
    path = folder / "raw.gguf"
    write_tiny_gguf("llama", path, "Q4_0")
    checkpoint = GgufCheckpoint(path)
    name = f"model.layers.1.self_attn.{kind}.weight"
    stored = checkpoint.stored(name)
    assert isinstance(stored, StoredMatrix)
    assert stored.scheme == checkpoint.tensors()[name].scheme == SCHEMES["Q4_0"]
    assert stored.shape == checkpoint.tensors()[name].shape
    assert torch.equal(stored.tensor(), checkpoint.get(name))
    assert torch.equal(as_tensor(part_of(stored.part(0, 4, 8), 1, 32, 32)), checkpoint.get(name)[4:12, 32:])
    assert isinstance(stored.part(1, 32, 32), StoredMatrix)
    assert torch.equal(as_tensor(stored.part(1, 8, 50)), checkpoint.get(name)[:, 8:58]), "a cut inside a block"


def test_floats_are_handed_out_as_tensors(folder: Path) -> None:
    path = folder / "raw32.gguf"
    write_tiny_gguf("llama", path)
    checkpoint = GgufCheckpoint(path)
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight"):
        stored = checkpoint.stored(name)
        assert isinstance(stored, torch.Tensor)
        assert torch.equal(stored, checkpoint.get(name))
        assert checkpoint.tensors()[name].scheme == F32


def test_an_absent_tensor_is_named(folder: Path) -> None:
    path = folder / "absent.gguf"
    write_tiny_gguf("llama", path)
    with pytest.raises(CheckpointError, match=r"absent\.gguf has no tensor 'nothing'"):
        GgufCheckpoint(path).get("nothing")


def write_with_extra(path: Path, name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_unsupported_type_names_the_supported_ones(folder: Path) -> None:
    path = folder / "iq.gguf"
    kind = gguf.GGMLQuantizationType.Q8_K
    write_with_extra(path, "blk.0.ffn_up.weight", np.zeros((8, 292), np.uint8), kind)
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight' has type Q8_K; supported types: F32, .*Q6_K"):
        GgufCheckpoint(path)


def test_an_unknown_tensor_is_refused(folder: Path) -> None:
    path = folder / "hybrid.gguf"
    write_with_extra(path, "blk.0.ssm_in.weight", np.zeros((2, 8), np.float32), gguf.GGMLQuantizationType.F32)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ssm_in\.weight' has no place in a llama model"):
        GgufCheckpoint(path)


def test_rows_that_the_heads_cannot_share_are_refused(folder: Path) -> None:
    path = folder / "heads.gguf"
    write_with_extra(path, "blk.0.attn_q.weight", np.zeros((6, 8), np.float32), gguf.GGMLQuantizationType.F32)
    with pytest.raises(CheckpointError, match=r"has 6 rows, which 2 heads cannot share"):
        GgufCheckpoint(path).get("model.layers.0.self_attn.q_proj.weight")


@pytest.fixture(scope="module")
def damaged(folder: Path) -> tuple[bytes, int, Path]:
    path = folder / "whole.gguf"
    write_tiny_gguf("gemma2", path)
    start = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    return path.read_bytes(), start, folder / "damaged.gguf"


@settings(max_examples=150)
@given(st.data())
def test_damaged_metadata_never_gives_another_error(damaged: tuple[bytes, int, Path], data: st.DataObject) -> None:
    whole, start, path = bytearray(damaged[0]), damaged[1], damaged[2]
    # The keys of the architecture come first, the long vocabulary lists after them.
    whole[data.draw(st.integers(24, min(start, 1200)))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    with contextlib.suppress(CheckpointError):
        state_dict(GgufCheckpoint(path))
