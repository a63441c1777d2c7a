"""Checkpoint: where weights come from. Every source presents Hugging Face config keys and tensor names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.layers.scheme import Scheme, Weight, float_scheme


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key for tensor names by which layers.2 comes before layers.10."""
    return tuple(_part_key(part) for part in re.split(r"(\d+)", name))


def _part_key(part: str) -> tuple[int, int, str]:
    """Numbers by length and digits: int() refuses one of thousands of digits, which a damaged file may hold."""
    digits = part.lstrip("0")
    return (0, len(digits), digits) if part.isdecimal() else (1, 0, part)


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the tensor `get` returns; float32 for what it dequantizes
    num_bytes: int  # stored size in the file
    quantized: Scheme | None = None  # how `stored` hands it out, if not as a tensor of `dtype`

    @property
    def scheme(self) -> Scheme:
        return self.quantized or float_scheme(self.dtype)


class Checkpoint(ABC):
    """A read-only set of named logical tensors, each stored by a Scheme, and the model's config."""

    config: dict[str, Any]  # as in config.json; "architectures"[0] names the implementation

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Names, in natural order (layers.2 before layers.10), without reading data."""

    @abstractmethod
    def get(self, name: str) -> Tensor:
        """Read one tensor. May block on disk. The result may alias a mapped file: copy before writing."""

    def stored(self, name: str) -> Weight:
        """Read one tensor as it is stored: a StoredMatrix where it is quantized, else what `get` returns."""
        return self.get(name)

    def kv_scales(self) -> Mapping[str, Tensor]:
        """What keys and values in an fp8 KV cache are divided by, under the names that are stored."""
        return {}

    def release(self, name: str) -> None:
        """The tensor was read and copied: its mapped pages need not stay in memory. It can still be read again."""
        return None

    def release_all(self) -> None:
        """The same for all there is; reading one tensor may have brought in pages of its neighbours."""
        return None
