"""The table of tile shapes: the nearest line serves and is said once; what is measured here comes first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.triton.paged import needs_triton

pytestmark = needs_triton


def test_the_nearest_line_of_the_same_device_and_type_serves() -> None:
    from quire.kernels.triton.grouped_configs import MEASURED, nearest

    base = MEASURED[0]
    lines = [
        replace(base, experts=8, width=14336, device="card"),
        replace(base, experts=64, width=1024, device="card", dtype="float16"),
        replace(base, experts=64, width=1024, device="card"),
        replace(base, experts=128, width=768, device="other"),
    ]
    assert nearest(lines, 128, 768, "bfloat16", "card") is lines[2]
    assert nearest(lines, 8, 8192, "bfloat16", "card") is lines[0]
    assert nearest(lines, 128, 768, "float16", "card") is lines[1]
    assert nearest(lines, 128, 768, "bfloat16", "third") is lines[3]


def test_written_lines_are_read_again_and_replaced(tmp_path: Path) -> None:
    from quire.kernels.triton.grouped_configs import MEASURED, add, read

    path, base = tmp_path / "new" / "configs.json", MEASURED[0]
    slower = replace(base, few=replace(base.few, bn=256))
    add(path, slower)
    add(path, replace(base, experts=8))
    add(path, base)
    assert read(path) == [replace(base, experts=8), base]


def test_what_is_missing_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from quire.kernels.triton import grouped_configs

    said: list[str] = []
    monkeypatch.setattr(grouped_configs, "path_of_machine", lambda: tmp_path / "none.json")
    monkeypatch.setattr(grouped_configs.logger, "info", lambda message, *values: said.append(message % values))
    grouped_configs._chosen.cache_clear()
    for _ in range(2):
        grouped_configs.shapes_for(12, 96, torch.float16)
    grouped_configs._chosen.cache_clear()
    assert len(said) == 1
    assert "no kernel configuration for 12 experts of width 96 in float16" in said[0]
    assert "that of 128 of width 768 in bfloat16 on NVIDIA H200 serves" in said[0]
