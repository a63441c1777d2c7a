"""Finds calls that a model writes as bare JSON objects, without the markers of its format.

Stands behind another parser and looks only at the text which that one finds. An object is a call if it begins the
answer (or follows another call), stands alone on its lines, is complete, and names one of the tools; until that is
settled its text is held back. Anything else is text, unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from quire.parsers.base import OutputParser
from quire.parsers.codec import Status
from quire.parsers.events import CallArguments, CallEnd, CallStart, Event, ReasoningDelta, TextDelta
from quire.parsers.format import Tool
from quire.parsers.json_calls import EnvelopeReader
from quire.structured.guidance import GuidanceBackend
from quire.structured.instance import NotCheckedError, Validator


class BareCallParser(OutputParser):
    def __init__(self, inner: OutputParser, tools: Mapping[str, Tool]) -> None:
        self._inner = inner
        self._tools = tools
        self._held = ""  # text that may be a call, with the white space around it
        self._position = 0  # how much of it has been read
        self._reader: EnvelopeReader | None = None
        self._call: tuple[str, str | None] | None = None
        self._arguments: list[str] = []
        self._num_found = 0  # calls without a marker; the indexes of the others count them too
        self._num_marked = 0
        self._has_called = False
        self._is_over = False  # text was said: no object behind it is a call

    @property
    def is_thinking(self) -> bool:
        return self._inner.is_thinking

    def feed(self, text: str) -> list[Event]:
        return self._read(self._inner.feed(text))

    def finish(self) -> list[Event]:
        events = self._read(self._inner.finish())
        self._settle(events, final=True)
        if not self._has_called:
            self._give_up(events)
        return events

    def _read(self, found: list[Event]) -> list[Event]:
        if self._is_over and not self._num_found:
            return found
        events: list[Event] = []
        for event in found:
            if isinstance(event, ReasoningDelta) or (isinstance(event, TextDelta) and self._is_over):
                events.append(event)
            elif isinstance(event, TextDelta):
                self._held += event.text
                self._settle(events, final=False)
            else:
                if isinstance(event, CallStart):
                    self._begin_marked_call(events)
                events.append(msgspec.structs.replace(event, index=event.index + self._num_found))
        return events

    def _begin_marked_call(self, events: list[Event]) -> None:
        """A call in the model's own format begins: what was held back is a call too, or text, or white space."""
        self._settle(events, final=True)
        self._held = ""
        self._num_marked += 1
        self._has_called = True

    def _settle(self, events: list[Event], final: bool) -> None:
        """Decide about what is held back, as far as that can be done."""
        while not self._is_over and self._held:
            if self._reader is None and not self._begin():
                if not self._held.isspace():
                    self._give_up(events)
                return
            assert self._reader is not None
            if self._reader.status is Status.MORE:
                self._position = self._reader.read(self._held, self._position, final)
            if self._reader.status is Status.MORE and not final:
                return
            end = self._end_of_line(final) if self._is_call() else None
            if end is None:
                self._give_up(events)
            elif end < 0:
                return
            else:
                self._emit(events, end)

    def _begin(self) -> bool:
        start = len(self._held) - len(self._held.lstrip())
        if not self._held.startswith("{", start):
            return False
        self._position = start
        self._call, self._arguments = None, []
        self._reader = EnvelopeReader(self, known_keys_only=True)
        return True

    def start(self, name: str, call_id: str | None = None) -> bool:
        """For the reader: the name is known."""
        self._call = (name, call_id)
        return name in self._tools

    def arguments(self, fragment: str) -> None:
        """For the reader: more of the arguments."""
        self._arguments.append(fragment)

    def _is_call(self) -> bool:
        """Whether the object has been read and has arguments: a name alone may be any answer."""
        reader = self._reader
        return reader is not None and reader.status is Status.DONE and reader.has_arguments and self._obeys()

    def _obeys(self) -> bool:
        """Whether the arguments of a strict tool obey its schema, to which no grammar has held them here."""
        assert self._call is not None
        tool = self._tools[self._call[0]]
        if not tool.strict:
            return True
        try:
            validator = Validator(tool.parameters, GuidanceBackend.check_text)
            return validator.is_valid(tool.parameters, json.loads("".join(self._arguments)))
        except (NotCheckedError, RecursionError, ValueError):  # nested too deep, or with a number of 5,000 digits
            return False

    def _end_of_line(self, final: bool) -> int | None:
        """Where what follows the object begins: -1 if that has not come, None if the line goes on with text."""
        rest = self._held[self._position :]
        blank = len(rest) - len(rest.lstrip())
        if "\n" in rest[:blank] or (blank == len(rest) and final):
            return self._position + blank
        return -1 if blank == len(rest) else None

    def _emit(self, events: list[Event], end: int) -> None:
        assert self._call is not None
        index = self._num_marked + self._num_found
        self._num_found += 1
        events += [
            CallStart(index, *self._call),
            CallArguments(index, "".join(self._arguments)),
            CallEnd(index),
        ]
        self._held = self._held[end:]
        self._reader = None
        self._has_called = True

    def _give_up(self, events: list[Event]) -> None:
        """What is held back is text, and so is all that follows it but calls with their markers."""
        if self._held:
            events.append(TextDelta(self._held))
        self._held = ""
        self._reader = None
        self._is_over = True
