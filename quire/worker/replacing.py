"""What a worker does with its weights while it runs: replaces them by others of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.loader.hub import find_model
from quire.loader.mapper import planned_bytes
from quire.loader.open import open_checkpoint
from quire.loader.pooler import module_files
from quire.loader.with_modules import with_modules
from quire.models.registry import model_class
from quire.planning.engine_plan import EnginePlan
from quire.types.errors import ConfigError

_SAYS_NOTHING = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def with_weights(plan: EnginePlan, config: EngineConfig) -> EnginePlan:
    """The plan of an engine that runs, with the weights that the config names, of its drafter too. Reads none."""
    if config.model.load_format == "dummy":
        return plan
    source = find_model(config.model)
    checkpoint = with_modules(open_checkpoint(source), module_files(source, plan.pooler))
    return replace(plan, checkpoint=checkpoint, draft=plan.draft and plan.draft.beside(source))


def check_same_model(plan: EnginePlan, config: EngineConfig) -> None:
    """ConfigError if the weights that the config names cannot replace those of the plan. Reads none."""
    if config.model.load_format == "dummy":
        raise ConfigError("the weights of this engine are made up (load_format dummy), and cannot be replaced")
    found = with_weights(plan, config)
    checkpoint = found.checkpoint
    assert checkpoint is not None
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
    if found.draft is not None:
        found.draft.on_meta(plan.context)


def _meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _SAYS_NOTHING}
