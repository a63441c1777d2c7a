"""Deterministic mode on Hopper: tensor cores add the same columns together in small tiles and in large ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.paged import needs_triton

ROOT = Path(__file__).parents[3]

pytestmark = needs_triton


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.orders"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_kernel_has_one_order_however_many_rows_a_step_has(orders: dict[str, list[str]]) -> None:
    kernels = {name: found for name, found in orders.items() if not name.startswith("two and four warps")}
    assert {name: found for name, found in kernels.items() if len(found) > 1} == {}
    whats = {name.partition(":")[0] for name in kernels}
    assert {name.partition(",")[0] for name in whats} == {"attention", "linear", "experts"}
    assert len(whats) == 10


def test_tiles_of_two_warps_have_another_order_of_bytes_than_larger_ones(orders: dict[str, list[str]]) -> None:
    assert orders["two and four warps: _packed_kernel"] == ["4 by 4", "side by side"]
