"""Mistral: calls as a list of JSON objects (until tokenizer v7), or by name and arguments; Magistral's thinking."""

from __future__ import annotations

from quire.parsers.format import ReasoningFormat, ToolFormat
from quire.parsers.json_calls import JsonEnvelope, NamedJson

MISTRAL = ToolFormat(
    models="Mistral Small 3.2, Devstral, Magistral, Ministral 3 (tokenizer v11 on)",
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    call_begin="[TOOL_CALLS]",
    codec=NamedJson(name_end="[ARGS]", id_mark="[CALL_ID]"),
    special=True,
    id_style="mistral",
)

MISTRAL_OLD = ToolFormat(
    models="Mistral 7B v0.3, Nemo, Large 2, Small 3.1 (tokenizers v2 to v7)",
    signs=(("[TOOL_CALLS]",),),
    begin=("[TOOL_CALLS]",),
    opening="[",
    codec=JsonEnvelope(),
    between=", ",
    end="]",
    special=True,
    id_style="mistral",
)

MAGISTRAL = ReasoningFormat(
    models="Magistral, Ministral 3 Reasoning",
    signs=(("[THINK]",),),
    begin=("[THINK]",),
    end=("[/THINK]",),
    special=True,
)
