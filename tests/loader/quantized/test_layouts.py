"""Layouts that no tool here writes, against the formula or the decoder of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.layers.scheme import StoredMatrix
from quire.loader.checkpoint import Checkpoint, TensorInfo
from quire.loader.quantized.registry import logical
from quire.types.errors import CheckpointError

GENERATOR = torch.Generator().manual_seed(0)


class Stored(Checkpoint):
    def __init__(self, quantization: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config = {"quantization_config": quantization}
        self._values = tensors

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(t.shape), t.dtype, t.nbytes) for name, t in self._values.items()}

    def get(self, name: str) -> Tensor:
        return self._values[name]


def read(checkpoint: Checkpoint, name: str) -> StoredMatrix:
    stored = checkpoint.stored(name)
    assert isinstance(stored, StoredMatrix)
    return stored


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=GENERATOR)


def test_experts_of_gpt_oss_as_transformers_reads_them() -> None:
    blocks, scales = bytes_of(3, 8, 2, 16), torch.randint(110, 130, (3, 8, 2), dtype=torch.uint8, generator=GENERATOR)
    tensors = {
        "experts.gate_up_proj_blocks": blocks,
        "experts.gate_up_proj_scales": scales,
        "experts.gate_up_proj_bias": torch.zeros(3, 8),
        "router.weight": torch.zeros(3, 64),
    }
    checkpoint = logical(Stored({"quant_method": "mxfp4"}, tensors))
    assert list(checkpoint.tensors()) == ["experts.gate_up_proj", "experts.gate_up_proj_bias", "router.weight"]
    stored = read(checkpoint, "experts.gate_up_proj")
    assert stored.shape == checkpoint.tensors()["experts.gate_up_proj"].shape == (3, 8, 64)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, inputs, outputs]
    assert torch.equal(stored.tensor(), theirs.mT)
    assert torch.equal(stored.matrix(1).tensor(), theirs[1].t())


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            torch.zeros(3, 8, 1, dtype=torch.uint8),
            r"gate_up_proj_scales has the shape \[3, 8, 1\] instead of \[3, 8, 2\]",
        ),
        (torch.zeros(3, 8, 2), r"gate_up_proj_scales is of torch\.float32 instead of torch\.float8_e8m0fnu"),
        (None, "gate_up_proj_scales is missing"),
    ],
    ids=["cut", "floats", "none"],
)
def test_experts_that_are_not_whole(scales: Tensor | None, message: str) -> None:
    tensors = {"experts.gate_up_proj_blocks": bytes_of(3, 8, 2, 16)}
    tensors |= {} if scales is None else {"experts.gate_up_proj_scales": scales}
    with pytest.raises(CheckpointError, match=message):
        logical(Stored({"quant_method": "mxfp4"}, tensors))


def weights(**values: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": values}}, "quant_method": "compressed-tensors"}


def test_groups_of_compressed_tensors_in_the_order_of_activations() -> None:
    codes = torch.randint(0, 16, (8, 64), generator=GENERATOR)
    words = (codes.unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    index = torch.randperm(64, generator=GENERATOR).int() // 32
    scales = torch.rand(8, 2, generator=GENERATOR).bfloat16()
    tensors = {
        "a.weight_packed": (words - ((words >> 31) << 32)).int(),
        "a.weight_scale": scales,
        "a.weight_shape": torch.tensor([8, 64]),
        "a.weight_g_idx": index,
    }
    config = weights(num_bits=4, type="int", strategy="group", group_size=32, actorder="group")
    checkpoint = logical(Stored({**config, "format": "pack-quantized"}, tensors))
    assert torch.equal(checkpoint.get("a.weight"), (codes - 8) * scales.float()[:, index.long()])
    half = read(checkpoint, "a.weight").part(1, 32, 32)
    assert isinstance(half, torch.Tensor), "a rank's part is decoded: its columns are anywhere in the groups"
    assert torch.equal(half, checkpoint.get("a.weight")[:, 32:])


def test_floats_of_eight_bits_with_powers_of_two() -> None:
    weight = torch.randn(8, 64, generator=GENERATOR).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 130, (8, 2), dtype=torch.uint8, generator=GENERATOR)
    config = weights(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8")
    tensors = {"a.weight": weight, "a.weight_scale": scales}
    checkpoint = logical(Stored({**config, "format": "mxfp8-quantized"}, tensors))
    powers = 2.0 ** (scales.float() - 127)
    assert torch.equal(checkpoint.get("a.weight"), weight.float() * powers.repeat_interleave(32, 1))


def test_scales_of_a_kv_cache_are_no_part_of_a_model() -> None:
    tensors = {"attn.k_scale": torch.ones(1), "attn.v_scale": torch.ones(1), "norm.weight": torch.ones(4)}
    for config in ({"quant_method": "fp8"}, {"quant_method": "modelopt"}, weights(num_bits=8, type="float")):
        checkpoint = logical(Stored(config, tensors))
        assert list(checkpoint.tensors()) == ["norm.weight"]
        assert list(checkpoint.kv_scales()) == ["attn.k_scale", "attn.v_scale"]


def test_a_group_of_gptq_may_have_other_bits() -> None:
    def layer(bits: int) -> dict[str, Tensor]:
        return {
            "qweight": torch.zeros(32 * bits // 32, 8, dtype=torch.int32),
            "scales": torch.ones(1, 8).half(),
            "qzeros": torch.zeros(1, 8 * bits // 32, dtype=torch.int32),
        }

    tensors = {f"{path}.{leaf}": t for path, bits in (("a", 4), ("b", 8)) for leaf, t in layer(bits).items()}
    tensors["c.weight"] = torch.ones(8, 32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:^b$": {"bits": 8}, "-:^c$": {}}}
    infos = logical(Stored(config, tensors)).tensors()
    assert {name: info.scheme.element for name, info in infos.items()} == {
        "a.weight": "UINT4",
        "b.weight": "UINT8",
        "c.weight": "F32",
    }
    assert all(info.shape == (8, 32) for info in infos.values())
