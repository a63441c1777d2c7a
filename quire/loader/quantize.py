"""Quantizes matrices of a checkpoint and writes it in the form of compressed-tensors, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.experts import GroupedLinear, TokenGate
from quire.layers.linear import Linear
from quire.layers.quant.rounding import e2m1_bytes, round_to_mxfp4
from quire.layers.scheme import Weight, as_tensor
from quire.layers.weights import Destination, MappedModule, WeightMap
from quire.loader.checkpoint import Checkpoint, TensorInfo
from quire.loader.mapper import destinations_of
from quire.loader.safetensors import SINGLE_FILE, write_safetensors
from quire.types.errors import ConfigError

Progress = Callable[[int, int], None]  # (tensors written, tensors in all)
_TRIED = torch.linspace(1.0, 0.7, 13).tolist()  # parts of a group's largest weight that its range may end at
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0


@dataclass(frozen=True)
class Written:
    """A way to quantize: what the config says of it, and what is stored of a matrix, by the last parts of names."""

    summary: str
    format: str
    weights: dict[str, Any]
    quantize: Callable[..., dict[str, Tensor]]  # (weight float32 [rows, columns], dtype of scales, group size)
    inputs: dict[str, Any] | None = None
    group_size: int | None = None  # what is asked for if the user does not say
    symmetric: bool = True

    @property
    def takes_group_size(self) -> bool:
        return self.group_size is not None and self.format == "pack-quantized"

    def config(self, group_size: int | None, ignore: Collection[str]) -> dict[str, Any]:
        weights = {**self.weights, "symmetric": self.symmetric, "dynamic": False, "group_size": group_size}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": self.inputs, "format": self.format}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "ignore": sorted(ignore),
            "config_groups": {"group_0": group},
        }


def _scales(largest: Tensor, end: float, dtype: torch.dtype) -> Tensor:
    """Scales by which the largest magnitudes become `end`, as numbers of a type; 1 for what is all zeros."""
    return torch.where(largest > 0, largest / end, 1.0).to(dtype).float().clamp_min(torch.finfo(dtype).tiny)


def _integers8(weight: Tensor, dtype: torch.dtype, group: int | None) -> dict[str, Tensor]:
    scales = _scales(weight.abs().amax(1, keepdim=True), 127.0, dtype)
    return {"weight": _rounded(weight, scales, 8).to(torch.int8), "weight_scale": scales.to(dtype)}


def _rounded(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    return (values / scales).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [rows, columns] -> int32 [rows, words], the first in the low bits."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % per_word)).unflatten(
        1, (-1, per_word)
    )
    words = (codes << bits * torch.arange(per_word)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def _packed_integers(
    weight: Tensor, dtype: torch.dtype, group: int | None, *, bits: int, symmetric: bool = True
) -> dict[str, Tensor]:
    """Of several ends for a group's range those that err least: the few largest weights may be cut."""
    groups = weight.unflatten(1, (-1, group or weight.shape[1]))
    high, low, middle = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True), 1 << bits - 1
    largest, most = torch.maximum(high, -low), 2 * middle - 1
    scales, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    codes, zeros = torch.zeros_like(groups), torch.full_like(largest, middle)
    for part in _TRIED if bits < 8 else _TRIED[:1]:
        if symmetric:
            tried, zero = _scales(largest * part, middle - 0.5, dtype), torch.full_like(largest, middle)
        else:
            tried = _scales((high.clamp_min(0) - low.clamp_max(0)) * part, most, dtype)
            zero = (-low.clamp_max(0) * part / tried).round().clamp(0, most)
        rounded = (groups / tried + zero).round().clamp(0, most)
        error = ((rounded - zero) * tried - groups).square().sum(-1, keepdim=True)
        better = error < least
        codes, zeros = torch.where(better, rounded, codes), torch.where(better, zero, zeros)
        scales, least = torch.where(better, tried, scales), torch.minimum(error, least)
    stored = {
        "weight_packed": _words(codes.flatten(1), bits),
        "weight_scale": scales.squeeze(-1).to(dtype),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored if symmetric else {**stored, "weight_zero_point": _words(zeros.squeeze(-1).t(), bits).t()}


def _floats8(weight: Tensor, dtype: torch.dtype, group: int | None) -> dict[str, Tensor]:
    scales = _scales(weight.abs().amax(1, keepdim=True), _E4M3_MAX, dtype)
    codes = (weight / scales).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales.to(dtype)}


def _nvfp4(weight: Tensor, dtype: torch.dtype, group: int | None) -> dict[str, Tensor]:
    """The numbers that scales are divided by make the largest of them 448."""
    groups = weight.unflatten(1, (-1, group or 16))
    second = (_E4M3_MAX * _E2M1_MAX / weight.abs().max().clamp_min(1e-30)).reshape(1)
    scales = (groups.abs().amax(-1) / _E2M1_MAX * second).clamp(2.0**-9, _E4M3_MAX).to(torch.float8_e4m3fn)
    values = groups / (scales.float() / second).unsqueeze(-1)
    return {"weight_packed": e2m1_bytes(values.flatten(1)), "weight_scale": scales, "weight_global_scale": second}


def _mxfp4(weight: Tensor, dtype: torch.dtype, group: int | None) -> dict[str, Tensor]:
    tensors = round_to_mxfp4(weight).tensors
    return {"weight_packed": tensors["weight"], "weight_scale": tensors["scales"]}


_TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
WRITTEN: dict[str, Written] = {
    "w8a8-int8": Written(
        "8-bit integers, a scale per output; activations 8 bits per token",
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        _integers8,
        {**_TOKENS, "type": "int"},
    ),
    "w8a8-fp8": Written(
        "8-bit floats (E4M3), a scale per output; activations fp8 per token",
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        _floats8,
        {**_TOKENS, "type": "float"},
    ),
    "w8a16": Written(
        "8-bit integers, a scale per output",
        "pack-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        partial(_packed_integers, bits=8),
    ),
    "w4a16": Written(
        "4-bit integers, a scale per group of inputs",
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group"},
        partial(_packed_integers, bits=4),
        group_size=128,
    ),
    "w4a16-asym": Written(
        "4-bit integers, a scale and a zero point per group of inputs",
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group"},
        partial(_packed_integers, bits=4, symmetric=False),
        group_size=32,
        symmetric=False,
    ),
    "nvfp4": Written(
        "4-bit floats, an fp8 scale per 16",
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group"},
        _nvfp4,
        group_size=16,
    ),
    "mxfp4": Written(
        "4-bit floats, a power of two per 32",
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "scale_dtype": "torch.uint8"},
        _mxfp4,
        group_size=32,
    ),
}


def choose_group_size(name: str, asked: int | None, inputs: Mapping[str, int]) -> int | None:
    """How many inputs share a scale: what is asked for, else the most that divides all of them, else ConfigError."""
    written = WRITTEN[name]
    if written.group_size is None:
        if asked is not None:
            raise ConfigError(f"group_size is {asked} but {name} has a scale per output; leave --group-size out")
        return None
    if asked is not None and not written.takes_group_size:
        raise ConfigError(f"group_size is {asked} but {name} always has {written.group_size}; leave --group-size out")
    smaller = [size for size in (64, 32) if written.takes_group_size and size < written.group_size]
    sizes = [asked] if asked is not None else [written.group_size, *smaller]
    fitting = [size for size in sizes if not any(count % size for count in inputs.values())]
    if fitting:
        return fitting[0]
    layer, count = next((layer, count) for layer, count in inputs.items() if count % sizes[-1])
    raise ConfigError(
        f"{layer} has {count} inputs, which groups of {sizes[-1]} do not divide; use --scheme w8a16, or another"
        " --group-size"
    )


@dataclass(frozen=True)
class Handled:
    """How a tensor of a checkpoint is written: its parts by their names, quantized or not."""

    inputs: int | None  # of the matrices, which are quantized; None: it is a bias
    split: Callable[[Tensor], Iterable[tuple[str, Weight]]]


def handled_tensors(model: MappedModule, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Handled], set[str]]:
    """Those that are not just copied, and the paths of linear layers that are.

    Experts are written one by one, as all loaders of the format read them, however the checkpoint has them.
    """
    found: dict[str, Handled] = {}
    plain = {"lm_head"}
    for name, (layer, destination) in destinations_of(model, tensors).items():
        is_weight = destination.parameter == "weight"
        if isinstance(layer, GroupedLinear):
            inputs = layer.full_in_features if is_weight else None
            found[name] = Handled(inputs, partial(_experts, model.weight_map, layer, destination))
        elif is_weight and isinstance(layer, Linear) and layer.role == "linear" and not isinstance(layer, TokenGate):
            found[name] = Handled(layer.full_in_features, partial(_itself, name))
        elif is_weight and len(tensors[name].shape) == 2 and not isinstance(layer, VocabParallelEmbedding):
            plain.add(name.removesuffix(".weight"))
    return found, plain


def _itself(name: str, tensor: Tensor) -> Iterator[tuple[str, Weight]]:
    yield name, tensor


def _experts(
    names: WeightMap, layer: GroupedLinear, whole: Destination, tensor: Tensor
) -> Iterator[tuple[str, Weight]]:
    for piece, rows in layer.split(whole.piece, tensor):
        yield names.checkpoint_name(replace(whole, piece=piece)), rows


def quantize_checkpoint(
    checkpoint: Checkpoint,
    handled: Mapping[str, Handled],
    plain: Collection[str],
    name: str,
    group_size: int | None,
    folder: Path,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> int:
    """Write config.json and model.safetensors to a folder; return the bytes of the weights.

    `handled` and `plain` are what `handled_tensors` gives.
    """
    written = WRITTEN[name]
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    config |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": written.config(group_size, plain)}
    config.pop("torch_dtype", None)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for count, tensor_name in enumerate(checkpoint.tensors(), 1):
            tensor, how = checkpoint.get(tensor_name), handled.get(tensor_name)
            for part_name, part in ((tensor_name, tensor),) if how is None else how.split(tensor):
                values = as_tensor(part)
                if how is None or how.inputs is None:
                    yield part_name, values.to(dtype) if values.is_floating_point() else values
                    continue
                for leaf, stored in written.quantize(values.float(), dtype, group_size).items():
                    yield part_name.removesuffix("weight") + leaf, stored
            del tensor
            checkpoint.release(tensor_name)
            if progress is not None:
                progress(count, len(checkpoint.tensors()))

    size = write_safetensors(folder / SINGLE_FILE, tensors())
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return size
