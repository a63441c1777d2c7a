"""Beam search: what a caller may ask of it, and what it gives. Names and meanings follow vLLM's."""

from __future__ import annotations

import msgspec

from quire.types.errors import require
from quire.types.outputs import LogprobsAtPosition
from quire.types.request import FinishReason

MAX_BEAM_WIDTH = 1024  # each beam asks for twice as many log-probabilities, and is a request of its own
MAX_LENGTH_PENALTY = 16.0  # a context's length to this power is still a finite number


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of beam search."""

    beam_width: int
    """How many sequences are kept after each token, and returned."""
    max_tokens: int
    """The most tokens to generate."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    temperature: float = 0.0
    """No effect: sequences are ranked by the model's own log-probabilities."""
    length_penalty: float = 1.0
    """A sequence's score is its log-probability, divided by its length to this power."""
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token in the text of a completion."""

    def __post_init__(self) -> None:
        width, most, penalty = self.beam_width, self.max_tokens, self.length_penalty
        is_width = type(width) is int and 1 <= width <= MAX_BEAM_WIDTH
        require(is_width, "beam_width", width, f"an integer from 1 to {MAX_BEAM_WIDTH}")
        require(type(most) is int and most >= 1, "max_tokens", most, "an integer, 1 or more")
        is_penalty = isinstance(penalty, int | float) and abs(penalty) <= MAX_LENGTH_PENALTY
        allowed = f"a number from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        require(is_penalty, "length_penalty", penalty, allowed)


class BeamSearchSequence(msgspec.Struct, frozen=True):
    """One sequence: the prompt and what was found after it."""

    tokens: list[int]
    logprobs: list[LogprobsAtPosition] = []
    """For each token that was found, the candidates it was one of."""
    cum_logprob: float = 0.0
    text: str | None = None
    """Of the whole sequence, with the prompt; set for sequences that are returned."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct, frozen=True):
    """The best sequences for one prompt, the best first."""

    sequences: list[BeamSearchSequence]
