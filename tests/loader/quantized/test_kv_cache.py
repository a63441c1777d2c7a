"""Scales of an fp8 KV cache: read by each format's names, used where the cache is fp8, refused if they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.attention.forms import AttentionBackends
from quire.config.engine import EngineConfig
from quire.layers.attention import AttentionLayer
from quire.loader.hub import resolve_model
from quire.loader.open import open_checkpoint
from quire.loader.quantized.kv_cache import asked_kv_dtype
from quire.planning.defaults import choose_kv_dtype
from quire.planning.engine_plan import plan_engine
from quire.types.cache import KVForm
from quire.types.errors import CheckpointError
from quire.worker.direct import DirectModel
from quire.worker.worker import load_model
from tests.loader.quantized.test_checkpoints import ROOT
from tests.loader.quantized.test_models import TOKENS, Folder

FP8 = torch.float8_e4m3fn
ATTN = "model.layers.{}.self_attn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
NAMES = {  # checkpoint, and what it calls the scales of keys and of values
    "compressed-tensors": ("ct-w8a8-fp8", "k_scale", "v_scale"),
    "fp8": ("fp8-channel", "k_scale", "v_scale"),
    "fp8, one for both": ("fp8-channel", "kv_scale", "kv_scale"),
    "modelopt": ("modelopt-fp8", "k_proj.k_scale", "v_proj.v_scale"),
    "modelopt of before": ("modelopt-fp8", "k_proj.output_scale", "v_proj.output_scale"),
}


def scaled(name: str, folder: Path, scales: dict[str, float | Tensor], **quantization: Any) -> Path:
    """A copy of a committed checkpoint with these tensors in each of its layers, and values of its config."""
    copy = Folder(name, folder)
    for leaf, value in scales.items():
        for layer in range(copy.config["num_hidden_layers"]):
            copy.tensors[f"{ATTN.format(layer)}.{leaf}"] = torch.as_tensor(value)
    copy.config["quantization_config"] |= quantization
    save_file(copy.tensors, copy.path / "model.safetensors")
    (copy.path / "config.json").write_text(json.dumps(copy.config))
    return copy.path


def settings(folder: Path, kv: str, **flags: Any) -> EngineConfig:
    return EngineConfig.from_flat(model=str(folder), max_model_len=64, kv_cache_dtype=kv, **flags)


def layers(folder: Path, kv: str) -> list[AttentionLayer]:
    config = settings(folder, kv)
    return load_model(plan_engine(config), config).attention_layers()


@pytest.mark.parametrize("kind", NAMES)
def test_scales_reach_the_layers_of_an_fp8_cache_alone(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, of_keys, of_values = NAMES[kind]
    folder = scaled(name, tmp_path, {of_values: 0.5, of_keys: 0.25})
    expected = (0.25, 0.25 if of_keys == of_values else 0.5)
    caplog.set_level("INFO")
    found = layers(folder, "fp8")
    assert [layer.spec.kv_scales for layer in found] == [expected] * len(found)
    assert f"keys and values of {len(found)} layers are kept as fp8 with the scales of the checkpoint" in caplog.text
    assert all(layer.spec.kv_scales == (1.0, 1.0) for layer in layers(folder, "float32"))
    assert "and it is float32; --kv-cache-dtype fp8 uses them" in caplog.text


def test_the_scales_a_layer_lacks_are_one() -> None:
    assert all(layer.spec.kv_scales == (1.0, 1.0) for layer in layers(ROOT / "fp8-channel", "fp8"))


def test_scales_keep_what_would_be_cut_off(tmp_path: Path) -> None:
    """Values of a thousand and more: fp8 ends at 448, and with a scale the logits are nearly those of float32."""
    copy = Folder("fp8-channel", tmp_path)
    for name in copy.tensors:
        if name.endswith("v_proj.weight_scale") or name.endswith("k_proj.weight_scale"):
            copy.tensors[name] = copy.tensors[name] * 2000
    save_file(copy.tensors, copy.path / "model.safetensors")

    def logits(folder: Path, kv: str) -> Tensor:
        with torch.inference_mode():
            return DirectModel(settings(folder, kv)).logits(TOKENS)

    exact, cut = logits(copy.path, "float32"), logits(copy.path, "fp8")
    for layer in range(copy.config["num_hidden_layers"]):
        copy.tensors[f"{ATTN.format(layer)}.k_scale"] = copy.tensors[f"{ATTN.format(layer)}.v_scale"] = torch.tensor(
            40.0
        )
    save_file({k: v.clone() for k, v in copy.tensors.items()}, copy.path / "model.safetensors")
    kept = logits(copy.path, "fp8")
    error = [float((x - exact).norm() / exact.norm()) for x in (cut, kept)]
    assert error[1] < 0.05 < error[0]


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": 0.5}, "a scale for the keys of layer 0 .* none for its values; is it complete"),
        ({"k_scale": -1.0, "v_scale": 1.0}, r"self_attn\.k_scale is -1\.0, but a scale .* above 0"),
        ({"k_scale": 1.0, "v_scale": torch.nan}, r"self_attn\.v_scale is nan, but a scale"),
        ({"k_scale": torch.ones(2, 1), "v_scale": torch.ones(2, 1)}, r"k_scale has the shape \[2, 1\], but an"),
    ],
)  # fmt: skip
def test_wrong_scales_are_refused_by_name(scales: dict[str, float | Tensor], message: str, tmp_path: Path) -> None:
    folder = scaled("fp8-channel", tmp_path, scales)
    with pytest.raises(CheckpointError, match=message):
        layers(folder, "fp8")
    layers(folder, "float32")


def test_what_has_no_scales_here_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = scaled("modelopt-fp8", tmp_path, {"q_scale": 0.5, "kv_b_proj.output_scale": 0.5})
    checkpoint = open_checkpoint(resolve_model(str(folder)))
    assert not [name for name in checkpoint.tensors() if "q_scale" in name or "output_scale" in name]
    assert "2 tensors of the checkpoint are not used: scales of queries or latents in fp8" in caplog.text


def test_auto_is_what_the_checkpoint_is_made_for() -> None:
    def chosen(quantization: dict[str, Any], value_dim: int | None = None, kv: str = "auto") -> torch.dtype:
        config = EngineConfig.from_flat(model="x", kv_cache_dtype=kv)
        asked = asked_kv_dtype({"quantization_config": quantization})
        backends = AttentionBackends("torch_ref", [KVForm(1, 40, value_dim)])
        return choose_kv_dtype(config, backends, torch.float32, False, asked)

    assert chosen({"kv_cache_scheme": SCHEME}) == FP8
    assert chosen({"kv_cache_quant_algo": "FP8"}) == FP8
    assert chosen({"kv_cache_scheme": SCHEME}, kv="float32") == torch.float32
    for other in ({}, {"strategy": "attn_head"}, {"dynamic": True}, {"type": "int"}, {"num_bits": 4}):
        assert chosen({"kv_cache_scheme": SCHEME | other if other else None}) == torch.float32
    assert chosen({"kv_cache_scheme": SCHEME}, value_dim=32) == FP8
    assert asked_kv_dtype({}) is None
