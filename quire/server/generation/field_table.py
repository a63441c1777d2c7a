"""The table of fields that a request may have and an endpoint does not: which are refused, and what to use instead.

No endpoint may ignore in silence what another one honours: each such field has its line here. A field that nobody
knows is ignored, with one line in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from quire.server.context import ServerContext
from quire.server.generation.fields import GenerationFields
from quire.types.errors import RequestError

Harmless = Callable[[Any], bool]


def never(value: Any) -> bool:
    return False


def always(value: Any) -> bool:
    return True


def one_of(*values: Any) -> Harmless:
    return lambda value: value in values


def empty(value: Any) -> bool:
    return value in ([], {}, "")


def text_only(value: Any) -> bool:
    return value in ({"type": "text"}, ["text"])


# Fields that Quire does not support yet, and which of their values are harmless. A null always is.
UNSUPPORTED: dict[str, Harmless] = {
    "audio": never,
    "early_stopping": one_of(False),
    "ec_transfer_params": empty,
    "kv_transfer_params": empty,
    "logits_processors": empty,
    "media_io_kwargs": empty,
    "mm_processor_kwargs": empty,
    "modalities": text_only,
    "previous_input_messages": empty,
    "previous_response": never,
    "return_prompt_text": one_of(False),
    "return_routed_experts": one_of(False),  # of LLM.generate alone
    "watermarking": one_of(False),
    "web_search_options": never,
}

# Fields that have another name now: what to write instead, and which of their values are harmless.
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

# Fields that are understood and change no answer: notes of the client's own, and hints (see SESSION_FIELDS).
ACCEPTED = frozenset(
    {
        "keep_alive",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
        "verbosity",
    }
)

# Fields that some requests have: what to send instead where a request has them not, "" where there is nothing, and
# which values of theirs ask for nothing.
ELSEWHERE: dict[str, tuple[str, Harmless]] = {
    "add_generation_prompt": ("", one_of(True)),
    "add_special_tokens": ("", one_of(False)),
    "background": ("/v1/responses", one_of(False)),
    "beam_width": ("/v1/chat/completions", one_of(1)),
    "best_of": ("/v1/completions", one_of(1)),
    "context": ("the whole conversation, which is what a context of Ollama's says", empty),
    "continue_final_message": ("", one_of(False)),
    "dimensions": ("/v1/embeddings", never),
    "echo": ("", one_of(False)),
    "encoding_format": ("/v1/embeddings", never),
    "enable_response_messages": ("/v1/responses", one_of(False)),
    "format": ("response_format, or what stands for it here", empty),
    "images": ("", empty),
    "include": ("/v1/responses", empty),
    "include_reasoning": ("", one_of(True)),
    "input": ("the name of the prompt here: messages or prompt", never),
    "instructions": ("a system message", one_of("")),
    "length_penalty": ("/v1/chat/completions", one_of(1)),
    "logprob_token_ids": ("/v1/chat/completions", empty),
    "logprobs": ('include: ["message.output_text.logprobs"] of /v1/responses', one_of(False)),
    "max_completion_tokens": ("max_tokens, or max_output_tokens of /v1/responses", never),
    "max_output_tokens": ("max_tokens", never),
    "max_tokens": ("max_output_tokens", never),
    "max_tool_calls": ("/v1/responses", never),
    "messages": ("the name of the prompt here: prompt or input", never),
    "n": ("several requests", one_of(1)),
    "options": ("each option as a field of its own, such as temperature", empty),
    "output_config": ("reasoning_effort, response_format, or what stands for them here", empty),
    "output_format": ("response_format, or what stands for it here", never),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use, where there are tools", one_of(True)),
    "previous_response_id": ("/v1/responses", never),
    "prompt": ("the name of the prompt here: messages or input", never),
    "prompt_embeds": ("/v1/completions", never),
    "prompt_logprobs": ("/v1/completions", never),
    "prompt_name": ("/v1/embeddings", never),
    "raw": ("/v1/completions", one_of(False)),
    "reasoning": ("reasoning_effort, or thinking of /v1/messages", empty),
    "reasoning_effort": ("reasoning.effort of /v1/responses, or output_config.effort of /v1/messages", never),
    "response_format": (
        "structured_outputs, text.format of /v1/responses, or output_config.format of /v1/messages",
        text_only,
    ),
    "return_token_ids": ("/v1/chat/completions", one_of(False)),
    "return_token_strs": ("/tokenize", one_of(False)),
    "return_tokens_as_token_ids": ("/v1/chat/completions", one_of(False)),
    "stop_sequences": ("stop", empty),
    "stream_options": ("", always),  # where this is not a field, answers always have the usage
    "step_tag_id": ("/pooling", never),
    "suffix": ("/v1/completions", empty),
    "system": ("a system message", empty),
    "template": ("chat_template of /v1/chat/completions", empty),
    "text": ("response_format", empty),
    "think": ("reasoning_effort, or thinking of /v1/messages", never),
    "thinking": ("reasoning_effort", empty),
    "tokens": ("/detokenize", never),
    "tool_choice": ("a conversation, which has tools", one_of("auto", "none")),
    "tools": ("a conversation, which has tools", empty),
    "top_logprobs": ("logprobs", one_of(0)),
    "truncate": ("truncate_prompt_tokens", one_of(False)),
    "truncation": ("truncate_prompt_tokens", one_of("disabled")),
    "use_activation": ("/v1/embeddings", never),
    "use_beam_search": ("/v1/chat/completions", one_of(False)),
    "chat_template": ("a conversation, which has a template", never),
    "chat_template_kwargs": ("a conversation, which has a template", empty),
    "documents": ("a conversation, which has a template", empty),
    **{name: ("/v1/chat/completions", never) for name in GenerationFields.model_fields if name != "model"},
    "activation": ("/v1/embeddings", never),
    "instruction": ("/rerank", never),
    "max_tokens_per_doc": ("/rerank", never),
    "query": ("/rerank", never),
    "return_documents": ("/rerank", never),
    "task": ("/pooling", never),
    "text_1": ("/score", never),
    "text_2": ("/score", never),
    "top_n": ("/rerank", never),
}

# Of fields that say how to generate, those that also change a prompt: where one is only counted, they are refused.
_CHANGE_PROMPTS = frozenset({"truncate_prompt_tokens", "truncation_side"})
NO_EFFECT_ON_PROMPTS = frozenset(
    {
        *(GenerationFields.model_fields.keys() - _CHANGE_PROMPTS),
        *("beam_width", "best_of", "echo", "length_penalty", "n", "use_beam_search"),
        *("parallel_tool_calls", "response_format"),
        *("include_reasoning", "logprob_token_ids", "logprobs", "prompt_logprobs", "top_logprobs"),
        *("max_completion_tokens", "max_tokens", "return_token_ids", "return_tokens_as_token_ids", "stop_sequences"),
    }
)
"""What endpoints that count or tokenize a prompt accept, so that clients can send them a whole request."""


def check_extra_fields(
    extra: Mapping[str, Any], context: ServerContext, route: str, no_effect: Collection[str] = (), parent: str = ""
) -> None:
    """Refuse by name the fields that must not be ignored; ignore the rest, and all that are in `no_effect`.

    `parent` is what stands before the names of fields that are not on the body's top level, such as `options.`.
    """
    for name, value in extra.items():
        if value is None or name in ACCEPTED or name in no_effect:
            continue
        path = parent + name
        if name in RENAMED:
            instead, harmless = RENAMED[name]
            if not harmless(value):
                raise RequestError(f"{path} is not a field any more; use {instead}", path)
        elif name in UNSUPPORTED:
            if not UNSUPPORTED[name](value):
                raise RequestError(f"{path} is not supported yet; leave it out", path)
        elif name in ELSEWHERE:
            instead, harmless = ELSEWHERE[name]
            if not harmless(value):
                hint = f"; use {instead}" if instead else "; leave it out"
                raise RequestError(f"{path} is not a field of {route}{hint}", path)
        else:
            context.note_ignored_field(route, path)
