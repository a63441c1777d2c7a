"""Beam search against all sequences there are, over a model that is a table."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from quire.frontend.beam_search import BeamSearch
from quire.frontend.input_processor import InputProcessor
from quire.types.beam_search import BeamSearchParams
from quire.types.errors import RequestError
from quire.types.messages import EngineInfo
from quire.types.outputs import Logprob, LogprobsAtPosition
from quire.types.sampling import SamplingParams

VOCAB, EOS, PROMPT = 4, 3, [0, 1]


class Table:
    """Log-probabilities of the next token, at random for each sequence."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, tokens: tuple[int, ...]) -> list[float]:
        rng = random.Random(repr((self._seed, tokens)))
        weights = [rng.random() + 0.01 for _ in range(VOCAB)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def candidates(self, tokens: list[int]) -> LogprobsAtPosition:
        row = self.row(tuple(tokens))
        order = sorted(range(VOCAB), key=lambda token: -row[token])
        return {token: Logprob(row[token], rank) for rank, token in enumerate(order, 1)}


def search_with(table: Table, params: BeamSearchParams) -> tuple[BeamSearch, int]:
    inputs = InputProcessor(None, EngineInfo(VOCAB, 64, 16, 64, 8), extra_eos_token_ids=(EOS,))
    request = inputs.process(PROMPT, SamplingParams(max_tokens=params.max_tokens))
    search, rounds = BeamSearch(params, request, VOCAB), 0
    while search.beams:
        search.extend([table.candidates(beam.tokens) for beam in search.beams])
        rounds += 1
    return search, rounds


def every_sequence(table: Table, length: int, ends: bool) -> list[tuple[list[int], float]]:
    found = []
    for count in range(1, length + 1):
        for tokens in itertools.product(range(VOCAB), repeat=count):
            ended = ends and tokens[-1] == EOS
            if (ends and EOS in tokens[:-1]) or (count < length and not ended):
                continue
            logprob = sum(table.row((*PROMPT, *tokens[:n]))[tokens[n]] for n in range(count))
            found.append(([*PROMPT, *tokens], logprob))
    return found


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all(penalty: float, ignore_eos: bool) -> None:
    for seed in range(4):
        table = Table(seed)
        params = BeamSearchParams(beam_width=300, max_tokens=4, length_penalty=penalty, ignore_eos=ignore_eos)
        search, _ = search_with(table, params)

        def score(item: tuple[list[int], float]) -> float:
            tokens, logprob = item
            return logprob / (len(tokens) - (tokens[-1] == EOS and not ignore_eos)) ** penalty

        expected = sorted(every_sequence(table, 4, not ignore_eos), key=score, reverse=True)
        best = search.best()
        assert [found.tokens for found in best[:20]] == [tokens for tokens, _ in expected[:20]]
        assert [found.cum_logprob for found in best[:20]] == pytest.approx([logprob for _, logprob in expected[:20]])
        for found in best:
            assert found.finish_reason == ("stop" if found.tokens[-1] == EOS and not ignore_eos else "length")
            assert len(found.logprobs) == len(found.tokens) - len(PROMPT)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_stopping_early_changes_no_result(penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=12, length_penalty=penalty)
    early = [search_with(Table(seed), params) for seed in range(20)]
    monkeypatch.setattr(BeamSearch, "_is_settled", lambda self: False)
    late = [search_with(Table(seed), params) for seed in range(20)]
    assert [search.best() for search, _ in early] == [search.best() for search, _ in late]
    assert sum(rounds for _, rounds in early) < sum(rounds for _, rounds in late)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 0},
        {"beam_width": 1.5},
        {"max_tokens": 0},
        {"length_penalty": math.inf},
        {"length_penalty": math.nan},
    ],
)
def test_what_cannot_be_searched_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **wrong})  # type: ignore[arg-type]
