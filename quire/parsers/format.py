"""What a tool format and a reasoning format are: data, from which parser, grammar and generator are made.

Markers are written as the model's own template writes them, with the white space around them. Parsers forgive
differences in white space; grammars and generators write it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from quire.parsers.codec import Codec

# A chat template that has all the strings of one of these tuples speaks the format.
Signs = tuple[tuple[str, ...], ...]
IdStyle = Literal["openai", "mistral", "kimi"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of the arguments
    strict: bool = False
    written: tuple[str, ...] = ()  # the keywords with which the caller wrote the schema, if it was changed since


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How calls are written: `begin` `opening` (`call_begin` CALL `call_end`) joined by `between`, `end`.

    `begin` to `end` is a section; a format whose calls stand alone has none. A `call_begin` is also understood
    where no section was begun, as models forget it, unless it is empty.
    """

    models: str  # whom it is for, for people
    signs: Signs = ()
    codec: Codec  # what stands between call_begin and call_end
    begin: tuple[str, ...] = ()  # spellings of the section's beginning; the first is the one to write
    opening: str = ""  # follows `begin`, as the bracket of a list does
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    between: str = ""
    one_per_section: bool = False  # each call is written in a section of its own
    bare: bool = False  # at the beginning of a line a section needs no `begin`; names of unknown tools are text then
    ignored: tuple[str, ...] = ()  # markers that may stand around calls and mean nothing
    special: bool = False  # some markers are special tokens: detokenize with skip_special_tokens=False
    id_style: IdStyle = "openai"  # what ids of calls must look like for the model's template

    @property
    def markers(self) -> tuple[str, ...]:
        around = (*self.begin, self.opening, self.end, self.call_begin, self.call_end, *self.ignored)
        return around + self.codec.markers


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """Thinking between `begin` and `end`. It is open from the start if the prompt ends inside such a block."""

    models: str
    signs: Signs = ()
    begin: tuple[str, ...]  # spellings; the first is the one to write
    end: tuple[str, ...]
    answer: tuple[str, ...] = ()  # what may wrap the reply that follows the thinking
    lead: str = ""  # what stands between the end of the thinking and the reply
    special: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.begin, *self.end, *self.answer)


@dataclass(frozen=True, kw_only=True)
class ChannelFormat:
    """Messages with headers, each for a channel and perhaps a recipient: tool and reasoning format in one."""

    models: str
    signs: Signs = ()
    start: str
    channel: str
    message: str
    constrain: str
    ends: tuple[str, ...]  # end of a message, of a turn, of a call
    hidden_channel: str  # what is thinking; every other channel without a recipient is text
    text_channel: str
    call_channel: str
    namespace: str  # what recipients begin with that are the caller's functions
    special: bool = True
    id_style: IdStyle = "openai"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.message, self.constrain, *self.ends)
