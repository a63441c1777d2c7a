"""Models on quantized checkpoints answer as on dequantized ones, in the planned memory; damaged ones are refused."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.kernels.cpu.library import unavailable
from quire.layers.linear import QKVParallelLinear
from quire.layers.quant.base import MatrixSpec, kept_weights
from quire.layers.quant.fp8 import Fp8Linear
from quire.layers.quant.plain import PlainLinear
from quire.layers.quant.registry import choose_method
from quire.layers.scheme import StoredMatrix, as_tensor
from quire.loader.hub import resolve_model
from quire.loader.open import open_checkpoint
from quire.loader.quantized.registry import logical
from quire.loader.safetensors import SafetensorsCheckpoint
from quire.ops.base import Target
from quire.planning.engine_plan import plan_engine
from quire.types.errors import CheckpointError, QuireError
from quire.worker.direct import DirectModel
from quire.worker.worker import load_model
from tests.e2e.test_quantized import taken, weights_of
from tests.kernels.triton.paged import needs_triton
from tests.loader.quantized.test_checkpoints import NAMES, ROOT
from tests.loader.quantized.test_layouts import Stored

# What the CPU kernels do not hold: groups of 16 that they have no form for.
DECODED = {"ct-fp8-block", "fp8-block"}
BYTES = ("bnb-int8", "ct-w8a8-int8", "torchao-int8-dynamic")  # with activations of 8 bits
TOKENS = [3, 9, 27, 11, 23, 29, 7]
GATE, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "down"))


def settings(folder: Path, **flags: Any) -> EngineConfig:
    return EngineConfig.from_flat(model=str(folder), max_model_len=64, kv_cache_dtype="float32", **flags)


def logits(folder: Path, **flags: Any) -> Tensor:
    with torch.inference_mode():
        return DirectModel(settings(folder, **flags)).logits(TOKENS)


def dequantized(name: str, folder: Path) -> Path:
    """The same model with plain float32 weights."""
    checkpoint = open_checkpoint(resolve_model(str(ROOT / name)))
    folder.mkdir()
    save_file(
        {tensor: checkpoint.get(tensor).float().contiguous() for tensor in checkpoint.tensors()},
        folder / "model.safetensors",
    )
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_model_answers_as_the_dequantized_one(name: str, tmp_path: Path) -> None:
    reference = logits(dequantized(name, tmp_path / "plain"), dtype="float32")
    exact = {"activations": "float32"} if name in BYTES and unavailable() is None else {}
    for flags in (exact, {"quantization": "none"}):
        torch.testing.assert_close(logits(ROOT / name, **flags), reference, atol=2e-4, rtol=1e-3)
    if unavailable() is None:
        config = settings(ROOT / name)
        plan = plan_engine(config)
        assert weights_of(plan) == taken(load_model(plan, config))
        note = next(entry.note for entry in plan.ledger.entries if entry.name == "weights")
        assert ("become float32 when they are loaded" in note) == (name in DECODED), note


@pytest.mark.skipif(unavailable() is not None, reason="needs the native CPU library")
@pytest.mark.parametrize("name", ["ct-w8a8-int8", "ct-w8a8-int8-asym", "ct-w4a16", "gptq"])
def test_activations_of_8_bits_on_stored_integers(name: str) -> None:
    exact, rounded = (logits(ROOT / name, activations=activations) for activations in ("float32", "int8"))
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.03


@pytest.mark.skipif(unavailable() is not None, reason="needs the native CPU library")
@pytest.mark.parametrize("name", NAMES)
def test_activations_are_rounded_as_a_checkpoint_asks_or_it_is_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    schemes = [info.scheme for info in open_checkpoint(resolve_model(str(ROOT / name))).tensors().values()]
    asked = {scheme.element for scheme in schemes if scheme.activations != "none"}
    plan = plan_engine(settings(ROOT / name))
    assert (plan.settings.activations == "int8") == (name in BYTES)
    assert ("what the checkpoint is made for" in "; ".join(plan.settings.explain())) == (name in BYTES)
    caplog.set_level("INFO")
    model = load_model(plan, settings(ROOT / name))
    said = f"for {', '.join(sorted(asked))} weights" in caplog.text
    assert said == (bool(asked) and name not in BYTES), caplog.text
    if name in BYTES:
        assert "(activations in int8)" in kept_weights(model)
        exact, rounded = logits(ROOT / name, activations="float32"), logits(ROOT / name)
        assert torch.equal(rounded, logits(ROOT / name, activations="int8"))
        assert 0 < (rounded - exact).norm() / exact.norm() < 0.03


@needs_triton
@pytest.mark.parametrize("name", ["fp8-channel", "fp8-tensor-static", "ct-w8a8-fp8", "modelopt-fp8", "fp8-block"])
def test_fp8_rows_are_multiplied_as_fp8_on_a_gpu(name: str) -> None:
    weight = open_checkpoint(resolve_model(str(ROOT / name))).stored(f"{GATE}.weight")
    assert isinstance(weight, StoredMatrix)
    spec = MatrixSpec(weight.shape[1], (weight.shape[0],), False, Target("cuda", torch.bfloat16))
    method = choose_method(spec, [weight.scheme])
    assert isinstance(method, Fp8Linear) == (name != "fp8-block")
    weight_only = choose_method(spec, [replace(weight.scheme, activations="none", roles=weight.scheme.roles[:2])])
    assert not isinstance(weight_only, Fp8Linear)


@pytest.mark.parametrize("name", ["fp8-tensor-static", "ct-fp8-static", "ct-w8a8-fp8"])
def test_fp8_activations_are_left_as_they_are_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they would be as the checkpoint says, by the formula, is another thing, and not far away."""
    exact, flags = logits(ROOT / name), {"quantization": "none", "dtype": "float32"}
    torch.testing.assert_close(logits(ROOT / name, **flags), exact, atol=2e-4, rtol=1e-3)
    stored = SafetensorsCheckpoint(ROOT / name)
    scales = {path: stored.get(path) for path in stored.tensors() if path.endswith("input_scale")}
    multiply = PlainLinear.multiply

    def rounded(self: PlainLinear, x: Tensor) -> Tensor:
        """Of merged matrices all parts have the input of the first."""
        path = self.spec.path.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj")
        if self.spec.role != "linear" or path.endswith("o_proj"):  # a layer in floats
            return multiply(self, x)
        scale = scales[f"{path}.input_scale"] if scales else x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return multiply(self, (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)

    monkeypatch.setattr(PlainLinear, "multiply", rounded)
    as_told = logits(ROOT / name, **flags)
    assert 1e-3 < (as_told - exact).norm() / exact.norm() < 0.06


class Folder:
    """A copy of a committed checkpoint that can be damaged."""

    def __init__(self, name: str, root: Path) -> None:
        self.path = Path(shutil.copytree(ROOT / name, root / name))
        self.tensors = load_file(self.path / "model.safetensors")
        self.config = json.loads((self.path / "config.json").read_text())

    def refused(self, message: str) -> None:
        save_file(self.tensors, self.path / "model.safetensors")
        (self.path / "config.json").write_text(json.dumps(self.config))
        with pytest.raises(QuireError, match=message):
            DirectModel(settings(self.path))


INT4_TYPE = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {}}
DAMAGED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    # name: (checkpoint, tensors, values of quantization_config, message); None takes away
    "no scales": ("awq", {f"{GATE}.scales": None}, {}, rf"{GATE}\.scales is missing"),
    "no zeros": ("gptq", {f"{GATE}.qzeros": None}, {}, rf"{GATE}\.qzeros is missing"),
    "no index": ("gptq-act-order", {f"{GATE}.g_idx": None}, {}, rf"{GATE}\.g_idx is missing"),
    "index too high": (
        "gptq-act-order",
        {f"{DOWN}.g_idx": torch.full((64,), 7, dtype=torch.int32)},
        {},
        rf"{DOWN}\.g_idx names groups 7 to 7 but there are 2; download",
    ),
    "index that the config does not tell of": ("gptq-act-order", {}, {"desc_act": False}, "set .*desc_act to true"),
    "another group size": ("gptq", {}, {"group_size": 16}, r"scales has the shape \[1, 32\] instead of \[2, 32\]"),
    "other bits": ("gptq", {}, {"bits": 8}, r"has the shape \[.*\] instead of \["),
    "bits that nobody has": ("gptq", {}, {"bits": 5}, "Invalid enum value 5 - at `\\$.bits`"),
    "packed for a kernel": (
        "torchao-int4-packed",
        {},
        {"quant_type": {"default": {**INT4_TYPE, "_data": {"int4_packing_format": {"_data": "TILE_PACKED_TO_4D"}}}}},
        "Int4WeightOnlyConfig of version 2 with int4_packing_format 'tile_packed_to_4d', .* 'plain'",
    ),
    "packed as before": (
        "torchao-int4-packed",
        {},
        {"quant_type": {"default": {**INT4_TYPE, "_version": 1}}},
        "Int4WeightOnlyConfig of version 1 with .* quantize the model with version 2",
    ),
    "scales by rows": (
        "torchao-int4-packed",
        {f"{DOWN}._weight_scale": torch.ones(32, 2).bfloat16()},
        {},
        rf"{DOWN}\._weight_(scale|zero_point) has the shape \[.*\] instead of \[",
    ),
    "no zero points": (
        "torchao-int4-packed",
        {f"{GATE}._weight_zero_point": None},
        {},
        rf"{GATE}\._weight_zero_point is missing",
    ),
    "no bits": ("gptq", {}, {"bits": "four"}, "quantization_config cannot be served: .*`\\$.bits`.*another format"),
    "another layout": ("awq", {}, {"version": "gemv"}, "Invalid enum value 'gemv' - at `\\$.version`"),
    "cut weight": (
        "awq",
        {f"{GATE}.qweight": torch.zeros(16, 8, dtype=torch.int32)},
        {},
        rf"{GATE}\.scales has the shape \[1, 64\]|{GATE}\.weight .expected \[64, 32\], found \[64, 16\]",
    ),
    "wrong type": (
        "awq",
        {f"{GATE}.qweight": torch.zeros(32, 8)},
        {},
        rf"{GATE}\.qweight is of torch\.float32 instead of torch\.int32",
    ),
    "fp8 without scales": (
        "fp8-block",
        {f"{GATE}.weight_scale_inv": None},
        {},
        rf"{GATE}\.weight_scale_inv is missing",
    ),
    "static without input scales": (
        "fp8-tensor-static",
        {f"{GATE}.input_scale": None},
        {},
        rf"{GATE}\.input_scale is missing",
    ),
    "wrong blocks": ("fp8-block", {}, {"weight_block_size": [128, 128]}, r"weight_scale_inv has the shape \["),
    "a layer of no group": (
        "ct-mixed",
        {},
        {"config_groups": {"one": {"targets": ["re:.*q_proj"], "weights": {"num_bits": 8, "type": "int"}}}},
        "_proj is quantized, but no group .* names it .targets: re:.*q_proj.; add it",
    ),
    "a bad pattern": (
        "ct-w4a16",
        {},
        {"config_groups": {"one": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
        "has the target 're:\\(', which is no regular expression",
    ),
    "another format": (
        "ct-w4a16",
        {},
        {"format": "marlin-24", "config_groups": {"one": {"targets": ["Linear"], "weights": {"num_bits": 4}}}},
        "_proj: .* says marlin-24 with int weights of 4 bits, which cannot be read; known: float-quantized float",
    ),
    "sparse": (
        "ct-w4a16",
        {},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "only dense weights can be read",
    ),
    "a shape that lies": (
        "ct-w4a16",
        {f"{GATE}.weight_shape": torch.tensor([-64, 1 << 60])},
        {},
        rf"{GATE}\.weight_packed has the shape \[64, 4\] instead of",
    ),
    "two second scales": (
        "ct-nvfp4",
        {f"{GATE}.weight_global_scale": torch.ones(2)},
        {},
        rf"{GATE}\.weight_global_scale has the shape \[2\] instead of \[\]",
    ),
    "a damaged state": (
        "bnb-nf4",
        {f"{GATE}.weight.quant_state.bitsandbytes__nf4": torch.tensor([123, 34, 0], dtype=torch.uint8)},
        {},
        rf"{GATE}\.weight\.quant_state\.bitsandbytes__nf4 is damaged",
    ),
    "another table": (
        "bnb-nf4",
        {f"{GATE}.weight.quant_map": torch.zeros(16)},
        {},
        rf"{GATE}\.weight\.quant_map is not the table of nf4",
    ),
    "an unknown way of torchao": (
        "torchao-int8",
        {},
        {"quant_type": {"default": {"_type": "UIntXWeightOnlyConfig"}}},
        "quant_type is 'UIntXWeightOnlyConfig', which cannot be read; known: Int8WeightOnlyConfig",
    ),
    "an unknown method": ("awq", {}, {"quant_method": "aqlm"}, "quant_method is 'aqlm', .* known: awq, bitsandbytes"),
    "mislabelled": (
        "awq",
        {},
        {"quant_method": "fp8"},
        "qweight is of torch.int32, which the quantization_config says",
    ),
    "a tensor that nothing tells of": (
        "gptq",
        {f"{GATE}.extra": torch.zeros(2, dtype=torch.int8)},
        {},
        rf"{GATE}\.extra is of torch\.int8, which the quantization_config says nothing of",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_does_not_fit_is_refused_by_tensor_and_fix(damage: str, tmp_path: Path) -> None:
    name, tensors, values, message = DAMAGED[damage]
    folder = Folder(name, tmp_path)
    folder.tensors = {**folder.tensors, **tensors}
    folder.tensors = {key: tensor for key, tensor in folder.tensors.items() if tensor is not None}
    folder.config["quantization_config"] |= values
    folder.refused(message)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = Folder("gptq", tmp_path)
    file = folder.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"is truncated or damaged: .*; download it again"):
        plan_engine(settings(folder.path))


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = Folder("gptq", tmp_path)
    (folder.path / "model.safetensors").rename(folder.path / "gptq_model-4bit.pt")
    with pytest.raises(
        CheckpointError, match=r"gptq_model-4bit\.pt, which are pickled .*convert them to safetensors"
    ):
        plan_engine(settings(folder.path))


def test_merged_projections_keep_their_own_scales(tmp_path: Path) -> None:
    """q, k and v have one scale each; a common one would round two of them again."""
    folder = Folder("fp8-tensor-static", tmp_path)
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        folder.tensors[f"model.layers.0.self_attn.{name}.weight_scale"] = torch.tensor(0.001 * 5**number)
    save_file(folder.tensors, folder.path / "model.safetensors")
    checkpoint = open_checkpoint(resolve_model(str(folder.path)))
    model = DirectModel(settings(folder.path, quantization="none")).model
    merged = next(module for module in model.modules() if isinstance(module, QKVParallelLinear))
    assert isinstance(merged.method, PlainLinear)
    weight: Tensor = merged.method.weight
    parts = [checkpoint.get(f"model.layers.0.self_attn.{name}.weight") for name in ("q_proj", "k_proj", "v_proj")]
    weight = weight if weight.shape == torch.cat(parts).shape else weight.t()
    assert torch.equal(weight, torch.cat(parts))


HOSTILE: list[Any] = [
    0,
    -1,
    1 << 70,
    1.5,
    "x",
    "",
    None,
    True,
    [],
    [0, 0],
    {},
    {"x": 1},
    "torch.nothing",
    float("inf"),
]


@settings_of_hypothesis(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_config_and_any_shapes_are_read_or_refused(name: str, data: st.DataObject) -> None:
    """Nothing but an error of ours may come of what a file says."""
    stored = SafetensorsCheckpoint(ROOT / name)
    tensors = {key: stored.get(key) for key in stored.tensors()}
    config = json.loads(json.dumps(stored.config["quantization_config"]))
    for _ in range(data.draw(st.integers(1, 2))):
        place: Any = config
        while True:
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
                place[key] = deepcopy(data.draw(st.sampled_from(HOSTILE)))
                break
            place = place[key]
        if not isinstance(config.get("quant_method"), str):
            config["quant_method"] = "gptq"  # the schema of config.json refuses others
    if data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(tensors)))
        shape = data.draw(st.sampled_from([(), (0,), (1,), (2,), (0, 4), (4, 4), (64, 1), (2, 2, 2), (1, 1, 1, 1)]))
        dtype = data.draw(st.sampled_from([torch.int32, torch.uint8, torch.float32, torch.float8_e4m3fn]))
        tensors[key] = torch.zeros(shape).to(dtype)
    try:
        checkpoint = logical(Stored(config, tensors))
        for tensor in checkpoint.tensors():
            as_tensor(checkpoint.stored(tensor))
    except QuireError:
        pass
