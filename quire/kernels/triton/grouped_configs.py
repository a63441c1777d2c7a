"""How grouped matmuls are cut, by experts, their width, type and device: a table, whose nearest line serves.

The package has what was measured by its authors; `quire bench moe` adds lines of this machine, which come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import torch

from quire.config import env
from quire.kernels.triton.grouped_matmul import GroupedShape
from quire.utils.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class GroupedConfig:
    """The shapes for few slots an expert, some, and many; and for many that are copied sorted."""

    experts: int
    width: int
    dtype: str
    device: str
    few: GroupedShape
    some: GroupedShape
    many: GroupedShape
    sorted: GroupedShape
    sorted_gated: GroupedShape


MEASURED = (
    GroupedConfig(
        *(128, 768, "bfloat16", "NVIDIA H200"),
        few=GroupedShape(16, 64, 128, 4, 4),
        some=GroupedShape(32, 64, 128, 4, 4),
        many=GroupedShape(128, 128, 64, 8, 3),
        sorted=GroupedShape(128, 256, 64, 8, 4),
        sorted_gated=GroupedShape(128, 128, 64, 4, 3),
    ),
)
_forced: list[GroupedConfig] = []


def shapes_for(experts: int, width: int, dtype: torch.dtype) -> GroupedConfig:
    """The line of this device, or the nearest there is, which is said once."""
    if _forced:
        return _forced[-1]
    return _chosen(experts, width, str(dtype).removeprefix("torch."), device_name())


@cache
def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"


@contextmanager
def using(line: GroupedConfig) -> Iterator[None]:
    """Inside the context, this line serves for everything."""
    _forced.append(line)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _chosen(experts: int, width: int, dtype: str, device: str) -> GroupedConfig:
    found = nearest((*read(path_of_machine()), *MEASURED), experts, width, dtype, device)
    if (found.experts, found.width, found.dtype, found.device) != (experts, width, dtype, device):
        logger.info(
            "no kernel configuration for %d experts of width %d in %s on %s: that of %d of width %d in %s on %s"
            " serves; `quire bench moe` measures one",
            *(experts, width, dtype, device, found.experts, found.width, found.dtype, found.device),
        )
    return found


def nearest(lines: Iterable[GroupedConfig], experts: int, width: int, dtype: str, device: str) -> GroupedConfig:
    """Of this device before others, of this type before others, then by the ratios of widths and experts."""

    def distance(line: GroupedConfig) -> tuple[bool, bool, float]:
        ratios = abs(math.log2(line.width / width)) + abs(math.log2(line.experts / experts))
        return line.device != device, line.dtype != dtype, ratios

    return min(lines, key=distance)


def path_of_machine() -> Path:
    return env.cache_dir() / "moe_configs.json"


def read(path: Path) -> list[GroupedConfig]:
    if not path.is_file():
        return []
    return msgspec.json.decode(path.read_bytes(), type=list[GroupedConfig])


def add(path: Path, line: GroupedConfig) -> None:
    """Write a line in place of the one for the same, if there is one."""
    key = (line.experts, line.width, line.dtype, line.device)
    others = [old for old in read(path) if (old.experts, old.width, old.dtype, old.device) != key]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode([*others, line])))
