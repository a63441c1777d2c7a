"""Events of an answer in the shapes of chat completions; pure functions."""

from __future__ import annotations

from quire.parsers.events import CallArguments, CallStart, Event, ParsedOutput, ReasoningDelta, TextDelta
from quire.server.openai.chat.protocol import (
    Delta,
    FunctionCall,
    FunctionDelta,
    ResponseMessage,
    ToolCall,
    ToolCallDelta,
)


def delta_of(event: Event) -> Delta:
    """What an event adds to the message that a client puts together. The end of a call adds nothing."""
    if isinstance(event, TextDelta):
        return Delta(content=event.text)
    if isinstance(event, ReasoningDelta):
        return Delta(reasoning=event.text, reasoning_content=event.text)
    if isinstance(event, CallStart):
        function = FunctionDelta(event.name, "")
        return Delta(tool_calls=[ToolCallDelta(event.index, event.id, "function", function)])
    if isinstance(event, CallArguments):
        return Delta(tool_calls=[ToolCallDelta(event.index, function=FunctionDelta(arguments=event.json_fragment))])
    return Delta()


def response_message(message: ParsedOutput, prefix: str, may_call: bool, include_reasoning: bool) -> ResponseMessage:
    """The whole message; `prefix` is the text that it goes on with. An answer of calls alone has a null content."""
    text = prefix + message.text
    answer = ResponseMessage("assistant", None if may_call and not text else text)
    if message.reasoning and include_reasoning:
        answer.reasoning = answer.reasoning_content = message.reasoning
    if message.calls:
        answer.tool_calls = [
            ToolCall(call.id or "", FunctionCall(call.name, call.arguments)) for call in message.calls
        ]
    return answer
