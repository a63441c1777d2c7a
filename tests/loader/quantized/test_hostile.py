"""Files that are whole and still wrong: numbers that are none, scales of other types, bytes in other orders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.loader.quantized.registry import logical
from tests.loader.quantized.test_checkpoints import ROOT
from tests.loader.quantized.test_layouts import Stored
from tests.loader.quantized.test_models import DOWN, Folder, logits

# The scales of each checkpoint.
SCALES = {
    "awq": "scales",
    "bnb-int8": "SCB",
    "bnb-nf4": "weight.nested_absmax",
    "ct-nvfp4": "weight_scale",
    "ct-w4a16": "weight_scale",
    "ct-w8a8-int8": "weight_scale",
    "fp8-block": "weight_scale_inv",
    "fp8-tensor-static": "weight_scale",
    "gptq": "scales",
    "modelopt-nvfp4": "weight_scale_2",
    "torchao-int4-packed": "_weight_zero_point",
    "torchao-int8": "_weight_scale",
}


def with_one(values: Tensor, value: float) -> Tensor:
    wide = values.float()
    wide.view(-1)[-1] = value
    return wide.to(values.dtype)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", SCALES)
def test_scales_that_are_no_numbers_are_refused_by_name(name: str, value: float, tmp_path: Path) -> None:
    folder, scale = Folder(name, tmp_path), f"{DOWN}.{SCALES[name]}"
    value = float("nan") if name == "ct-nvfp4" else value  # floats of 8 bits have no other such number
    folder.tensors[scale] = with_one(folder.tensors[scale], value)
    shown = f"{DOWN}.weight.absmax" if name == "bnb-nf4" else scale
    folder.refused(f"{shown} has values that are no numbers; download the file again")


def test_powers_of_two_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = Folder("ct-mxfp4", tmp_path)
    folder.tensors[f"{DOWN}.weight_scale"] = torch.full_like(folder.tensors[f"{DOWN}.weight_scale"], 255)
    folder.refused(rf"{DOWN}\.weight_scale has values that are no numbers")


def test_scales_are_not_divided_by_0(tmp_path: Path) -> None:
    folder, name = Folder("ct-nvfp4", tmp_path), f"{DOWN}.weight_global_scale"
    folder.tensors[name] = torch.zeros_like(folder.tensors[name])
    folder.refused(rf"{DOWN}\.weight_global_scale is 0, and scales are divided by it")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["awq", "ct-w4a16", "fp8-block", "fp8-channel", "gptq", "torchao-int8"])
def test_scales_of_integers_or_8_bit_floats_are_refused(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = Folder(name, tmp_path)
    scale = next(key for key in folder.tensors if key.startswith(DOWN) and "scale" in key)
    folder.tensors[scale] = folder.tensors[scale].to(dtype)
    folder.refused(rf"{scale} is of {dtype} instead of torch\.")


def test_scales_of_blocks_may_be_powers_of_two() -> None:
    weight = torch.randn(8, 64).to(torch.float8_e4m3fn)
    powers = torch.randint(120, 130, (2, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    config = {"quant_method": "fp8", "weight_block_size": [4, 32]}
    stored = logical(Stored(config, {"a.weight": weight, "a.weight_scale_inv": powers}))
    spread = powers.float().repeat_interleave(4, 0).repeat_interleave(32, 1)
    assert torch.equal(stored.get("a.weight"), weight.float() * spread)


@pytest.mark.parametrize(("order", "is_read"), [(0, True), (2, False)])
def test_bytes_of_bitsandbytes_in_the_order_of_a_kernel_are_refused(
    order: int, is_read: bool, tmp_path: Path
) -> None:
    folder = Folder("bnb-int8", tmp_path)
    folder.tensors[f"{DOWN}.weight_format"] = torch.tensor(order, dtype=torch.uint8)
    if is_read:
        save_file(folder.tensors, folder.path / "model.safetensors")
        assert torch.equal(logits(folder.path), logits(ROOT / "bnb-int8"))
    else:
        folder.refused(rf"{DOWN}\.weight_format says that bytes of {DOWN} are in the order of one kernel")


def test_blocks_of_scales_that_no_memory_holds_are_not_spread(tmp_path: Path) -> None:
    folder, name = Folder("bnb-nf4", tmp_path), f"{DOWN}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(folder.tensors[name].tolist()))
    state["nested_blocksize"] = 1 << 39
    folder.tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(folder.tensors, folder.path / "model.safetensors")
    assert torch.equal(logits(folder.path), logits(ROOT / "bnb-nf4")), "all scales are of one block, as before"


@pytest.mark.parametrize("shape", [(), (1,), (4, 4)])
def test_scales_of_scales_in_any_dimensions(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder, name = Folder("bnb-nf4", tmp_path), f"{DOWN}.weight.nested_absmax"
    folder.tensors[name] = folder.tensors[name].new_full(shape, float(folder.tensors[name][0]))
    save_file(folder.tensors, folder.path / "model.safetensors")
    assert torch.equal(logits(folder.path), logits(ROOT / "bnb-nf4"))


def test_scales_that_are_floats_and_places_in_a_table(tmp_path: Path) -> None:
    folder, name = Folder("bnb-nf4", tmp_path), f"{DOWN}.weight.absmax"
    folder.tensors[name] = torch.full_like(folder.tensors[name], 200, dtype=torch.float32) * 2
    folder.refused(rf"{name} is not of torch\.uint8, as nested ones are")


@pytest.mark.parametrize(
    ("locations", "is_read"), [(["weight_input", "weight_output"], True), (["weight_input", "input"], False)]
)
def test_rotations_of_activations_are_refused(locations: list[str], is_read: bool, tmp_path: Path) -> None:
    folder = Folder("ct-w4a16", tmp_path)
    apply = [{"targets": ["re:.*down_proj"], "location": location} for location in locations]
    transforms = {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}
    folder.config["quantization_config"]["transform_config"] = transforms
    (folder.path / "config.json").write_text(json.dumps(folder.config))
    if is_read:
        assert torch.equal(logits(folder.path), logits(ROOT / "ct-w4a16"))
    else:
        folder.refused(r"transform_config rotates activations while the model runs \(input\)")


def test_one_row_of_blocks_of_modelopt_is_one_of_blocks() -> None:
    """Its scales look like those of outputs: as many as the matrix has rows."""
    weight = torch.randn(3, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(1, 1, 3, 1)
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    stored = logical(Stored(config, {"a.weight": weight, "a.weight_scale": scales}))
    spread = scales.flatten().repeat_interleave(128)[:300]
    assert torch.equal(stored.get("a.weight"), weight.float() * spread)


def moved(config: dict[str, Any], folder: Path, place: str) -> None:
    quantization = config.pop("quantization_config")
    if place == "compression_config":
        config[place] = quantization
    elif place == "text_config":
        config[place] = {"quantization_config": quantization}
    else:
        del quantization["quant_method"]
        (folder / place).write_text(json.dumps(quantization))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("ct-w4a16", "compression_config"),
        ("ct-w4a16", "text_config"),
        ("gptq", "quantize_config.json"),
        ("awq", "quant_config.json"),
    ],
)
def test_a_config_in_another_place_is_found(name: str, place: str, tmp_path: Path) -> None:
    folder = Folder(name, tmp_path)
    moved(folder.config, folder.path, place)
    (folder.path / "config.json").write_text(json.dumps(folder.config))
    assert torch.equal(logits(folder.path), logits(ROOT / name))


@pytest.mark.parametrize("name", ["awq", "bnb-int8", "bnb-nf4", "ct-nvfp4", "fp8-block", "gptq", "torchao-int8"])
def test_without_a_config_it_is_said_what_is_missing(name: str, tmp_path: Path) -> None:
    folder = Folder(name, tmp_path)
    del folder.config["quantization_config"]
    folder.refused(
        r"(?s)tensors such as model\.layers\.0\.\S+ \(torch\.\w+\) are those of a quantized checkpoint, and its"
        r" config\.json has no quantization_config: copy it from where the model was quantized"
    )
