"""Written checkpoints: read back to what was quantized, in the form that compressed-tensors has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.cli.main import main
from quire.cli.quantize import SCHEMES
from quire.config.engine import EngineConfig
from quire.config.groups import ModelConfig
from quire.frontend.text_model import load_text_model
from quire.kernels.cpu.library import unavailable
from quire.layers.quant.base import GroupedMethod, MatrixSpec
from quire.layers.quant.registry import choose_method
from quire.layers.scheme import StoredMatrix
from quire.loader.hub import resolve_model
from quire.loader.open import open_checkpoint
from quire.loader.quantize import WRITTEN
from quire.loader.quantized.registry import logical
from quire.ops.base import Target
from quire.worker.direct import DirectModel
from tests.e2e.tiny import EXPERTS, LATENT, make_model
from tests.loader.gguf_tiny import write_tiny_gguf
from tests.loader.quantized.test_layouts import Stored

# How far a matrix of normal numbers may be off, as a part of its norm.
BOUNDS = {
    "w8a8-int8": 0.01,
    "w8a8-fp8": 0.03,
    "w8a16": 0.01,
    "w4a16": 0.11,
    "w4a16-asym": 0.1,
    "nvfp4": 0.11,
    "mxfp4": 0.14,
}
FORMATS = {
    "w8a8-int8": "int-quantized",
    "w8a8-fp8": "float-quantized",
    "w8a16": "pack-quantized",
    "w4a16": "pack-quantized",
    "w4a16-asym": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen2", dtype="bfloat16", initializer_range=0.05)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def logits(folder: Path) -> torch.Tensor:
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_dtype": "float32", "skip_tokenizer_init": True}
    with torch.inference_mode():
        return DirectModel(EngineConfig.from_flat(model=str(folder), **settings)).logits([3, 9, 27, 81, 43])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_written_checkpoint_is_close_to_the_model(model: Path, tmp_path: Path, scheme: str) -> None:
    folder = tmp_path / "out"
    assert main(["quantize", str(model), "--scheme", scheme, "--out", str(folder)]) == 0
    written, plain = (open_checkpoint(resolve_model(str(path))) for path in (folder, model))
    assert list(written.tensors()) == list(plain.tensors())
    for name in plain.tensors():
        stored, expected = written.stored(name), plain.get(name).float()
        assert isinstance(stored, StoredMatrix) == name.endswith("proj.weight"), name
        values = stored.tensor() if isinstance(stored, StoredMatrix) else stored.float()
        assert (values - expected).norm() <= BOUNDS[scheme] * expected.norm(), name
        assert isinstance(stored, StoredMatrix) or torch.equal(values, expected), name
    expected = logits(model)
    assert (logits(folder) - expected).norm() < 4 * BOUNDS[scheme] * expected.norm()
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == config["config_groups"]["group_0"]["format"] == FORMATS[scheme]
    assert config["ignore"] == ["lm_head"]
    assert (folder / "tokenizer.json").read_text() == "{}"


ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "intermediate_size": 32}
# How each checkpoint names a matrix of an expert when it is quantized, and the linear layers that are not.
MIXTURES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "qwen3_moe": (
        {**EXPERTS, "num_hidden_layers": 2},
        "model.layers.1.mlp.experts.7.gate_proj",
        ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    ),
    "qwen2_moe": (
        {**EXPERTS, "num_hidden_layers": 1, "shared_expert_intermediate_size": 32},
        "model.layers.0.mlp.experts.7.down_proj",
        ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"],
    ),
    "mixtral": (
        ROUTED,
        "model.layers.1.block_sparse_moe.experts.3.w1",
        ["lm_head", "model.layers.0.block_sparse_moe.gate", "model.layers.1.block_sparse_moe.gate"],
    ),
    "granitemoe": (
        ROUTED,
        "model.layers.1.block_sparse_moe.experts.3.w2",
        ["lm_head", *(f"model.layers.{layer}.block_sparse_moe.router.layer" for layer in range(2))],
    ),
    "gpt_oss": (
        {**ROUTED, "hidden_size": 64},
        "model.layers.1.mlp.experts.3.up_proj",
        ["lm_head", "model.layers.0.mlp.router", "model.layers.1.mlp.router"],
    ),
    "deepseek_v3": (
        {**LATENT, "q_lora_rank": 32, "num_hidden_layers": 2},
        "model.layers.1.mlp.experts.7.up_proj",
        [
            *("lm_head", "model.layers.0.self_attn.kv_b_proj", "model.layers.1.mlp.gate"),
            "model.layers.1.self_attn.kv_b_proj",
        ],
    ),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_quantized_one_by_one(kind: str, tmp_path: Path) -> None:
    """As vLLM and transformers read them; what is linear and not quantized is named in "ignore"."""
    settings, name, ignored = MIXTURES[kind]
    model = make_model(tmp_path / "model", kind, dtype="bfloat16", **{"initializer_range": 0.05, **settings})
    folder = tmp_path / "out"
    assert main(["quantize", str(model), "--scheme", "w4a16", "--out", str(folder)]) == 0
    tensors = load_file(folder / "model.safetensors")
    assert tensors[f"{name}.weight_packed"].dtype == torch.int32
    assert not [key for key, tensor in tensors.items() if tensor.ndim == 3], "all experts in one"
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"] == ignored
    expected = logits(model)
    assert (logits(folder) - expected).norm() < 4 * BOUNDS["w4a16"] * expected.norm()
    direct = DirectModel(EngineConfig.from_flat(model=str(folder), max_model_len=64, skip_tokenizer_init=True))
    kept = {method.kept for method in direct.model.modules() if isinstance(method, GroupedMethod)}
    assert kept == {"code4_min_f32"}


# Inputs that fill no word and no panel where a scheme has no groups, else an odd number of groups.
ACTIVATIONS = "float32" if unavailable() is None else "auto"
ODD = {"w8a8-int8": 33, "w8a8-fp8": 33, "w8a16": 42, "nvfp4": 48}


@pytest.mark.parametrize("rows", [1, 17, 33])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_odd_shapes_are_written_read_and_multiplied(scheme: str, rows: int) -> None:
    columns, written = ODD.get(scheme, 96), WRITTEN[scheme]
    group = 32 if scheme.startswith("w4a16") else written.group_size
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    stored = {f"up_proj.{leaf}": part for leaf, part in written.quantize(values, torch.float16, group).items()}
    weight = logical(Stored(written.config(group, ()), stored)).stored("up_proj.weight")
    assert isinstance(weight, StoredMatrix)
    assert weight.shape == (rows, columns)
    assert (weight.tensor() - values).norm() <= 1.3 * BOUNDS[scheme] * values.norm()
    method = choose_method(MatrixSpec(columns, (rows,), False, Target(activations=ACTIVATIONS)), [weight.scheme])
    method.load(0, weight)
    method.finish()
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(method.multiply(x), x @ weight.tensor().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_extreme_matrices_stay_finite(scheme: str) -> None:
    weight = torch.zeros(16, 64)
    weight[1] = 3e4
    weight[2, 5] = 1e-20
    for value in (weight, torch.zeros(16, 64)):
        for dtype in (torch.float16, torch.bfloat16):
            group = 32 if scheme.startswith("w4a16") else WRITTEN[scheme].group_size
            parts = WRITTEN[scheme].quantize(value, dtype, group)
            assert all(part.float().isfinite().all() for part in parts.values() if part.dtype != torch.uint8)


def test_the_command_offers_every_scheme() -> None:
    assert tuple(WRITTEN) == SCHEMES


def test_the_file_is_one_that_safetensors_reads(model: Path, tmp_path: Path) -> None:
    main(["quantize", str(model), "--scheme", "w4a16", "--group-size", "32", "--out", str(tmp_path / "out")])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    assert tensors[f"{layer}.weight_packed"].shape == (64, 96 // 8)
    assert tensors[f"{layer}.weight_scale"].shape == (64, 3)
    assert tensors[f"{layer}.weight_shape"].tolist() == [64, 96]
    assert [path.name for path in (tmp_path / "out").glob("*.data")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "w4a16", "--group-size", "40"], "down_proj.weight has 96 inputs, which groups of 40 do not"),
        (["--scheme", "w8a16", "--group-size", "32"], "w8a16 has a scale per output; leave --group-size out"),
        (["--scheme", "mxfp4", "--group-size", "16"], "mxfp4 always has 32; leave --group-size out"),
        (["--scheme", "w4a16", "--group-size", "0"], "group_size is 0; it must be at least 1"),
        (["--scheme", "w4a16", "--text", "/nowhere"], "text is '/nowhere', which cannot be read"),
        (["--scheme", "w4a16", "--load-format", "dummy"], "which has no weights to quantize; leave --load-format"),
    ],
)
def test_what_cannot_be_done_is_said(
    model: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(model), "--out", str(tmp_path / "out"), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_what_a_gguf_file_says_of_text_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "tiny.gguf", tmp_path / "out"
    write_tiny_gguf("llama", file)
    assert main(["quantize", str(file), "--scheme", "w8a16", "--out", str(folder)]) == 0
    assert "tokenizer" not in capsys.readouterr().out
    before, after = (load_text_model(ModelConfig(model=str(path))) for path in (file, folder))
    assert before.tokenizer is not None
    assert after.tokenizer is not None
    assert after.defaults.params == before.defaults.params
    assert after.tokenizer.eos_token_ids == before.tokenizer.eos_token_ids
    assert after.tokenizer.encode("the hen <|eos|>") == before.tokenizer.encode("the hen <|eos|>")


def test_a_gguf_file_without_a_tokenizer_says_what_to_serve_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = tmp_path / "tiny.gguf", tmp_path / "out"
    monkeypatch.setattr("tests.loader.gguf_tiny.write_tokenizer", lambda writer: None)
    write_tiny_gguf("llama", file)
    assert main(["quantize", str(file), "--scheme", "w8a16", "--out", str(folder)]) == 0
    assert f"{folder} has no tokenizer, so name one to serve it (--tokenizer FOLDER)" in capsys.readouterr().err
    assert not (folder / "tokenizer.json").exists()
    assert (folder / "model.safetensors").exists()


def test_a_folder_with_files_is_left_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(model), "--scheme", "w4a16", "--out", str(model)]) == 1
    assert "is not an empty folder; name another one" in capsys.readouterr().err
