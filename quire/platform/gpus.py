"""Which GPUs PyTorch sees on this machine, for people."""

from __future__ import annotations

import torch


def gpu_names() -> list[str]:
    """The name, compute capability and memory of each GPU that PyTorch can use."""
    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{gpu.name} ({gpu.major}.{gpu.minor}), {gpu.total_memory / (1 << 30):.0f} GiB" for gpu in found]


def torch_knows_gpus() -> bool:
    """Whether this PyTorch was built for GPUs."""
    return torch.version.cuda is not None
