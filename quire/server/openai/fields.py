"""Fields that a client may send and that are not in a request's model: not supported yet, harmless, or unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.server.context import ServerContext
from quire.types.errors import RequestError

Harmless = Callable[[Any], bool]


def never(value: Any) -> bool:
    return False


def one_of(*values: Any) -> Harmless:
    return lambda value: value in values


def empty(value: Any) -> bool:
    return value in ([], {}, "")


def text_only(value: Any) -> bool:
    return value in ({"type": "text"}, ["text"])


# Fields with a meaning that Quire does not give them yet, and which values of theirs ask for nothing special.
# A null is always harmless.
UNSUPPORTED: dict[str, Harmless] = {
    "audio": never,
    "best_of": one_of(1),
    "early_stopping": one_of(False),
    "function_call": one_of("none", "auto"),
    "functions": empty,
    "guided_choice": never,
    "guided_decoding_backend": never,
    "guided_grammar": never,
    "guided_json": never,
    "guided_regex": never,
    "guided_whitespace_pattern": never,
    "kv_transfer_params": empty,
    "length_penalty": one_of(1),
    "logits_processors": empty,
    "mm_processor_kwargs": empty,
    "modalities": text_only,
    "prediction": never,
    "prompt_embeds": never,
    "reasoning_effort": never,
    "repetition_detection": never,
    "response_format": text_only,
    "service_tier": one_of("auto", "default"),
    "store": one_of(False),
    "structural_tag": never,
    "structured_outputs": empty,
    "suffix": empty,
    "thinking_token_budget": never,
    "tool_choice": one_of("none", "auto"),
    "tools": empty,
    "use_beam_search": one_of(False),
    "verbosity": one_of("medium"),
    "vllm_xargs": empty,
    "web_search_options": never,
}

# Fields that are understood and need nothing done: notes of the client's own, and hints that change no answer.
ACCEPTED = frozenset(
    {
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)


def check_extra_fields(extra: Mapping[str, Any], context: ServerContext, route: str) -> None:
    """Refuse by name what would be misunderstood if it were ignored; ignore the rest."""
    for name, value in extra.items():
        harmless = UNSUPPORTED.get(name)
        if harmless is None:
            if name not in ACCEPTED:
                context.note_ignored_field(route, name)
        elif value is not None and not harmless(value):
            raise RequestError(f"{name} is not supported yet; leave it out", name)
