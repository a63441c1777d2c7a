"""Quire: an inference engine for language models. The public names, each imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from quire.utils.version import VERSION

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.frontend.adapters import LoRARequest
    from quire.frontend.async_engine import AsyncEngine
    from quire.frontend.llm import LLM
    from quire.runner.sampling.logits_processors import LogitsProcessor
    from quire.types.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from quire.types.errors import (
        ConfigError,
        EngineError,
        ModelError,
        QuireError,
        RequestError,
        ResourceError,
    )
    from quire.types.outputs import CompletionOutput, Logprob, RequestOutput
    from quire.types.sampling import PoolingParams, RepetitionDetectionParams, SamplingParams
    from quire.types.structured import StructuredOutputsParams

__version__ = VERSION

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineError",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "ModelError",
    "PoolingParams",
    "QuireError",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestOutput",
    "ResourceError",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "quire.frontend.llm",
    "AsyncEngine": "quire.frontend.async_engine",
    "BeamSearchOutput": "quire.types.beam_search",
    "BeamSearchParams": "quire.types.beam_search",
    "BeamSearchSequence": "quire.types.beam_search",
    "CompletionOutput": "quire.types.outputs",
    "ConfigError": "quire.types.errors",
    "EngineConfig": "quire.config.engine",
    "LoRARequest": "quire.frontend.adapters",
    "EngineError": "quire.types.errors",
    "LogitsProcessor": "quire.runner.sampling.logits_processors",
    "Logprob": "quire.types.outputs",
    "ModelError": "quire.types.errors",
    "PoolingParams": "quire.types.sampling",
    "QuireError": "quire.types.errors",
    "RepetitionDetectionParams": "quire.types.sampling",
    "RequestError": "quire.types.errors",
    "RequestOutput": "quire.types.outputs",
    "ResourceError": "quire.types.errors",
    "SamplingParams": "quire.types.sampling",
    "StructuredOutputsParams": "quire.types.structured",
}

# Hidden from type checkers: they read the imports above, and a name that is not among them stays an error.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
