"""Opens the checkpoint of a resolved model. Imports torch; see model_config.py for the config alone."""

from __future__ import annotations

from quire.loader.checkpoint import Checkpoint
from quire.loader.gguf import GgufCheckpoint
from quire.loader.hub import ModelSource
from quire.loader.model_config import PICKLED
from quire.loader.quantized.registry import logical
from quire.loader.safetensors import SafetensorsCheckpoint


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Open a model's weights; reads headers, no data."""
    if source.kind == "gguf":
        return GgufCheckpoint(source.path)
    return logical(SafetensorsCheckpoint(source.path))


def has_weights(source: ModelSource) -> bool:
    """Whether there is anything to open, be it of a wrong kind; a folder may hold a config alone."""
    return source.kind == "gguf" or any(
        path.suffix in PICKLED or ".safetensors" in path.suffixes for path in source.path.iterdir()
    )
