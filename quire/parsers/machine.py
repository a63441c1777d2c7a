"""The one incremental machine behind every format whose thinking and calls stand between markers.

It walks through text, thinking, sections of calls and calls. What it has begun to read as a call stays in the
buffer until the call has started for sure, so that what turns out not to be one becomes text, unchanged.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

from quire.parsers.base import OutputParser
from quire.parsers.codec import Reader, Status
from quire.parsers.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from quire.parsers.format import ReasoningFormat, Tool, ToolFormat
from quire.parsers.scan import Match, match, scanner_for, skip_space
from quire.utils.log import get_logger

logger = get_logger(__name__)


class _Lane(enum.Enum):
    TEXT = enum.auto()
    THINKING = enum.auto()
    SECTION = enum.auto()  # between the calls of a section
    CALL = enum.auto()
    CALL_END = enum.auto()


class _Marker(enum.Enum):
    THINK = enum.auto()
    THINK_END = enum.auto()
    ANSWER = enum.auto()  # wraps the reply that follows thinking
    SECTION = enum.auto()
    CALL = enum.auto()
    BARE = enum.auto()  # a call without a marker, if it stands at the beginning of a line
    DROP = enum.auto()


class TagParser(OutputParser):
    def __init__(
        self,
        tool: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        tools: Mapping[str, Tool],
        thinking: bool,
        trims: bool,
        dropped: Collection[str],
    ) -> None:
        self._tool = tool
        self._reasoning = reasoning
        self._tools = tools
        self._markers = _markers(tool, reasoning, dropped)
        self._text_scanner = scanner_for(frozenset(self._markers))
        begins, ends = ((), ()) if reasoning is None else (reasoning.begin, reasoning.end)
        self._thinking_begins = frozenset(begin.strip() for begin in begins)
        self._thinking_ends = frozenset(end.strip() for end in ends)
        self._thinking_scanner = scanner_for(frozenset({*self._thinking_begins, *self._thinking_ends, *dropped}))
        begins_call = () if tool is None else (*tool.begin, tool.call_begin)
        self._call_tokens = frozenset(mark.strip() for mark in begins_call) & frozenset(dropped)
        self._buffer = ""
        self._position = 0
        self._lane = _Lane.THINKING if thinking else _Lane.TEXT
        self._events: list[Event] = []
        self._space = ""  # white space that is text only if text follows it
        self._trims = trims or thinking  # white space that comes now leads the lane in
        self._has_thought = thinking
        self._has_spoken = False
        self._at_line_begin = True
        self._open: int | None = None  # where in the buffer what may become a call begins
        self._resume = 0  # where to go on if it does not
        self._in_section = False
        self._had_call = False  # in this section
        self._is_bare = False
        self._opened = False
        self._reader: Reader | None = None
        self._num_calls = 0
        self._has_complained = False

    @property
    def is_thinking(self) -> bool:
        return self._lane is _Lane.THINKING

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        plain = self._lane is _Lane.TEXT and not (self._buffer or self._space or self._trims)
        if plain and not text[-1].isspace() and self._text_scanner.candidate.search(text) is None:
            self._has_spoken = True
            self._at_line_begin = False
            return [TextDelta(text)]
        keep = self._position if self._open is None else self._open
        self._buffer = self._buffer[keep:] + text
        self._position -= keep
        self._resume -= keep
        if self._open is not None:
            self._open = 0
        return self._run(final=False)

    def finish(self) -> list[Event]:
        events = self._run(final=True)
        if self._lane is _Lane.THINKING:
            self._say_thinking(self._space)
        elif self._num_calls == 0:
            self._say_text(self._space)
        self._space = ""
        events += self._events
        self._events = []
        return events

    def _run(self, final: bool) -> list[Event]:
        going = True
        while going:
            if self._lane is _Lane.TEXT:
                going = self._text(final)
            elif self._lane is _Lane.THINKING:
                going = self._thinking(final)
            elif self._lane is _Lane.SECTION:
                going = self._section(final)
            elif self._lane is _Lane.CALL:
                going = self._call(final)
            else:
                going = self._call_end(final)
        if self._position == len(self._buffer) and self._open is None:
            self._buffer = ""
            self._position = 0
        events, self._events = self._events, []
        return events

    # ---- text and thinking

    def _text(self, final: bool) -> bool:
        start, end = self._text_scanner.find(self._buffer, self._position, final)
        self._add_text(self._buffer[self._position : start])
        self._position = start
        if end == start:
            return False
        kind = self._markers[self._buffer[start:end]]
        if kind is _Marker.DROP or (kind is _Marker.ANSWER and self._has_thought):
            self._position = end
        elif kind is _Marker.THINK and not (self._has_thought or self._has_spoken or self._num_calls):
            self._position = end
            self._space = ""
            self._trims = self._has_thought = True
            self._lane = _Lane.THINKING
        elif kind is _Marker.THINK_END and not (self._has_thought or self._has_spoken or self._num_calls):
            # An end marker without a beginning: the model has decided not to think.
            self._position = end
            self._space = ""
            self._trims = self._has_thought = True
        elif kind is _Marker.SECTION:
            self._try(start, end, in_section=True)
        elif kind is _Marker.CALL:
            self._try(start, end, in_section=False)
        elif kind is _Marker.BARE and self._at_line_begin:
            self._try(start, start, in_section=True)
        else:
            self._add_text(self._buffer[start:end])
            self._position = end
        return True

    def _add_text(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        if not text:
            return
        line = text.rfind("\n")
        rest = text[line + 1 :]
        self._at_line_begin = (line >= 0 or self._at_line_begin) and (not rest or rest.isspace())
        text = self._space + text
        body = text.rstrip()
        self._say_text(body)
        self._space = text[len(body) :]

    def _say_text(self, text: str) -> None:
        if text:
            self._has_spoken = True
            self._events.append(TextDelta(text))

    def _thinking(self, final: bool) -> bool:
        start, end = self._thinking_scanner.find(self._buffer, self._position, final)
        self._add_thinking(self._buffer[self._position : start])
        self._position = end
        if end == start:
            return False
        marker = self._buffer[start:end]
        if marker in self._thinking_ends or marker in self._call_tokens:
            # A special token that begins calls is never text: the model forgot to end its thinking.
            self._position = end if marker in self._thinking_ends else start
            self._space = ""
            self._trims = True
            self._lane = _Lane.TEXT
        elif marker in self._thinking_begins and not self._trims:
            # At the very beginning it only repeats what the prompt said already.
            self._add_thinking(marker)
        return True

    def _add_thinking(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        body = text.rstrip()
        if body:
            self._say_thinking(self._space + body)
            self._space = text[len(body) :]
        else:
            self._space += text

    def _say_thinking(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    # ---- calls

    def _try(self, start: int, end: int, in_section: bool) -> None:
        """What begins here may be a call."""
        self._open = start
        self._is_bare = start == end
        self._resume = start + 1 if self._is_bare else end
        self._position = end
        self._in_section = in_section
        self._opened = self._had_call = False
        if in_section:
            self._lane = _Lane.SECTION
        else:
            self._begin_call(start, end)

    def _begin_call(self, start: int, position: int) -> None:
        """Read a call from `position` on; its marker, if it has one, begins at `start`."""
        assert self._tool is not None
        if self._had_call:
            self._resume = max(position, start + 1)
        self._position = position
        self._reader = self._tool.codec.reader(self, self._tools)
        self._lane = _Lane.CALL

    def _give_up(self, reason: str) -> None:
        """What was begun is no call: it is text, and what stands in it is looked at again."""
        assert self._open is not None
        begun = self._buffer[self._open : self._resume]
        if not self._is_bare or self._had_call:
            self._complain(reason)
        self._position = self._resume
        self._open = None
        self._reader = None
        self._lane = _Lane.TEXT
        self._add_text(begun)

    def _complain(self, reason: str) -> None:
        """Log that a call is malformed, without any of the model's output."""
        if not self._has_complained:
            self._has_complained = True
            logger.warning("a tool call is malformed and stays text: %s", reason)

    def _section(self, final: bool) -> bool:
        assert self._tool is not None
        tool, text = self._tool, self._buffer
        position = skip_space(text, self._position)
        waits = position == len(text)
        markers = [tool.opening.strip()] if tool.opening and not self._opened else self._section_markers()
        for marker in markers:
            found = match(text, position, marker)
            waits = waits or found is Match.PARTIAL
            if found is Match.FULL:
                return self._section_marker(marker, position, position + len(marker))
        needs_no_marker = (self._opened or not tool.opening) and not tool.call_begin
        if not waits and needs_no_marker and tool.codec.begins(text[position]):
            self._begin_call(position, position)
            return True
        if waits and not final:
            return False
        return self._leave_section()

    def _section_markers(self) -> list[str]:
        assert self._tool is not None
        tool = self._tool
        markers = (tool.end, tool.call_begin, tool.between if self._had_call else "")
        return [marker.strip() for marker in markers if marker.strip()]

    def _section_marker(self, marker: str, start: int, end: int) -> bool:
        assert self._tool is not None
        if not self._opened and self._tool.opening:
            self._opened = True
            self._position = end
        elif marker == self._tool.end.strip():
            if not self._had_call:
                self._give_up("a section without calls")
            else:
                self._position = end
                self._open = None
                self._lane = _Lane.TEXT
        elif marker == self._tool.call_begin.strip():
            self._begin_call(start, end)
        else:
            self._position = end
        return True

    def _leave_section(self) -> bool:
        """Something stands here that belongs to no section, or nothing."""
        assert self._tool is not None
        assert self._open is not None
        if not self._had_call or (self._tool.end and self._buffer[self._open :].strip()):
            self._give_up("no call follows" if not self._had_call else "a section has no end")
        else:
            self._position = self._open
            self._open = None
            self._lane = _Lane.TEXT
        return True

    def start(self, name: str, call_id: str | None = None) -> bool:
        """For the reader: this is a call."""
        if self._is_bare and name not in self._tools:
            return False
        self._open = None
        self._space = ""
        self._trims = not self._has_spoken  # white space after a call is no text if there was none before it either
        self._events.append(CallStart(self._num_calls, name, call_id))
        self._num_calls += 1
        return True

    def arguments(self, fragment: str) -> None:
        """For the reader: more of the arguments."""
        self._events.append(CallArguments(self._num_calls - 1, fragment))

    def _call(self, final: bool) -> bool:
        assert self._reader is not None
        reader = self._reader
        self._position = reader.read(self._buffer, self._position, final)
        if reader.status is Status.DONE:
            self._lane = _Lane.CALL_END
            return True
        if reader.status is Status.MORE and not final:
            return False
        if self._open is not None:
            self._give_up("it cannot be read" if reader.status is Status.BAD else "the output ends in it")
            return True
        self._events.append(CallEnd(self._num_calls - 1, reader.complete))
        if reader.status is Status.BAD:
            self._complain("the arguments go wrong")
            self._add_text(reader.unsaid)
        self._reader = None
        self._lane = _Lane.TEXT
        return True

    def _call_end(self, final: bool) -> bool:
        assert self._tool is not None
        marker = self._tool.call_end.strip()
        if marker:
            begin = skip_space(self._buffer, self._position)
            found = match(self._buffer, begin, marker)
            if found is Match.PARTIAL and not final:
                return False
            if found is Match.PARTIAL:
                self._position = len(self._buffer)
            elif found is Match.FULL:
                self._position = begin + len(marker)
            else:
                self._complain(f"{marker!r} is missing")
        self._events.append(CallEnd(self._num_calls - 1))
        self._reader = None
        self._lane = _Lane.TEXT
        if self._in_section:
            self._lane = _Lane.SECTION
            self._had_call = True
            self._open = self._resume = self._position
        return True


def _markers(
    tool: ToolFormat | None, reasoning: ReasoningFormat | None, dropped: Collection[str]
) -> dict[str, _Marker]:
    """What each string means in text; the later lines win."""
    markers = dict.fromkeys(dropped, _Marker.DROP)
    if reasoning is not None:
        markers |= {wrap.strip(): _Marker.ANSWER for wrap in reasoning.answer}
        markers |= {end.strip(): _Marker.THINK_END for end in reasoning.end}
        markers |= {begin.strip(): _Marker.THINK for begin in reasoning.begin}
    if tool is not None:
        markers |= dict.fromkeys(tool.ignored, _Marker.DROP)
        if tool.bare:
            markers[tool.opening.strip() or "{"] = _Marker.BARE
        if tool.call_begin:
            markers[tool.call_begin.strip()] = _Marker.CALL
        markers |= {begin.strip(): _Marker.SECTION for begin in tool.begin}
    return markers
