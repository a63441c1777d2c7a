"""Platforms by name."""

from __future__ import annotations

import pytest
import torch

from quire.platform.base import Platform
from quire.platform.registry import PLATFORMS, get_platform
from quire.types.errors import ConfigError, UnknownNameError


def test_auto_finds_a_platform() -> None:
    assert get_platform("auto").name == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_platform_is_complete(name: str) -> None:
    platform = get_platform(name)
    assert platform.name == name
    declared = Platform.__annotations__
    assert [field for field in declared if not hasattr(platform, field)] == []


def test_an_unknown_device() -> None:
    with pytest.raises(UnknownNameError, match="unknown device 'abacus'; known: cpu, cuda"):
        get_platform("abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match=r"device is 'cuda' but torch .* here .*; set --device cpu"):
        get_platform("cuda").start(None)
