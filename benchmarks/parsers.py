"""What parsing costs per token and stream: text, thinking, and calls of every format, in pieces of a token each.

    python benchmarks/parsers.py [--tokens 20000]

The mean over all formats and kinds of output is what has a limit: 5 microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from report import environment, write_results

from quire.parsers.format import ReasoningFormat, Tool
from quire.parsers.generate import Turn, render_turn
from quire.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from quire.parsers.stream import make_parser

CHARACTERS_PER_TOKEN = 4  # of English text, about
REPEATS = 7
LIMIT_US = 5.0
WORDS = "The quick brown fox, it seems, jumps over 3 lazy dogs; then <b>it</b> rests, and x < y holds.\n"
HARMONY_PROMPT = "<|start|>assistant"
TOOLS = [
    Tool(
        "write_file",
        {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
    )
]


def tokens_of(text: str) -> list[str]:
    return [text[at : at + CHARACTERS_PER_TOKEN] for at in range(0, len(text), CHARACTERS_PER_TOKEN)]


def microseconds_per_token(tool: str | None, reasoning: str | None, prompt: str, output: str) -> float:
    """The best of some runs, on this thread's CPU time: what else the machine does is not the parser's cost."""
    pieces = tokens_of(output)
    return min(_run(tool, reasoning, prompt, pieces) for _ in range(REPEATS)) / len(pieces) * 1e6


def _run(tool: str | None, reasoning: str | None, prompt: str, pieces: Sequence[str]) -> float:
    parser = make_parser(tool, reasoning, prompt_text=prompt, tools=TOOLS)
    begin = time.thread_time()
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    return time.thread_time() - begin


def measure(num_tokens: int) -> dict[str, dict[str, float]]:
    text = (WORDS * (num_tokens * CHARACTERS_PER_TOKEN // len(WORDS) + 1)).strip()
    table: dict[str, dict[str, float]] = {}
    for tool in TOOL_FORMATS:
        reasoning = "harmony" if tool == "harmony" else "qwen3"
        prompt = HARMONY_PROMPT if tool == "harmony" else ""
        call = Turn(calls=[("write_file", {"path": "a.txt", "content": text})])
        table[tool] = {
            "text": microseconds_per_token(tool, reasoning, prompt, render_turn(Turn(text), tool, reasoning)),
            "arguments": microseconds_per_token(tool, reasoning, prompt, render_turn(call, tool, reasoning)),
        }
    for reasoning in REASONING_FORMATS:
        layout = REASONING_FORMATS.get(reasoning)
        tool_format = "harmony" if reasoning == "harmony" else None
        prompt = layout.begin[0] if isinstance(layout, ReasoningFormat) else HARMONY_PROMPT
        is_open = isinstance(layout, ReasoningFormat)
        thinking = render_turn(Turn(reasoning=text), tool_format, reasoning, reasoning_open=is_open)
        table.setdefault(f"{reasoning} (reasoning)", {})["thinking"] = microseconds_per_token(
            tool_format, reasoning, prompt, thinking
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the parsers.")
    parser.add_argument("--tokens", type=int, default=20_000, help="length of each output")
    arguments = parser.parse_args()
    table = measure(arguments.tokens)
    print(f"{'format':24} {'text':>8} {'arguments':>10} {'thinking':>9}   microseconds per token")
    for name, row in table.items():
        cells = [f"{row[kind]:.2f}" if kind in row else "" for kind in ("text", "arguments", "thinking")]
        print(f"{name:24} {cells[0]:>8} {cells[1]:>10} {cells[2]:>9}")
    means = {
        kind: statistics.mean([row[kind] for row in table.values() if kind in row])
        for kind in ("text", "arguments", "thinking")
    }
    means["all"] = statistics.mean([cost for row in table.values() for cost in row.values()])
    print("means: " + ", ".join(f"{kind} {mean:.2f}" for kind, mean in means.items()) + f"; limit {LIMIT_US}")
    results = {"limit_us": LIMIT_US, "mean_us": means, "us_per_token": table}
    print(f"written to {write_results('parsers', environment('quire'), results)}")


if __name__ == "__main__":
    main()
