"""SpeculativeConfig from JSON: every field's type, the fields that a method reads, and the values that make sense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from quire.config.groups import SpeculativeConfig
from quire.config.typed import typed
from quire.types.errors import ConfigError

_COUNT = ("num_speculative_tokens",)
_MODEL = ("num_speculative_tokens", "model", "revision", "quantization", "draft_tensor_parallel_size")
# The fields that a method reads, besides its name. Other fields are refused, so that none is ignored silently.
METHODS: dict[str, tuple[str, ...]] = {
    "none": (),
    "prediction": _COUNT,
    "ngram": (*_COUNT, "prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        *_COUNT,
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "draft_model": _MODEL,
    "eagle": _MODEL,
    "eagle3": _MODEL,
    "medusa": _MODEL,
    "mtp": (*_COUNT, "draft_tensor_parallel_size"),
}
PROPOSING = ("draft_model", "eagle", "eagle3", "medusa", "mtp")  # methods with weights: the worker drafts
MAX_DRAFTS = 64  # of a request in a step; more of them hardly ever hold
MAX_NGRAM = 64  # tokens of the shortest n-gram: each position of a request is indexed by as many


def read_speculative(value: object) -> SpeculativeConfig:
    """A SpeculativeConfig from itself, or from a dict as LLM(...) and the command line give it."""
    if isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, Mapping):
        example = '{"method": "ngram", "num_speculative_tokens": 4}'
        raise ConfigError(f"speculative_config is {value!r} but must be a dict such as {example}")
    given: dict[str, Any] = dict(value)
    method = given.get("method")
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"speculative_config: method is {method!r} but must be one of {', '.join(sorted(METHODS))}")
    if "model" in METHODS[method] and not given.get("model"):
        raise ConfigError(f"speculative_config: method {method} needs model, the folder or name of its weights")
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in given:
        if name not in known:
            raise ConfigError(f"speculative_config: unknown field {name!r}; known: {', '.join(known)}")
        if name != "method" and name not in METHODS[method]:
            takes = ", ".join(METHODS[method]) or "no other field"
            raise ConfigError(f"speculative_config: method {method} does not read {name}; it reads {takes}")
    hints = get_type_hints(SpeculativeConfig)
    return SpeculativeConfig(
        **{name: typed(f"speculative_config: {name}", value, hints[name]) for name, value in given.items()}
    )


def check_speculative(config: SpeculativeConfig) -> None:
    """Refuse values that no method could work with."""
    counts = {
        "num_speculative_tokens": config.num_speculative_tokens,
        "prompt_lookup_max": config.prompt_lookup_max,
        "prompt_lookup_min": config.prompt_lookup_min,
        "draft_tensor_parallel_size": config.draft_tensor_parallel_size,
        "suffix_decoding_max_tree_depth": config.suffix_decoding_max_tree_depth,
        "suffix_decoding_max_cached_requests": config.suffix_decoding_max_cached_requests,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"speculative_config: {name} is {count} but must be at least 1")
    most = config.num_speculative_tokens
    if most is not None and most > MAX_DRAFTS:
        raise ConfigError(f"speculative_config: num_speculative_tokens is {most} but must be at most {MAX_DRAFTS}")
    shortest, longest = lookup_sizes(config)
    if shortest > MAX_NGRAM:
        raise ConfigError(f"speculative_config: prompt_lookup_min is {shortest} but must be at most {MAX_NGRAM}")
    if shortest > longest:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min is {shortest} but prompt_lookup_max is {longest}; lower the first"
        )
    share = config.suffix_decoding_min_token_prob
    if not 0 <= share <= 1:
        raise ConfigError(f"speculative_config: suffix_decoding_min_token_prob is {share} but must be from 0 to 1")
    factor = config.suffix_decoding_max_spec_factor
    if not factor > 0:
        raise ConfigError(f"speculative_config: suffix_decoding_max_spec_factor is {factor} but must be above 0")


def lookup_sizes(config: SpeculativeConfig) -> tuple[int, int]:
    """The shortest and the longest n-gram; 2 and 5 where the other allows it."""
    shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
    if shortest is None:
        shortest = 2 if longest is None else min(2, longest)
    if longest is None:
        longest = max(5, shortest)
    return shortest, longest
