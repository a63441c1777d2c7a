"""Checkpoints that other tools wrote (tools/make_quantized_checkpoints.py) are read to the bit, whole and sliced."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.scheme import StoredMatrix, as_tensor, part_of, scheme_of
from quire.loader.checkpoint import Checkpoint
from quire.loader.hub import resolve_model
from quire.loader.open import open_checkpoint

ROOT = Path(__file__).parent / "checkpoints"
NAMES = sorted(folder.name for folder in ROOT.iterdir())


def opened(name: str) -> Checkpoint:
    return open_checkpoint(resolve_model(str(ROOT / name)))


def expected(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((ROOT / name / "expected.json").read_text())
    return values


def digest(values: Tensor, dtype: str) -> str:
    values = (values.to(getattr(torch, dtype)) + 0.0).contiguous()
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_what_an_independent_decoder_reads(name: str) -> None:
    checkpoint, matrices = opened(name), expected(name)["tensors"]
    assert len(matrices) == 6
    for tensor, about in matrices.items():
        stored = checkpoint.stored(tensor)
        assert isinstance(stored, StoredMatrix), tensor
        assert stored.shape == checkpoint.tensors()[tensor].shape
        assert digest(stored.tensor(), about["dtype"]) == about["sha256"], tensor
    plain = checkpoint.tensors()["model.layers.0.self_attn.o_proj.weight"]
    assert plain.quantized is None, "a layer that the config leaves out"


@pytest.mark.parametrize("name", NAMES)
def test_slices_are_slices_of_the_decoded_matrix(name: str) -> None:
    """As two, four and eight ranks cut them, where the words or groups allow it and where they do not."""
    checkpoint = opened(name)
    for tensor in expected(name)["tensors"]:
        stored = checkpoint.stored(tensor)
        whole = as_tensor(stored)
        for axis in (0, 1):
            for ranks in (2, 4, 8):
                size = whole.shape[axis] // ranks
                for start in range(0, whole.shape[axis], size):
                    part = part_of(stored, axis, start, size)
                    assert torch.equal(as_tensor(part), whole.narrow(axis, start, size)), (tensor, axis, start)
                    assert part.shape == as_tensor(part).shape
                    assert scheme_of(part).element in (scheme_of(stored).element, "F32")


def test_they_are_small() -> None:
    assert sum(file.stat().st_size for file in ROOT.rglob("*")) < 900_000
