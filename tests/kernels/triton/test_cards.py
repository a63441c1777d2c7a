"""Kernels compile for GPUs that this machine need not have; see cards.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.paged import needs_triton

ROOT = Path(__file__).parents[3]
KERNELS = {
    file.stem: set(names)
    for file in (ROOT / "quire" / "kernels" / "triton").glob("*.py")
    if (names := re.findall(r"^def (_\w+_kernel)\(", file.read_text(encoding="utf-8"), flags=re.M))
}
PARTS = {
    "matmuls": {"lora", "matmul", "tile_matmul", "wide_matmul"},
    "experts": {
        *("add_shared", "expert_slots", "grouped_matmul", "grouped_sorted", "packed_fragments", "packed_matmul"),
        *("packed_rows", "packed_wide", "routing"),
    },
    "lines": {"activation", "encoder", "gather", "layer_norm", "norm", "quantize", "rank_sum", "scale_rows"},
    "attention": {
        *("decode_attention", "even_attention", "limited_attention", "prefill_attention", "tile_attention"),
        *("qkv", "whole_attention"),
    },
    "latent": {"index", "latent", "latent_attention"},
    "sampling": {"candidates", "drafts", "logprobs", "rows", "sampling", "shaping", "step"},
    "states": {"channel_states", "chunked_states", "short_conv", "states"},
}

CARDS = ("hopper", "ampere", "ada", "blackwell")
# Older cards have no unit that copies tiles, and the oldest no eight-bit floats.
NOT_THERE = {
    "ampere": {
        *("_wide_kernel", "_packed_wide_kernel", "_packed_fragment_kernel", "_sorted_kernel", "_quantize_kernel"),
        "_gated_line_kernel",
    },
    "ada": {"_wide_kernel", "_packed_wide_kernel", "_packed_fragment_kernel", "_sorted_kernel"},
    "blackwell": {"_packed_wide_kernel", "_sorted_kernel"},  # too little shared memory
}

# Variants of kernels that take long to compile, and must not be compiled anew for other numbers of rows or places of
# lists: for two types of logits, the first round of draws apart from others; with and without a window, and then with
# a row's keys shared or not.
VARIANTS = {
    "sampling": {
        "_scan_kernel": 3,
        "_limits_kernel": 2,
        "_sample_kernel": 4,
        "_measure_kernel": 2,
        "_finish_kernel": 2,
    },
    "attention": {"_prefill_kernel": 2, "_split_kernel": 4},
}

pytestmark = needs_triton


def compiled(card: str, part: str, cache: Path, *flags: str) -> dict[str, int]:
    """How many variants there are of each kernel, compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.cards", card, part, *flags],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(card: str, part: str, cache: Path, *flags: str) -> dict[str, int]:
    """The same, with every kernel of the part among them."""
    found = compiled(card, part, cache, *flags)
    missing = set().union(*(KERNELS[module] for module in PARTS[part])) - found.keys()
    assert missing <= NOT_THERE.get(card, set())
    return found


def test_every_file_of_kernels_has_its_part() -> None:
    assert set().union(*PARTS.values()) == KERNELS.keys()


@pytest.mark.first
@pytest.mark.parametrize("part", PARTS)
def test_every_kernel_compiles_for_hopper(part: str, tmp_path: Path) -> None:
    found = check("hopper", part, tmp_path)
    expected = VARIANTS.get(part, {})
    assert {kernel: found[kernel] for kernel in expected} == expected


@pytest.mark.first
def test_matmuls_find_room_on_a_smaller_card(tmp_path: Path) -> None:
    """The widest matmuls of a large model alone: nightly runs compile the others."""
    assert compiled("ada", "widest_matmuls", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("card", CARDS)
def test_every_kernel_compiles_in_more_shapes(card: str, part: str, tmp_path: Path) -> None:
    check(card, part, tmp_path, "--all")
