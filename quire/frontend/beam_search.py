"""Beam search, made of ordinary requests for one token each with its candidates' log-probabilities.

The search itself knows no engine: it says which sequences it wants to see extended and takes the candidates. What the
beams share is in the prefix cache, so a round computes little more than one token of each beam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import Any, NamedTuple

from msgspec.structs import replace

from quire.frontend.input_processor import PreparedRequest
from quire.frontend.tokenizer import Tokenizer
from quire.types.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from quire.types.outputs import LogprobsAtPosition, RequestOutput
from quire.types.sampling import SamplingParams


class _Candidate(NamedTuple):
    """A beam and a token that may follow it."""

    cum_logprob: float
    token: int
    beam: BeamSearchSequence
    position: LogprobsAtPosition

    def sequence(self) -> BeamSearchSequence:
        beam = self.beam
        return BeamSearchSequence([*beam.tokens, self.token], [*beam.logprobs, self.position], self.cum_logprob)


class BeamSearch:
    """The search for one prompt: extend `beams` until there are none, then take the `best`."""

    def __init__(self, params: BeamSearchParams, request: PreparedRequest, vocab_size: int) -> None:
        """`request` is the prompt as it was checked, with the tokens that end an output and the room for one.

        Candidates have as many log-probabilities as it asks for, if these are more than the search needs.
        """
        child = request.children[0]
        self._width, self._penalty = params.beam_width, params.length_penalty
        self._eos = frozenset(() if params.ignore_eos else child.eos_token_ids)
        self._cache_salt = child.cache_salt
        self._num_left = min(params.max_tokens, child.max_tokens)
        # Twice as many candidates as beams: if half of them end, there is a beam left for each.
        self._num_candidates = min(2 * params.beam_width, vocab_size)
        shown = request.params.logprobs or 0
        self._num_logprobs = vocab_size if shown < 0 else max(shown, self._num_candidates)
        self.beams = [BeamSearchSequence(child.token_ids)]
        self._completed: list[BeamSearchSequence] = []

    @property
    def step_params(self) -> SamplingParams:
        """What to ask of each beam: its next token's candidates."""
        return SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=self._num_logprobs, ignore_eos=True, output_kind="final_only"
        )

    def prompts(self) -> list[dict[str, Any]]:
        """The beams as prompts."""
        salt: Mapping[str, Any] = {} if self._cache_salt is None else {"cache_salt": self._cache_salt}
        return [{"prompt_token_ids": beam.tokens, **salt} for beam in self.beams]

    def extend(self, candidates: Iterable[LogprobsAtPosition]) -> None:
        """Take in the candidates for the next token of each beam."""
        found: list[_Candidate] = []
        for beam, position in zip(self.beams, candidates, strict=True):
            # The top candidates come first; there are more if the caller wants to see more.
            for token, candidate in islice(position.items(), self._num_candidates):
                longer = _Candidate(beam.cum_logprob + candidate.logprob, token, beam, position)
                if token in self._eos:
                    self._completed.append(replace(longer.sequence(), finish_reason="stop", stop_reason=token))
                else:
                    found.append(longer)
        self._completed = nlargest(self._width, self._completed, key=self._score)
        self._num_left -= 1
        # They are of one length, so the length penalty does not change their order.
        self.beams = [kept.sequence() for kept in nlargest(self._width, found, key=lambda item: item.cum_logprob)]
        if self._num_left == 0:
            self._completed += [replace(beam, finish_reason="length") for beam in self.beams]
            self.beams = []
        elif self._is_settled():
            self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """The sequences with the highest scores, the best first."""
        return nlargest(self._width, self._completed, key=self._score)

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """The same with their texts, where there is a tokenizer."""
        if tokenizer is None:
            return BeamSearchOutput(self.best())
        return BeamSearchOutput([replace(found, text=tokenizer.decode(found.tokens)) for found in self.best()])

    def _score(self, sequence: BeamSearchSequence) -> float:
        """As in vLLM, the prompt counts as part of the length, and the token that ends the sequence does not."""
        length = len(sequence.tokens) - (sequence.finish_reason == "stop")
        return self._scored(sequence.cum_logprob, max(1, length))

    def _is_settled(self) -> bool:
        """Whether no beam can become better than the sequences that are complete: log-probabilities only fall."""
        if not self.beams or len(self._completed) < self._width:
            return False
        length = len(self.beams[0].tokens) + (self._num_left if self._penalty > 0 else 0)
        highest = max(beam.cum_logprob for beam in self.beams)
        return self._score(self._completed[-1]) >= self._scored(highest, length)

    def _scored(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._penalty)


def candidates_of(output: RequestOutput) -> LogprobsAtPosition:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "step_params ask for them"
    return logprobs[0]


def run_searches(searches: Sequence[BeamSearch], generate: Callable[[list[Any], Any], list[RequestOutput]]) -> None:
    """Extend all beams, token by token, until no search has one left."""
    while going := [search for search in searches if search.beams]:
        beams = [prompt for search in going for prompt in search.prompts()]
        outputs = iter(generate(beams, going[0].step_params))
        for search in going:
            search.extend([candidates_of(next(outputs)) for _ in search.beams])
