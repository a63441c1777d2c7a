"""The parser for outputs that are messages with headers: each goes to a channel, and perhaps to a recipient.

Thinking, visible text and calls are distinguished by the headers, which are not shown themselves.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping

from quire.parsers.base import OutputParser
from quire.parsers.codec import Status
from quire.parsers.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from quire.parsers.format import ChannelFormat, Tool
from quire.parsers.json_scan import JsonScanner
from quire.parsers.scan import NAME, scanner_for
from quire.utils.log import get_logger

logger = get_logger(__name__)

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_MAX_HEADER = 256


class _Lane(enum.Enum):
    BETWEEN = enum.auto()  # messages
    HEADER = enum.auto()
    THINKING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


class ChannelParser(OutputParser):
    def __init__(
        self,
        layout: ChannelFormat,
        *,
        prompt_text: str,
        tools: Mapping[str, Tool],
        parse_tools: bool,
        parse_reasoning: bool,
        dropped: Collection[str],
    ) -> None:
        self._layout = layout
        self._tools = tools
        self._parse_tools = parse_tools
        self._parse_reasoning = parse_reasoning
        markers = {layout.start, layout.channel, layout.message, layout.constrain, *layout.ends}
        self._scanner = scanner_for(frozenset(markers | set(dropped)))
        self._dropped = frozenset(dropped) - markers
        self._buffer = ""
        self._events: list[Event] = []
        self._header = ""
        self._written = ""  # what the output itself has of the header
        self._space = ""  # between messages
        self._name = ""
        self._body = ""  # of a call that has not started
        self._scan = JsonScanner()
        self._started = False
        self._num_calls = 0
        self._has_complained = False
        self._lane = self._lane_after(prompt_text)

    def _lane_after(self, prompt: str) -> _Lane:
        """Prompts end in the header that the output goes on with, or in a message to be continued."""
        layout = self._layout
        start = prompt.rfind(layout.start)
        if start < 0:
            return _Lane.BETWEEN
        header, has_message, _ = prompt[start + len(layout.start) :].partition(layout.message)
        if any(end in prompt[start:] for end in layout.ends):
            return _Lane.BETWEEN
        if not has_message:
            self._header = header
            return _Lane.HEADER
        return self._lane_of(header)

    @property
    def is_thinking(self) -> bool:
        return self._lane is _Lane.THINKING

    def feed(self, text: str) -> list[Event]:
        if not self._buffer and self._scanner.candidate.search(text) is None:
            if self._lane is _Lane.TEXT:
                return [TextDelta(text)] if text else []
            if self._lane is _Lane.THINKING:
                return [ReasoningDelta(text)] if text else []
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Event]:
        events = self._run(final=True)
        if self._lane is _Lane.HEADER:
            self._header_is_text()
        elif self._lane is _Lane.CALL:
            self._end_call(cut=True)
        events += self._events
        self._events = []
        return events

    def _run(self, final: bool) -> list[Event]:
        position = 0
        while True:
            start, end = self._scanner.find(self._buffer, position, final)
            if start > position:
                self._add(self._buffer[position:start])
            position = end
            if end == start:
                break
            marker = self._buffer[start:end]
            if marker not in self._dropped:
                self._mark(marker)
        self._buffer = self._buffer[position:]
        events, self._events = self._events, []
        return events

    def _add(self, text: str) -> None:
        if self._lane is _Lane.TEXT:
            self._events.append(TextDelta(text))
        elif self._lane is _Lane.THINKING:
            self._events.append(ReasoningDelta(text))
        elif self._lane is _Lane.CALL:
            self._add_call(text)
        elif self._lane is _Lane.HEADER:
            self._header += text
            self._written += text
            self._check_header()
        else:
            self._space += text
            if text.strip():
                self._complain("text outside of a message")
                self._lane = _Lane.TEXT
                self._events.append(TextDelta(self._space))

    def _mark(self, marker: str) -> None:
        layout = self._layout
        if self._lane is _Lane.CALL and self._scan.in_string:
            self._add_call(marker)
        elif self._lane is _Lane.HEADER:
            if marker == layout.message:
                self._written = ""
                self._lane = self._lane_of(self._header)
            elif marker in (layout.channel, layout.constrain):
                self._header += marker
                self._written += marker
            else:
                self._header_is_text()
                self._mark(marker)
        elif marker == layout.start:
            self._end_message()
            self._header = self._written = ""
            self._lane = _Lane.HEADER
        elif marker in layout.ends:
            self._end_message()
            self._space = ""
            self._lane = _Lane.BETWEEN
        elif self._lane is _Lane.BETWEEN and marker == layout.channel:
            # The start of the message was forgotten.
            self._header = self._written = marker
            self._lane = _Lane.HEADER
        elif self._lane is not _Lane.CALL:
            self._add(marker)
        else:
            self._add_call(marker)

    # ---- headers

    def _check_header(self) -> None:
        """A header goes on with a recipient or a marker; anything else is text from a model out of step."""
        written = self._written.strip()
        role_only = self._layout.channel not in self._header
        odd = (
            role_only
            and self._header != self._written
            and not (written.startswith("to=") or "to=".startswith(written))
        )
        if odd or len(self._header) > _MAX_HEADER:
            self._header_is_text()

    def _header_is_text(self) -> None:
        if self._written:
            self._complain("a message without a header")
            self._events.append(TextDelta(self._written))
        self._header = self._written = ""
        self._lane = _Lane.TEXT

    def _lane_of(self, header: str) -> _Lane:
        layout = self._layout
        recipient = _RECIPIENT.search(header)
        channel = header.partition(layout.channel)[2].split(layout.constrain)[0].split()
        if recipient is not None and recipient[1] != "assistant":
            name = recipient[1].removeprefix(layout.namespace)
            is_function = recipient[1].startswith(layout.namespace) or name in self._tools
            if is_function and NAME.fullmatch(name) is not None:
                self._begin_call(name)
                return _Lane.CALL if self._parse_tools else _Lane.TEXT
            return _Lane.THINKING if self._parse_reasoning else _Lane.TEXT
        is_thinking = bool(channel) and channel[0] == layout.hidden_channel
        return _Lane.THINKING if is_thinking and self._parse_reasoning else _Lane.TEXT

    # ---- calls

    def _begin_call(self, name: str) -> None:
        self._name = name
        self._body = ""
        self._scan = JsonScanner()
        self._started = False

    def _add_call(self, text: str) -> None:
        body = self._body + text
        position = self._scan.scan(body, 0)
        fragment = self._scan.take()
        if self._scan.kind == "{" and not self._started:
            self._start_call()
        if self._started and fragment:
            self._events.append(CallArguments(self._num_calls - 1, fragment))
            fragment = ""
        self._body = fragment + body[position:]
        done = self._scan.status is Status.DONE
        if (
            self._scan.status is Status.BAD
            or (self._scan.kind and not self._started)
            or (done and self._body.strip())
        ):
            self._call_is_text(done)

    def _start_call(self) -> None:
        self._events.append(CallStart(self._num_calls, self._name))
        self._num_calls += 1
        self._started = True

    def _call_is_text(self, complete: bool) -> None:
        self._complain("the arguments of a call are no JSON object")
        if self._started:
            self._events.append(CallEnd(self._num_calls - 1, complete))
        self._events.append(TextDelta(self._body))
        self._body = ""
        self._lane = _Lane.TEXT

    def _end_message(self) -> None:
        if self._lane is _Lane.CALL:
            self._end_call()

    def _end_call(self, cut: bool = False) -> None:
        """`cut`: the output ends here, perhaps too early."""
        if not self._started:
            self._start_call()
            if not cut:
                self._scan.scan("{}", 0)
        self._scan.scan(self._body, 0, final=True)
        fragment = self._scan.take()
        if fragment:
            self._events.append(CallArguments(self._num_calls - 1, fragment))
        self._events.append(CallEnd(self._num_calls - 1, self._scan.status is Status.DONE))
        self._body = ""
        self._space = ""
        self._lane = _Lane.BETWEEN

    def _complain(self, reason: str) -> None:
        """Log without any of the model's output."""
        if not self._has_complained:
            self._has_complained = True
            logger.warning("the output is malformed and stays text: %s", reason)
