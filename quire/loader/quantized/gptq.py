"""Checkpoints of GPTQ: integers in 32-bit words along the inputs, scales and zero points per group of inputs."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
import torch

from quire.layers.scheme import Role, ScaleGrid, Scheme, ZeroPoints, in_words
from quire.loader.quantized.base import Leaves, QuantizedCheckpoint, scale_type
from quire.types.errors import CheckpointError


class _Settings(msgspec.Struct):
    bits: Literal[2, 3, 4, 8]
    group_size: int = -1  # -1: all inputs
    desc_act: bool = False  # whether the order of inputs was chosen by their activations: an index names the groups
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    dynamic: dict[str, dict[str, Any]] | None = None  # "+:regex" or "regex": other values; "-:regex": not quantized


class Gptq(QuantizedCheckpoint):
    reads = "2, 3, 4 and 8 bits in groups or per output, act order, zero points of both conventions"

    def configure(self) -> None:
        self._values = self.read_setting(_Settings)

    def scheme(self, path: str, leaves: Leaves) -> Scheme | None:
        values = self._of_layer(path)
        if "qweight" not in leaves:
            return None
        if values.group_size != -1 and values.group_size < 1:
            raise CheckpointError(
                f"the model config's quantization_config.group_size is {values.group_size} for {path}; it must be -1"
                " or positive: use the model in another format"
            )
        roles: list[tuple[Role, str]] = [("weight", "qweight"), ("scales", "scales"), ("zeros", "qzeros")]
        if values.desc_act or "g_idx" in leaves:
            roles.append(("group_index" if values.desc_act else "ordered_index", "g_idx"))
        group = None if values.group_size == -1 else values.group_size
        return Scheme(
            f"UINT{values.bits}",
            packing=in_words(values.bits),
            scales=ScaleGrid(1, group, scale_type(leaves.get("scales"), torch.float16)),
            # The first convention stores one less than the zero point.
            zeros=ZeroPoints(packing=in_words(values.bits, 0), offset=float(values.checkpoint_format == "gptq")),
            roles=tuple(roles),
            transposed=True,
        )

    def _of_layer(self, path: str) -> _Settings:
        for pattern, changes in (self._values.dynamic or {}).items():
            sign, _, expression = pattern.partition(":") if pattern[:2] in ("+:", "-:") else ("+", "", pattern)
            if sign == "+" and _matches(expression, path):
                return self.read_setting(
                    _Settings, {**self.settings, **changes}, f"quantization_config.dynamic[{pattern!r}]"
                )
        return self._values


def _matches(expression: str, path: str) -> bool:
    try:
        return re.match(expression, path) is not None
    except re.error as error:
        raise CheckpointError(
            f"the model config's quantization_config.dynamic has {expression!r}, which is no regular expression"
            f" ({error}); correct it"
        ) from error
