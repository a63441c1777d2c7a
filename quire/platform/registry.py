"""Which platforms there are, and which one a machine gets."""

from __future__ import annotations

import torch

from quire.platform.base import Platform
from quire.utils.registry import Registry

PLATFORMS: Registry[type[Platform]] = Registry(
    "device", "quire.platform", {"cpu": "cpu:CpuPlatform", "cuda": "cuda:CudaPlatform"}
)


def get_platform(name: str) -> Platform:
    """`auto` takes the best device that is present."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return PLATFORMS.get(name)()
