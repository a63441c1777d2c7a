"""The grammar that holds a model to a tool format and to the tools' schemas; knows formats, not who compiles it.

The result is llguidance's dialect of Lark. Where text is free, it is free until a call begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from quire.parsers.format import ChannelFormat, ReasoningFormat, Tool, ToolFormat
from quire.parsers.lark import ANY_TEXT, Lark, choice, many, optional, regex
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

ToolChoice = Literal["required", "named", "auto"]


def grammar_for(
    tool_format: str | None,
    tools: Sequence[Tool] = (),
    *,
    tool_choice: ToolChoice = "required",
    parallel: bool = True,
    reasoning_format: str | None = None,
    reasoning_open: bool = False,
    special_tokens: Mapping[str, int] | None = None,
    answer: str | None = None,
) -> str:
    """What the output may be.

    `required`: thinking, then one or more calls of these tools, and no text. `named`: the same with one call; give
    the one tool. `auto`: any text with calls in it; calls of strict tools obey their schemas, others get an object.
    `reasoning_open`: the prompt ends inside of thinking. `special_tokens` maps the tokenizer's to their ids.
    `answer` holds rules, one of them named `answer`: with `auto`, what the text may be where there is no call.
    RequestError if a schema cannot be held to in this format.
    """
    lark = Lark(special_tokens or {})
    layout = None if tool_format is None else TOOL_FORMATS.get(tool_format)
    held = [tool if tool.strict or tool_choice != "auto" else Tool(tool.name) for tool in tools]
    parallel = parallel and tool_choice != "named"
    reasoning = None if reasoning_format is None else REASONING_FORMATS.get(reasoning_format)
    channels = next((chosen for chosen in (layout, reasoning) if isinstance(chosen, ChannelFormat)), None)
    if channels is not None:
        text = ANY_TEXT if answer is None else "answer"
        return lark.text(_channels(lark, channels, held, tool_choice, text)) + (answer or "")
    thoughts = reasoning if isinstance(reasoning, ReasoningFormat) else None
    if tool_choice == "auto" and answer is not None:
        options = ["answer"]
        if isinstance(layout, ToolFormat) and held:
            begin, rest = _calls(lark, layout, held, parallel)
            options.append(f"{lark.literal(begin)} {rest}" if begin else rest)
        return lark.text(f"{_thinking(lark, thoughts, reasoning_open)} {choice(options)}") + answer
    assert isinstance(layout, ToolFormat), "without an answer to hold to there are tools"
    if tool_choice == "auto":
        return lark.text(_free(lark, layout, held, parallel, thoughts, reasoning_open))
    begin, rest = _calls(lark, layout, held, parallel)
    calls = _after(lark, begin, "", rest)
    return lark.text(f"{_thinking(lark, thoughts, reasoning_open)} {calls}")


def _thinking(lark: Lark, thoughts: ReasoningFormat | None, is_open: bool) -> str:
    """The rest of the thinking if it is open; or else a whole block, or none."""
    if thoughts is None:
        return ""
    rest = f"{lark.until([end.strip() for end in thoughts.end])} /[ \\n]{{0,2}}/"
    return rest if is_open else optional(f"{_begin_thinking(lark, thoughts)} {rest}")


def _begin_thinking(lark: Lark, thoughts: ReasoningFormat) -> str:
    return choice([lark.literal(begin.strip()) for begin in thoughts.begin])


def _calls(lark: Lark, layout: ToolFormat, tools: Sequence[Tool], parallel: bool) -> tuple[str, str]:
    """How calls begin, and the grammar of what follows."""
    call = lark.rule(choice([lark.rule(layout.codec.grammar(tool, lark)) for tool in tools]))
    begin = layout.begin[0] if layout.begin and not layout.bare else ""
    end = lark.literal(layout.end) if layout.end else ""
    call_end = lark.literal(layout.call_end) if layout.call_end else ""
    whole = f"{call} {call_end}"
    if layout.one_per_section:
        again = f"{lark.literal(layout.between + begin + layout.call_begin)} {whole} {end}"
        rest = f"{whole} {end} {many(again) if parallel else ''}"
    else:
        again = f"{lark.literal(layout.between + layout.call_begin)} {whole}"
        rest = f"{whole} {many(again) if parallel else ''} {end}"
    return begin + layout.opening + layout.call_begin, lark.rule(rest)


def _free(
    lark: Lark,
    layout: ToolFormat,
    tools: Sequence[Tool],
    parallel: bool,
    thoughts: ReasoningFormat | None,
    is_open: bool,
) -> str:
    begin, rest = _calls(lark, layout, tools, parallel)
    if layout.bare:
        return f"{_thinking(lark, thoughts, is_open)} {_bare(lark, layout, begin, rest)}"
    tags = _triggers(lark, layout, begin, rest)

    def any_of(text: str) -> str:
        return lark.rule(choice([f"{lark.until([mark], text)} {body}" for mark, body in tags]))

    repeat = many if parallel else optional
    body = f"{repeat(any_of(ANY_TEXT))} {lark.rule(ANY_TEXT)}"
    if thoughts is None or is_open:
        return f"{_thinking(lark, thoughts, is_open)} {body}"
    # Text that begins like thinking is thinking: there calls mean nothing.
    thinks = "|".join(re.escape(begin.strip()) for begin in thoughts.begin)
    like_thinking = regex(rf"[ \n]*(?:{thinks})(?s:.*)")
    head = lark.terminal(f"{ANY_TEXT} & ~{like_thinking}")
    again = body if parallel else lark.rule(ANY_TEXT)
    after = f"{_begin_thinking(lark, thoughts)} {lark.until([end.strip() for end in thoughts.end])} {body}"
    return choice([f"/[ \n]*/ {after}", head, f"{any_of(head)} {again}"])


def _triggers(lark: Lark, layout: ToolFormat, begin: str, rest: str) -> list[tuple[str, str]]:
    """The marks in running text from which on it must be calls, and what follows each."""
    found = []
    for spelling in layout.begin:
        mark = spelling.strip()
        if not lark.is_special(mark):
            mark = (spelling + layout.opening).strip()
        whole = spelling + begin.removeprefix(layout.begin[0])
        found.append((mark, _after(lark, whole, mark, rest)))
    if layout.call_begin:
        # Parsers understand calls outside of sections, too.
        mark = layout.call_begin.strip()
        found.append((mark, _after(lark, layout.call_begin, mark, rest)))
    return found


def _after(lark: Lark, whole: str, mark: str, rest: str) -> str:
    tail = whole[whole.index(mark) + len(mark) :]
    return f"{lark.literal(tail)} {rest}" if tail else rest


def _bare(lark: Lark, layout: ToolFormat, begin: str, rest: str) -> str:
    """Calls without a marker begin a line; so no other line may begin like one."""
    first = layout.opening.strip() or "{"
    line = f"(?:[ \\t]*(?:[^\\n \\t\\{first}][^\\n]*)?)"
    text = lark.terminal(regex(f"{line}(?:\\n{line})*"))
    call = _after(lark, begin, "", rest)
    before = lark.terminal(regex(f"(?:{line}\\n)*"))
    marked = [f"{text} {lark.literal(mark)} {call}" for mark in layout.begin if lark.is_special(mark)]
    return choice([text, f"{before} {call}", *marked])


def _channels(
    lark: Lark, layout: ChannelFormat, tools: Sequence[Tool], tool_choice: ToolChoice, text: str = ANY_TEXT
) -> str:
    """After `<|start|>assistant`: thinking and a preamble if it likes, then a call, or in the end an answer."""
    end, message = layout.ends[0], layout.message
    again = lark.literal(f"{layout.start}assistant")
    hidden = f"{lark.literal(layout.channel + layout.hidden_channel + message)} {lark.until([end])} {again}"
    preamble = f"{lark.literal(layout.channel + layout.call_channel + message)} {lark.until([end])} {again}"
    kind = f" {layout.constrain}json{message}"
    calls = []
    for tool in tools:
        to = f" to={layout.namespace}{tool.name}"
        heads = (
            f"{to}{layout.channel}{layout.call_channel}{kind}",
            f"{layout.channel}{layout.call_channel}{to}{kind}",
        )
        body = lark.schema({**tool.parameters, "type": "object"})
        calls.append(lark.rule(f"{choice([lark.literal(head) for head in heads])} {body}"))
    options = [f"{lark.rule(choice(calls))} {optional(lark.literal(layout.ends[-1]))}"] if calls else []
    if tool_choice == "auto":
        options.append(f"{lark.literal(layout.channel + layout.text_channel + message)} {text}")
    return f"{optional(hidden)} {optional(preamble)} {choice(options)}"
