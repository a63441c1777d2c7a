"""What a worker does with its weights while it runs: replaces them by others of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.loader.checkpoint import Checkpoint
from quire.loader.hub import find_model
from quire.loader.mapper import planned_bytes
from quire.loader.open import open_checkpoint
from quire.models.registry import model_class
from quire.planning.engine_plan import EnginePlan
from quire.types.errors import ConfigError

_SAYS_NOTHING = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def check_same_model(plan: EnginePlan, config: EngineConfig) -> Checkpoint | None:
    """The checkpoint whose weights can replace those of the plan; None: they are made up. Reads no weights."""
    if config.model.load_format == "dummy":
        raise ConfigError("the weights of this engine are made up (load_format dummy), and cannot be replaced")
    checkpoint = open_checkpoint(find_model(config.model))
    ours, theirs = _meaning(plan.model_config), _meaning(checkpoint.config)
    other = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if other:
        raise ConfigError(
            f"{config.model.model} is another model: its config differs in {', '.join(other[:8])}; give weights of"
            " the model that is served"
        )
    with torch.device("meta"):
        model = model_class(plan.model_config).from_config(plan.model_config, plan.context)
    planned_bytes(model, checkpoint.tensors())
    return checkpoint


def _meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
