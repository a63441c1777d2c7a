"""Printing and measuring an answer."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from itertools import count

from quire.cli.stream import Answer, print_answer
from quire.types.outputs import CompletionOutput, RequestOutput
from quire.types.request import FinishReason

Stream = Generator[RequestOutput, None, None]


def outputs(*deltas: str, reason: FinishReason = "stop") -> Stream:
    for index, delta in enumerate(deltas):
        last = index == len(deltas) - 1
        completion = CompletionOutput(0, delta, [index], finish_reason=reason if last else None)
        yield RequestOutput("r", None, [], [completion], last)


def ticks(step: float = 0.5) -> Iterator[float]:
    return (tick * step for tick in count())


def test_each_delta_is_flushed_at_once() -> None:
    class Terminal(io.StringIO):
        seen: list[str]

        def flush(self) -> None:
            self.seen.append(self.getvalue())

    terminal = Terminal()
    terminal.seen = []
    print_answer(outputs("a", "b"), terminal)
    assert terminal.seen == ["a", "ab", "ab\n"]


def test_statistics() -> None:
    clock = ticks()
    answer = print_answer(outputs("a", "b", "c"), io.StringIO(), clock=lambda: next(clock))
    # The clock reads 0 at the start and 0.5 s more after each of three tokens.
    assert answer == Answer("abc", 3, "stop", seconds_to_first=0.5, seconds_total=1.5)
    assert answer.stats() == "3 tokens, 2.0 tok/s, first token after 0.50 s"


def test_statistics_of_short_and_cut_answers() -> None:
    clock = ticks()
    one = print_answer(outputs("a", reason="length"), io.StringIO(), clock=lambda: next(clock))
    assert one.stats() == "1 token, first token after 0.50 s, cut off at the length limit"
    assert print_answer(outputs(), io.StringIO()).stats() == "0 tokens"


def test_ctrl_c_keeps_what_was_printed_and_closes_the_stream() -> None:
    closed = []

    def interrupted() -> Stream:
        try:
            yield from outputs("a", "b", "c")
        finally:
            closed.append(True)

    class Impatient(io.StringIO):
        def flush(self) -> None:
            if self.getvalue() == "ab":
                raise KeyboardInterrupt

    out = Impatient()
    answer = print_answer(interrupted(), out)
    assert (answer.text, answer.interrupted, answer.finish_reason) == ("ab", True, None)
    assert out.getvalue() == "ab\n"
    assert closed == [True]
