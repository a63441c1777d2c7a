"""Which platforms there are, which one a machine gets, and which GPUs PyTorch sees."""

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


def gpu_names() -> list[str]:
    """The name, compute capability and memory of each GPU that PyTorch can use."""
    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{gpu.name} ({gpu.major}.{gpu.minor}), {gpu.total_memory / (1 << 30):.0f} GiB" for gpu in found]


def torch_knows_gpus() -> bool:
    """Whether this PyTorch was built for GPUs."""
    return torch.version.cuda is not None
