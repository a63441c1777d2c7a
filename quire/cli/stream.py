"""Prints an answer as it is generated, and measures it. Shared by `run` and `chat`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

from quire.cli.screen import Out
from quire.types.outputs import RequestOutput


@dataclass
class Answer:
    """What was printed so far."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    seconds_to_first: float | None = None  # time to the first token
    seconds_total: float = 0.0
    interrupted: bool = False

    def stats(self) -> str:
        """One line for people: tokens, speed after the first token, time to the first token."""
        parts = [f"{self.num_tokens} token{'s' if self.num_tokens != 1 else ''}"]
        if self.seconds_to_first is not None:
            decoding = self.seconds_total - self.seconds_to_first
            if self.num_tokens > 1 and decoding > 0:
                parts.append(f"{(self.num_tokens - 1) / decoding:.1f} tok/s")
            parts.append(f"first token after {self.seconds_to_first:.2f} s")
        if self.finish_reason == "length":
            parts.append("cut off at the length limit")
        return ", ".join(parts)


def print_answer(
    stream: Generator[RequestOutput, None, None], out: Out, clock: Callable[[], float] = time.perf_counter
) -> Answer:
    """Write the deltas of `stream` to `out`, and a final newline. Ctrl-C ends the answer where it is."""
    answer = Answer()
    begin = clock()
    try:
        with closing(stream):
            for output in stream:
                completion = output.outputs[0]
                answer.seconds_total = clock() - begin
                if completion.token_ids and answer.seconds_to_first is None:
                    answer.seconds_to_first = answer.seconds_total
                answer.num_tokens += len(completion.token_ids)
                answer.text += completion.text
                answer.finish_reason = completion.finish_reason
                out.write(completion.text)
                out.flush()
    except KeyboardInterrupt:
        answer.interrupted = True
    out.write("\n")
    out.flush()
    return answer
