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
    "kv_transfer_params": empty,
    "length_penalty": one_of(1),
    "logits_processors": empty,
    "mm_processor_kwargs": empty,
    "modalities": text_only,
    "prediction": never,
    "prompt_embeds": never,
    "repetition_detection": never,
    "service_tier": one_of("auto", "default"),
    "store": one_of(False),
    "suffix": empty,
    "thinking_token_budget": never,
    "use_beam_search": one_of(False),
    "verbosity": one_of("medium"),
    "vllm_xargs": empty,
    "web_search_options": never,
}

# Fields with another name now: what to write instead, and which values of theirs ask for nothing.
RENAMED: dict[str, tuple[str, Harmless]] = {
    "function_call": ("tool_choice", one_of("none", "auto")),
    "functions": ('tools, each as {"type": "function", "function": ...}', empty),
    "guided_choice": ('structured_outputs: {"choice": ...}', never),
    "guided_decoding_backend": ("--structured-outputs-backend when the server is started", never),
    "guided_grammar": ('structured_outputs: {"grammar": ...}', never),
    "guided_json": ('structured_outputs: {"json": ...}', never),
    "guided_regex": ('structured_outputs: {"regex": ...}', never),
    "guided_whitespace_pattern": ('structured_outputs: {"whitespace_pattern": ...}', never),
    "structural_tag": ('structured_outputs: {"structural_tag": ...}', never),
}

# Fields that are understood and need nothing done: notes of the client's own, and hints that change no answer.
ACCEPTED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)


def check_extra_fields(extra: Mapping[str, Any], context: ServerContext, route: str) -> None:
    """Refuse by name what would be misunderstood if it were ignored; ignore the rest."""
    for name, value in extra.items():
        hint, harmless = "", UNSUPPORTED.get(name)
        if name in RENAMED:
            hint, harmless = RENAMED[name]
        if harmless is None:
            if name not in ACCEPTED:
                context.note_ignored_field(route, name)
        elif value is not None and not harmless(value):
            if hint:
                raise RequestError(f"{name} is not a field any more; use {hint}", name)
            raise RequestError(f"{name} is not supported yet; leave it out", name)
