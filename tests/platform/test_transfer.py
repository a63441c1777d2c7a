"""Small copies between host and device."""

from __future__ import annotations

import torch

from quire.platform.transfer import Download, upload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_there_and_back() -> None:
    values = [0, 1, -5, (1 << 31) - 1]
    there = upload(values, DEVICE)
    assert (there.device.type, there.dtype) == (DEVICE.type, torch.int32)
    arriving = Download(there)
    assert arriving.get().tolist() == arriving.get().tolist() == values
    assert arriving.get().device.type == "cpu"


def test_nothing_and_long_integers() -> None:
    assert upload([], DEVICE).shape == (0,)
    assert upload([1 << 62, -(1 << 63)], DEVICE, torch.int64).tolist() == [1 << 62, -(1 << 63)]
