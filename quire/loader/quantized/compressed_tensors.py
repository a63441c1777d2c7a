"""Checkpoints of compressed-tensors: groups of layers, each with a type, bits and a strategy for its scales."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from quire.layers.scheme import ActivationRule, Packing, Role, ScaleGrid, Scheme, ZeroPoints, in_words
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint, scale_type
from quire.loader.quantized.fp8 import Side
from quire.types.errors import CheckpointError

_NIBBLES = Packing(torch.uint8, (0, 1))
_FUSED = ("weight_input", "weight_output")  # transforms that stored weights have in them
Strategy = Literal["tensor", "channel", "group", "block", "tensor_group"]


class _Weights(msgspec.Struct):
    num_bits: Annotated[int, Meta(ge=1, le=8)] = 8
    type: Literal["int", "float"] = "int"
    strategy: Strategy | None = None
    symmetric: bool = True
    group_size: int | None = None
    block_structure: list[Side] | str | None = None
    actorder: str | None = None
    scale_dtype: str | None = None

    @property
    def grid(self) -> tuple[int | None, int | None]:
        """Rows and columns that share a scale."""
        strategy = self.strategy or (
            "group" if (self.group_size or 0) > 0 else "channel" if self.group_size else "tensor"
        )
        if strategy == "tensor":
            return None, None
        if strategy == "channel" or self.group_size == -1:
            return 1, None
        if strategy == "block" and isinstance(self.block_structure, list) and len(self.block_structure) == 2:
            return self.block_structure[0], self.block_structure[1]
        if strategy in ("group", "tensor_group") and (self.group_size or 0) > 0:
            return 1, self.group_size
        raise CheckpointError(
            f"the model config's quantization_config has weights with strategy {strategy!r}, group_size"
            f" {self.group_size!r} and block_structure {self.block_structure!r}, which do not say what shares a"
            " scale; correct it"
        )


class _Inputs(msgspec.Struct):
    dynamic: bool | Literal["local"] = False
    strategy: str | None = None

    @property
    def rule(self) -> ActivationRule:
        if self.strategy in ("group", "tensor_group", "block"):
            return "per_group"
        return "per_token" if self.dynamic else "static"


class _Group(msgspec.Struct):
    targets: list[str]
    weights: _Weights | None = None
    input_activations: _Inputs | None = None
    format: str | None = None


class _Transform(msgspec.Struct):
    location: str


class _Transforms(msgspec.Struct):
    apply: list[_Transform] = []

    @property
    def places(self) -> list[str]:
        return [each.location for each in self.apply]


class _TransformSettings(msgspec.Struct):
    config_groups: dict[str, _Transforms] = {}


class _Settings(msgspec.Struct):
    config_groups: dict[str, _Group]
    ignore: list[str] | None = None
    format: str = "dense"


def _integers(weights: _Weights, leaves: Leaves, roles: list[tuple[Role, str]]) -> Scheme:
    """Each number a byte."""
    zeros = None
    if not weights.symmetric:
        zeros = ZeroPoints()
        roles.append(("zeros", "weight_zero_point"))
    return Scheme("INT8", scales=_grid(weights, leaves), zeros=zeros, roles=(*roles, ("weight", "weight")))


def _packed_integers(weights: _Weights, leaves: Leaves, roles: list[tuple[Role, str]]) -> Scheme:
    """Unsigned in 32-bit words; zero points, where there are any, packed along the outputs."""
    bits, zeros = weights.num_bits, ZeroPoints(implied=float(1 << weights.num_bits - 1))
    if not weights.symmetric:
        grouped = weights.grid != (None, None)
        zeros = ZeroPoints(packing=in_words(bits, 0)) if grouped else ZeroPoints(offset=float(1 << bits - 1))
        roles.append(("zeros", "weight_zero_point"))
    if weights.actorder in ("group", "dynamic"):
        roles.append(("group_index", "weight_g_idx"))
    roles += [("weight", "weight_packed"), ("shape", "weight_shape")]
    return Scheme(
        f"UINT{bits}", packing=in_words(bits), scales=_grid(weights, leaves), zeros=zeros, roles=tuple(roles)
    )


def _floats8(weights: _Weights, leaves: Leaves, roles: list[tuple[Role, str]]) -> Scheme:
    return Scheme("E4M3", scales=_grid(weights, leaves), roles=(*roles, ("weight", "weight")))


def _microscaled_floats8(weights: _Weights, leaves: Leaves, roles: list[tuple[Role, str]]) -> Scheme:
    grid = ScaleGrid(*weights.grid, torch.float8_e8m0fnu)
    return Scheme("E4M3", scales=grid, roles=(*roles, ("weight", "weight")))


def _nvfp4(weights: _Weights, leaves: Leaves, roles: list[tuple[Role, str]]) -> Scheme:
    return Scheme(
        "E2M1",
        packing=_NIBBLES,
        scales=ScaleGrid(*weights.grid, torch.float8_e4m3fn),
        second_scale="divides",
        roles=(*roles, ("weight", "weight_packed"), ("second_scale", "weight_global_scale")),
    )


def _mxfp4(weights: _Weights, leaves: Leaves, roles: list[tuple[Role, str]]) -> Scheme:
    grid = ScaleGrid(*weights.grid, torch.float8_e8m0fnu)
    return Scheme("E2M1", packing=_NIBBLES, scales=grid, roles=(*roles, ("weight", "weight_packed")))


def _grid(weights: _Weights, leaves: Leaves) -> ScaleGrid:
    return ScaleGrid(*weights.grid, scale_type(leaves.get("weight_scale"), torch.float32))


# Format, type and bits of the weights (0: any) -> how they are stored. Naive formats are named by the type alone.
LAYOUTS: dict[tuple[str, str, int], Callable[[_Weights, Leaves, list[tuple[Role, str]]], Scheme]] = {
    ("int-quantized", "int", 8): _integers,
    ("naive-quantized", "int", 8): _integers,
    ("pack-quantized", "int", 0): _packed_integers,
    ("float-quantized", "float", 8): _floats8,
    ("naive-quantized", "float", 8): _floats8,
    ("mxfp8-quantized", "float", 8): _microscaled_floats8,
    ("nvfp4-pack-quantized", "float", 4): _nvfp4,
    ("mxfp4-pack-quantized", "float", 4): _mxfp4,
}


class CompressedTensors(QuantizedCheckpoint):
    reads = "W8A8 (int8, fp8), W4A16 and other integers of 2 to 8 bits, W8A16, NVFP4, MXFP4, MXFP8, mixed per layer"
    ignored = ("*.q_scale",)
    scales_kv = True
    beside = ("input_zero_point",)

    def configure(self) -> None:
        self._values = self.read_setting(_Settings)
        sparsity = self.settings.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            raise CheckpointError(
                f"the model config's quantization_config.sparsity_config.format is {sparsity['format']!r}; only dense"
                " weights can be read: save the model without sparse compression"
            )

        rotated = sorted({place for group in self._transforms() for place in group.places if place not in _FUSED})
        if rotated:
            raise CheckpointError(
                "the model config's quantization_config.transform_config rotates activations while the model runs"
                f" ({', '.join(rotated)}), which cannot be done; quantize the model with transforms of weights alone,"
                " as SpinQuant's R1 and R2"
            )

    def _transforms(self) -> list[_Transforms]:
        transforms = self.settings.get("transform_config") or {}
        return list(self.read_setting(_TransformSettings, transforms, "transform_config").config_groups.values())

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        if "weight_scale" not in leaves and "weight_packed" not in leaves:
            return None
        group = self._group(path)
        weights, inputs = group.weights, group.input_activations
        if weights is None:
            return None
        form = group.format or self._values.format
        make = LAYOUTS.get((form, weights.type, weights.num_bits)) or LAYOUTS.get((form, weights.type, 0))
        if make is None:
            known = ", ".join(sorted({f"{name} {kind}" for name, kind, _ in LAYOUTS}))
            raise CheckpointError(
                f"{path}: the model config's quantization_config says {form} with {weights.type} weights of"
                f" {weights.num_bits} bits, which cannot be read; known: {known}; use the model in one of them"
            )
        scheme = make(weights, leaves, [("scales", "weight_scale")])
        if inputs is None:
            return scheme
        rule, roles = inputs.rule, scheme.roles
        name = "input_global_scale" if scheme.second_scale != "none" else "input_scale"
        if rule == "static" or name in leaves:
            roles = (*roles, ("input_scale", name))
        return replace(scheme, activations=rule, roles=roles)

    def _group(self, path: str) -> _Group:
        """The group whose targets fit best: by the layer's name, by a pattern, by the class of all linear layers."""
        groups = self._values.config_groups.values()
        for fits in (
            lambda target: target == path,
            lambda target: _fits(target, path),
            lambda target: target == "Linear",
        ):
            for group in groups:
                if any(fits(target) for target in group.targets):
                    return group
        named = ", ".join(target for group in groups for target in group.targets)
        raise CheckpointError(
            f"{path} is quantized, but no group of the model config's quantization_config names it (targets:"
            f" {named}); add it to a group's targets"
        )


def _fits(target: str, path: str) -> bool:
    if not target.startswith("re:"):
        return False
    try:
        return re.match(target[3:], path) is not None
    except re.error as error:
        raise CheckpointError(
            f"the model config's quantization_config has the target {target!r}, which is no regular expression"
            f" ({error}); correct it"
        ) from error
