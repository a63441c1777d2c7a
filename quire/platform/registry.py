"""Which platforms there are, and which one a machine gets."""

from __future__ import annotations

from quire.platform.base import Platform
from quire.utils.registry import Registry

PLATFORMS: Registry[type[Platform]] = Registry("device", "quire.platform", {"cpu": "cpu:CpuPlatform"})


def get_platform(name: str) -> Platform:
    """`auto` takes the best device that is present."""
    return PLATFORMS.get("cpu" if name == "auto" else name)()
