"""Models with weights that are not finite, and an engine that should not mind."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quire.engine.core import EngineCore
from tests.e2e.tiny import make_engine
from tests.runner.engines import worker_of

BAD = 7  # the token whose embedding is NaN
GOOD_PROMPT = list(range(20, 60))
BAD_PROMPT = [*range(60, 80), BAD, *range(80, 90)]


def broken_copy(model: Path, name: str, rows: list[int] | EllipsisType, value: float) -> Path:
    """The model with some rows of one tensor filled with a value."""
    folder = model.with_name(f"{model.name}-{name}")
    if not folder.exists():
        shutil.copytree(model, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors[name][rows] = value
        save_file(tensors, folder / "model.safetensors")
    return folder


def make_broken(model: Path, **settings: Any) -> EngineCore:
    rows = [0, BAD]  # 0 is also the padding
    folder = broken_copy(model, "model.embed_tokens.weight", rows, torch.nan)
    return make_engine(folder, enable_prefix_caching=False, **settings)


def assert_finite(core: EngineCore) -> None:
    """All that requests left in the cache, and the null block."""
    for layer in worker_of(core).model.attention_layers():
        assert layer.cache.isfinite().all()
