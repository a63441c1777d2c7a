"""Seeded dummy weights: fills a model's parameters without any checkpoint, for tests, benchmarks and sizing.

Where a model's config says that its checkpoint is quantized (MXFP4 experts, GPTQ, AWQ, fp8 in blocks), the dummy
weights are stored so, too: their sizes and the kernels that they take are those of the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.experts import GroupedLinear
from quire.layers.fusion import settle
from quire.layers.linear import Linear
from quire.layers.quant.rounding import MXFP4
from quire.layers.scheme import F32, Role, ScaleGrid, Scheme, StoredMatrix, ZeroPoints, in_words
from quire.layers.weights import Schemes, WeightedLayer, weighted_layers
from quire.loader.mapper import allocate

AMPLITUDE = 1e-3
_LEAST_WIDTH = 64  # of what tools quantize: gates of a few outputs stay floats
_ROLES: tuple[tuple[Role, str], ...] = (("weight", "qweight"), ("scales", "scales"), ("zeros", "qzeros"))


def dummy_schemes(model: nn.Module, config: Mapping[str, Any], plain: Scheme = F32) -> dict[WeightedLayer, Schemes]:
    """The schemes of a checkpoint that a config describes: AWQ, GPTQ, MXFP4, fp8 in blocks; else `plain` floats."""
    settings = config.get("quantization_config") or {}
    method, group = settings.get("quant_method"), settings.get("group_size", 128)
    schemes: dict[WeightedLayer, Schemes] = {}
    for _, layer in weighted_layers(model):
        weight = plain
        if method == "mxfp4" and isinstance(layer, GroupedLinear):
            weight = MXFP4
        elif method in ("awq", "gptq") and settings.get("bits", 4) == 4 and _is_quantized(layer):
            grid = ScaleGrid(1, group if group > 0 else None, torch.float16)
            weight = Scheme(
                "UINT4", packing=in_words(4), scales=grid, zeros=ZeroPoints(packing=in_words(4)), roles=_ROLES
            )
        elif method == "fp8" and "weight_block_size" in settings and _is_quantized(layer):
            rows, columns = settings["weight_block_size"]
            grid = ScaleGrid(rows, columns, torch.float32)
            weight = Scheme("E4M3", scales=grid, activations="per_group", roles=_ROLES[:2])
        schemes[layer] = {(name, None): weight if name == "weight" else plain for name in layer.weight_names()}
    return schemes


def _is_quantized(layer: WeightedLayer) -> bool:
    if isinstance(layer, GroupedLinear):
        return True
    return isinstance(layer, Linear) and layer.role == "linear" and layer.out_features >= _LEAST_WIDTH


def _stored(scheme: Scheme, shape: tuple[int, ...], amplitude: float, generator: torch.Generator) -> StoredMatrix:
    """Any codes, with scales and zero points that keep values within the amplitude. shape: [..., rows, columns]."""
    assert scheme.scales is not None

    def empty(role: Role, dtype: torch.dtype) -> Tensor:
        sides = (scheme.stored_count(axis, role, shape[axis - 2]) for axis in (0, 1))
        return torch.empty(*shape[:-2], *sides, dtype=dtype, device=generator.device)

    weight = empty("weight", torch.float8_e4m3fn if scheme.packing is None else scheme.packing.word)
    weight.view(torch.uint8).random_(0, 256, generator=generator)
    if scheme.packing is None:  # without the codes that are no numbers
        weight.view(torch.uint8).bitwise_and_(0xFE)
        scales = empty("scales", scheme.scales.dtype).fill_(amplitude / 448)
    elif scheme.scales.dtype == torch.float8_e8m0fnu:  # of floats up to 6
        scales = empty("scales", torch.uint8).fill_(127 + math.floor(math.log2(amplitude / 6)))
    else:
        scales = empty("scales", scheme.scales.dtype).fill_(amplitude / 8)
    tensors: dict[Role, Tensor] = {"weight": weight, "scales": scales}
    if scheme.zeros is not None:
        tensors["zeros"] = empty("zeros", torch.int32)
        tensors["zeros"].view(torch.uint8).fill_(0x88)  # a middle of 8 for each
    return StoredMatrix(scheme, shape, tensors)


@torch.no_grad()
def fill_dummy(
    model: nn.Module,
    seed: int = 0,
    device: torch.device | None = None,
    amplitude: float = AMPLITUDE,
    schemes: Mapping[WeightedLayer, Schemes] | None = None,
) -> None:
    """Load made-up weights, each from the seed and its own name, so that order and neighbours do not matter.

    Values are uniform in [-amplitude, amplitude]; the weights of norms lie that close to 1. The numbers are drawn
    as float32 on the model's `device` (default: the host): there, billions of them would take minutes. `schemes`:
    of `dummy_schemes`; None: all is floats.
    """
    device = device or torch.device(torch.get_default_device())
    allocate(model, schemes)
    for path, layer in weighted_layers(model):
        for name in layer.weight_names():
            shape = layer.whole_shape(name)
            digest = hashlib.sha256(f"{seed}:{path}.{name}".encode()).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            scheme = F32 if schemes is None else schemes[layer][name, None]
            if not scheme.is_float:
                filling = layer.filling(name, None)
                assert filling is not None
                rows = filling.shapes[-1]  # a stored matrix is never transposed
                layer.load(name, None, _stored(scheme, rows, amplitude, generator))
                continue
            values = torch.empty(shape, device=device).uniform_(-amplitude, amplitude, generator=generator)
            if len(shape) == 1 and "norm" in path:
                values += 1
            layer.load(name, None, values)
        layer.finish()
    settle(model)
