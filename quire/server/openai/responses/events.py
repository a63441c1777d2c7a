"""The events of a streamed response, in the specification's order, and the response they add up to.

Pure: blocks of an answer go in, events come out; knows no engine, store or connection.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.server.conversation.blocks import BlockDelta, BlockEvent, BlockStart
from quire.server.openai.logprobs import ChatLogprob
from quire.server.openai.responses.protocol import (
    FunctionCallItem,
    ItemStatus,
    McpCallItem,
    McpError,
    McpListToolsItem,
    McpProtocolError,
    McpToolInfo,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    SummaryText,
)

Event = dict[str, Any]

CUT_SHORT = "the answer ended within the call"


class ResponseEvents:
    """Builds the events of one response and fills in its output on the way.

    `namespaces` gives for a flattened tool's name its namespace and its own name, `remote` the same for the tools of
    tool servers, with the server's label. Calls of those wait, after their arguments, for `call_result`.
    """

    def __init__(
        self,
        response: Response,
        *,
        as_summary: bool = False,
        with_encrypted: bool = False,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
        remote: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.response = response
        self._as_summary = as_summary
        self._with_encrypted = with_encrypted
        self._namespaces = namespaces or {}
        self._remote = remote or {}
        self._sequence = 0
        self._base = 0  # items of earlier turns

    @property
    def has_begun(self) -> bool:
        return self._sequence > 0

    def begin(self) -> list[Event]:
        events = [self._event("response.created", response=self._snapshot())]
        self.response.status = "in_progress"
        return [*events, self.in_progress()]

    def in_progress(self) -> Event:
        """May be sent again as a keep-alive."""
        return self._event("response.in_progress", response=self._snapshot())

    def next_turn(self) -> None:
        """The blocks that follow are of another answer of the model, in the same response."""
        self._base = len(self.response.output)

    def blocks(self, blocks: Sequence[BlockEvent], logprobs: list[ChatLogprob] | None = None) -> list[Event]:
        """`logprobs` are of the tokens that the text among `blocks` was made of."""
        events: list[Event] = []
        for block in blocks:
            index = self._base + block.position
            if isinstance(block, BlockStart):
                events += self._open(block, index)
            elif isinstance(block, BlockDelta):
                events += self._grow(block.text, index, logprobs if block.kind == "text" else None)
                logprobs = None if block.kind == "text" else logprobs
            else:
                events += self._close(index, "completed" if block.complete else "incomplete")
        return events

    def listing(self, label: str, tools: list[McpToolInfo]) -> list[Event]:
        """The tools of a server, before the model's output."""
        index = len(self.response.output)
        item = McpListToolsItem(self._item_id("mcpl", index), label, [])
        events = [self._add(item), self._part("mcp_list_tools.in_progress", index)]
        item.tools = tools
        return [*events, self._part("mcp_list_tools.completed", index), self._done(index)]

    def waiting_calls(self) -> list[tuple[int, McpCallItem]]:
        """The calls of the last turn that have no result yet."""
        return [
            (index, item)
            for index, item in enumerate(self.response.output)
            if isinstance(item, McpCallItem) and item.status == "in_progress"
        ]

    def has_client_calls(self) -> bool:
        """Whether the last turn calls functions that the client runs."""
        return any(isinstance(item, FunctionCallItem) for item in self.response.output[self._base :])

    def call_result(self, index: int, *, output: str | None = None, error: McpError | None = None) -> list[Event]:
        """The result of a waiting call: its output, or the error."""
        item = self.response.output[index]
        assert isinstance(item, McpCallItem)
        item.output, item.error = output, error
        item.status = "completed" if error is None else "failed"
        return [self._part(f"mcp_call.{item.status}", index), self._done(index)]

    def end(self) -> Event:
        """The last event; the response's status says which."""
        return self._event(f"response.{self.response.status}", response=self._snapshot())

    def call_cut_short(self, index: int) -> list[Event]:
        return self.call_result(index, error=McpProtocolError(CUT_SHORT))

    def _open(self, start: BlockStart, index: int) -> list[Event]:
        item = self._new_item(start, index)
        events = [self._add(item)]
        if isinstance(item, McpCallItem):
            return [*events, self._part("mcp_call.in_progress", index)]
        if isinstance(item, MessageItem):
            item.content.append(OutputText(""))
            return [*events, self._part("content_part.added", index, content_index=0, part=_plain(item.content[0]))]
        if isinstance(item, ReasoningItem):
            return [*events, self._reasoning_part("added", index, item)]
        return events

    def _new_item(self, start: BlockStart, index: int) -> OutputItem:
        if start.kind == "text":
            return MessageItem(self._item_id("msg", index), "in_progress", [])
        if start.kind == "reasoning":
            item = ReasoningItem(self._item_id("rs", index), "in_progress", [], [])
            if self._as_summary:
                item.summary.append(SummaryText(""))
            else:
                item.content.append(ReasoningText(""))
            return item
        if start.name in self._remote:
            return McpCallItem(self._item_id("mcp", index), "in_progress", *self._remote[start.name], "")
        call = FunctionCallItem(self._item_id("fc", index), "in_progress", start.call_id, start.name, "")
        if start.name in self._namespaces:
            call.namespace, call.name = self._namespaces[start.name]
        return call

    def _grow(self, text: str, index: int, logprobs: list[ChatLogprob] | None) -> list[Event]:
        item = self.response.output[index]
        if isinstance(item, MessageItem):
            part = item.content[0]
            part.text += text
            part.logprobs = [*part.logprobs, *(logprobs or ())]
            told = _event_logprobs(logprobs or [])
            return [self._part("output_text.delta", index, content_index=0, delta=text, logprobs=told)]
        if isinstance(item, FunctionCallItem):
            item.arguments += text
            return [self._part("function_call_arguments.delta", index, delta=text)] if text else []
        if isinstance(item, McpCallItem):
            item.arguments += text
            return [self._part("mcp_call_arguments.delta", index, delta=text)] if text else []
        assert isinstance(item, ReasoningItem)
        if self._as_summary:
            item.summary[0].text += text
            return [self._part("reasoning_summary_text.delta", index, summary_index=0, delta=text)]
        item.content[0].text += text
        return [self._part("reasoning_text.delta", index, content_index=0, delta=text)]

    def _close(self, index: int, status: ItemStatus) -> list[Event]:
        item = self.response.output[index]
        if isinstance(item, McpCallItem):
            done = self._part("mcp_call_arguments.done", index, arguments=item.arguments)
            return [done] if status == "completed" else [done, *self.call_cut_short(index)]
        assert isinstance(item, MessageItem | FunctionCallItem | ReasoningItem)
        item.status = status
        events: list[Event] = []
        if isinstance(item, MessageItem):
            part = item.content[0]
            told = _event_logprobs(part.logprobs)
            events = [
                self._part("output_text.done", index, content_index=0, text=part.text, logprobs=told),
                self._part("content_part.done", index, content_index=0, part=_plain(part)),
            ]
        elif isinstance(item, FunctionCallItem):
            name, arguments = item.name, item.arguments
            events = [self._part("function_call_arguments.done", index, name=name, arguments=arguments)]
        else:
            events = [self._reasoning_done(index, item), self._reasoning_part("done", index, item)]
            if self._with_encrypted:
                item.encrypted_content = encrypt(reasoning_text(item))
        return [*events, self._done(index)]

    def _reasoning_done(self, index: int, item: ReasoningItem) -> Event:
        if self._as_summary:
            return self._part("reasoning_summary_text.done", index, summary_index=0, text=item.summary[0].text)
        return self._part("reasoning_text.done", index, content_index=0, text=item.content[0].text)

    def _reasoning_part(self, what: str, index: int, item: ReasoningItem) -> Event:
        if self._as_summary:
            part = _plain(item.summary[0])
            return self._part(f"reasoning_summary_part.{what}", index, summary_index=0, part=part)
        return self._part(f"content_part.{what}", index, content_index=0, part=_plain(item.content[0]))

    def _part(self, kind: str, index: int, **fields: Any) -> Event:
        """An event about the item at `index` of the output."""
        item_id = self.response.output[index].id
        return self._event(f"response.{kind}", output_index=index, item_id=item_id, **fields)

    def _add(self, item: OutputItem) -> Event:
        self.response.output.append(item)
        index = len(self.response.output) - 1
        return self._event("response.output_item.added", output_index=index, item=_plain(item))

    def _done(self, index: int) -> Event:
        return self._event("response.output_item.done", output_index=index, item=_plain(self.response.output[index]))

    def _item_id(self, prefix: str, index: int) -> str:
        return f"{prefix}_{self.response.id.removeprefix('resp_')}_{index}"

    def _snapshot(self) -> Any:
        """The response as it is now."""
        return _plain(self.response)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def reasoning_text(item: ReasoningItem) -> str:
    return "".join(part.text for part in item.content) or "".join(part.text for part in item.summary)


def encrypt(text: str) -> str:
    """Thinking for a client that keeps the conversation itself and hands items back as it got them.

    Nothing is secret in it: the same text stands beside it.
    """
    return base64.b64encode(text.encode("utf-8", "replace")).decode()


def decrypt(text: str) -> str:
    """What `encrypt` was given; nothing for what another server wrote."""
    try:
        return base64.b64decode(text, validate=True).decode()
    except ValueError:
        return ""


def _event_logprobs(logprobs: Sequence[ChatLogprob]) -> list[dict[str, Any]]:
    """Logprobs in the form of events, which have no bytes."""
    return [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "top_logprobs": [{"token": top.token, "logprob": top.logprob} for top in entry.top_logprobs],
        }
        for entry in logprobs
    ]


def _plain(struct: Any) -> Any:
    return msgspec.to_builtins(struct)
