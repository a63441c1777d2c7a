"""Turns Ollama's requests into a Conversation and the fields that all APIs share, or says what cannot be taken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quire.server.context import ServerContext
from quire.server.conversation.request import Conversation, OutputFormat, Tool, check_tools
from quire.server.generation.field_table import check_extra_fields
from quire.server.generation.fields import GenerationFields
from quire.server.ollama.protocol import ChatRequest, GenerateRequest, InputMessage, Options, RunFields
from quire.types.errors import RequestError
from quire.types.structured import StructuredOutputsParams

_NUMBER = re.compile(r"[+-]?\d{1,12}(\.\d*)?")
_DURATION_PART = re.compile(r"(\d{1,12}(?:\.\d*)?)(ms|us|ns|h|m|s)")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_LONGEST = 1e7  # seconds; an event loop's timers end somewhere
_ROLES = ("system", "user", "assistant", "tool")
_EFFORTS = ("low", "medium", "high")
# Option of Ollama's -> field of all APIs.
_FIELDS = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
_PLAIN = Options.model_fields.keys() - {"num_ctx", "num_predict"}
# Options that change answers and that this server does not have, with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "tfs_z": (0, 1),
    "typical_p": (0, 1),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
}
# Options about how Ollama loads and runs a model, and parameters of those that are not supported.
OPTION_HINTS = frozenset(
    {
        *("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap", "use_mlock"),
        *("vocab_only", "logits_all", "num_keep", "repeat_last_n", "penalize_newline", "mirostat_tau"),
        *("mirostat_eta", "num_gqa", "rope_frequency_base", "rope_frequency_scale", "embedding_only"),
        *("draft_num_predict", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("xtc_threshold",),
    }
)


@contextmanager
def options_named() -> Iterator[None]:
    """Raise errors about options under the names that they have in a request."""
    try:
        yield
    except RequestError as error:
        name = next((own for own, field in _FIELDS.items() if field == error.field), error.field)
        if name in Options.model_fields:
            error.args = (f"options.{str(error).replace(error.field or '', name or '', 1)}",)
            error.field = f"options.{name}"
        raise


def generation_fields(options: Options | None, body: RunFields, model: str) -> GenerationFields:
    """The options as the fields that requests of all APIs have."""
    given = {} if options is None else options.model_dump(exclude_none=True, include=set(Options.model_fields))
    fields = {_FIELDS.get(name, name): value for name, value in given.items() if name in _PLAIN}
    if fields.get("seed") == -1:
        del fields["seed"]
    return GenerationFields(model=model, stream=body.stream is not False, **fields)


def check_options(context: ServerContext, options: Options | None, route: str) -> None:
    """Refuse options that change answers; the hints are about how Ollama runs a model."""
    extra = {} if options is None else options.model_extra or {}
    for name, harmless in _UNSUPPORTED.items():
        if extra.get(name) is not None and extra[name] not in harmless:
            raise RequestError(f"options.{name} is not supported here; leave it out", f"options.{name}")
    check_extra_fields(extra, context, route, OPTION_HINTS | _UNSUPPORTED.keys(), parent="options.")


def keep_alive_seconds(value: int | float | str) -> float | None:
    """Seconds, or a duration as Go writes it; None: for ever."""
    text = str(value).strip()
    sign, parts = text[:1] == "-", _DURATION_PART.findall(text)
    if _NUMBER.fullmatch(text):
        seconds = abs(float(text))
    elif parts and "".join(number + unit for number, unit in parts) == text.lstrip("+-"):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    else:
        raise RequestError(
            f"keep_alive is {text[:40]!r} but must be a number of seconds or a duration such as 5m", "keep_alive"
        )
    return None if sign and seconds else min(seconds, _LONGEST)


def max_tokens(options: Options | None) -> int | None:
    wanted = None if options is None else options.num_predict
    return wanted if wanted is not None and wanted > 0 else None


def chat_conversation(context: ServerContext, body: ChatRequest, model: str) -> Conversation:
    tools = tuple(
        Tool(tool.function.name, tool.function.description, tool.function.parameters, where=f"tools[{index}]")
        for index, tool in enumerate(body.tools or ())
    )
    check_tools(tools, Conversation(messages=()).tool_choice)
    if tools and context.formats.tool is None:
        raise RequestError(
            f"{model[:100]!r} does not support tools: this server reads no calls of it; start it with"
            " --tool-call-parser, or leave tools out",
            "tools",
        )
    return _conversation(context, body, model, _messages(body.messages or []), tools)


def prompt_conversation(context: ServerContext, body: GenerateRequest, model: str) -> Conversation:
    """The prompt of /api/generate as a conversation of one turn."""
    messages = [{"role": "system", "content": body.system}] if body.system else []
    return _conversation(context, body, model, [*messages, {"role": "user", "content": body.prompt or ""}], ())


def refuse_images(images: list[Any] | None, where: str) -> None:
    if images:
        raise RequestError(f"{where} is given but this server takes text alone; leave the images out", where)


def output_format(body: RunFields) -> OutputFormat | None:
    if not body.format:
        return None
    if isinstance(body.format, dict):
        # As in Ollama, what of a schema cannot be enforced is no reason to refuse it; schema_check tells of it.
        return OutputFormat(StructuredOutputsParams(json=body.format), "format", is_strict=False)
    if body.format != "json":
        raise RequestError(f'format is {body.format[:40]!r} but must be "json" or a JSON schema', "format")
    return OutputFormat(StructuredOutputsParams(json_object=True), "format")


def _conversation(
    context: ServerContext, body: RunFields, model: str, messages: list[dict[str, Any]], tools: tuple[Tool, ...]
) -> Conversation:
    effort = body.think if isinstance(body.think, str) else None
    if effort is not None and effort not in _EFFORTS:
        raise RequestError(
            f"think is {effort[:40]!r} but must be true, false or one of {', '.join(_EFFORTS)}", "think"
        )
    if body.think and context.formats.reasoning is None:
        raise RequestError(
            f"{model[:100]!r} does not support thinking: its chat template has no marks for it; leave think out",
            "think",
        )
    return Conversation(
        messages=messages,
        tools=tools,
        output_format=output_format(body),
        thinking=body.think if isinstance(body.think, bool) else None,
        reasoning_effort=effort,
    )


def _messages(given: list[InputMessage]) -> list[dict[str, Any]]:
    """Messages in the templates' shape. Ollama's calls may have no ids, and results only the order of the calls."""
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # id and name of calls that have no result yet
    num_calls = 0
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if message.role not in _ROLES:
            raise RequestError(
                f"{where}.role is {message.role[:40]!r} but must be one of {', '.join(_ROLES)}", f"{where}.role"
            )
        refuse_images(message.images, f"{where}.images")
        made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking and message.role == "assistant":
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                call_id = call.id or f"call_{num_calls}"
                num_calls += 1
                function = {"name": call.function.name, "arguments": call.function.arguments or {}}
                calls.append({"id": call_id, "type": "function", "function": function})
                open_calls.append((call_id, call.function.name))
            made["tool_calls"] = calls
        if message.role == "tool":
            made |= _result_of(message, open_calls)
        messages.append(made)
    return messages


def _result_of(message: InputMessage, open_calls: list[tuple[str, str]]) -> dict[str, str]:
    """Which call a result belongs to: by its id, else the first open one of its name, else the first open one."""
    fitting = [
        call
        for call in open_calls
        if (message.tool_call_id is None or call[0] == message.tool_call_id)
        and (message.tool_name is None or call[1] == message.tool_name)
    ]
    call_id, name = fitting[0] if fitting else (message.tool_call_id or "", message.tool_name or "")
    if fitting:
        open_calls.remove(fitting[0])
    return {key: value for key, value in (("tool_call_id", call_id), ("name", name)) if value}
