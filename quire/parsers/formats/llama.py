"""Llama: calls as bare JSON objects (3.1 to 3.3), and as a list of Python calls (3.2, 4), as LFM 2.5 writes them."""

from __future__ import annotations

from quire.parsers.format import ToolFormat
from quire.parsers.json_calls import JsonEnvelope
from quire.parsers.python_calls import PythonCall

LLAMA3_JSON = ToolFormat(
    models="Llama 3.1, 3.2, 3.3",
    signs=(("<|start_header_id|>", '"parameters": '),),
    begin=("<|python_tag|>",),
    codec=JsonEnvelope(arguments_key="parameters", known_keys_only=True),
    between="; ",
    bare=True,
    ignored=("<|eom_id|>", "<|eot_id|>"),
    special=True,
)

PYTHONIC = ToolFormat(
    models="LFM 2.5, Llama 3.2 and others that call in Python",
    signs=(("<|tool_call_start|>",),),
    begin=("<|tool_call_start|>",),
    opening="[",
    codec=PythonCall(),
    between=", ",
    end="]",
    bare=True,
    ignored=("<|tool_call_end|>",),
)

LLAMA4_PYTHONIC = ToolFormat(
    models="Llama 4",
    signs=(("<|python_start|>",), ("<|header_start|>",)),
    begin=("<|python_start|>",),
    opening="[",
    codec=PythonCall(),
    between=", ",
    end="]",
    bare=True,
    ignored=("<|python_end|>", "<|eom|>", "<|eot|>"),
    special=True,
)
