"""Log-probabilities of named token ids are those of the whole distribution, whatever runs beside the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.types.sampling import SamplingParams
from quire.types.step import TokenLogprobs
from tests.e2e.tiny import Driver, make_engine, make_model

ASKED = (7, 150, 3, 198, 0)
PROMPT = [5, 9, 33, 100]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), model_type="llama")


def asked_of(entry: TokenLogprobs) -> dict[int, tuple[float, int]]:
    count = len(entry.asked_ranks)
    last = slice(len(entry.token_ids) - count, None)
    found = zip(entry.token_ids[last], entry.logprobs[last], entry.asked_ranks, strict=True)
    return {token: (logprob, rank) for token, logprob, rank in found}


def test_they_are_the_bits_of_the_whole_distribution_alone_and_in_a_batch(model: Path) -> None:
    shared = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    driver = Driver(make_engine(model, max_num_seqs=8, max_num_batched_tokens=16))
    driver.add("whole", PROMPT, SamplingParams(**shared, logprobs=-1))
    (whole,) = driver.finish().values()
    driver = Driver(driver.core)
    driver.add("alone", PROMPT, SamplingParams(**shared, logprob_token_ids=ASKED))
    driver.finish()
    driver.add("batched", PROMPT, SamplingParams(**shared, logprobs=2, logprob_token_ids=ASKED))
    driver.add("plain", PROMPT, SamplingParams(**shared, logprobs=2))
    for index in range(4):  # other ids, and a prompt that comes in chunks beside them
        ids = [index] * (index + 1)
        params = SamplingParams(max_tokens=9, seed=index, logprob_token_ids=ids)
        driver.add(str(index), [*range(3, 40 + index)], params)
    answers = driver.finish()
    assert answers["alone"].token_ids == answers["batched"].token_ids == whole.token_ids
    for entry, alone, batched in zip(
        whole.logprobs, answers["alone"].logprobs, answers["batched"].logprobs, strict=True
    ):
        ranked = dict(zip(entry.token_ids[1:], zip(entry.logprobs[1:], range(1, 999), strict=False), strict=True))
        assert asked_of(alone) == asked_of(batched) == {token: ranked[token] for token in ASKED}
        assert alone.token_ids == [entry.token_ids[0], *ASKED]
        assert batched.token_ids[:3] == [entry.token_ids[0], *entry.token_ids[1:3]]
    assert [entry.token_ids[:3] for entry in answers["batched"].logprobs] == [
        entry.token_ids for entry in answers["plain"].logprobs
    ]
    assert all(entry.asked_ranks == [] for entry in answers["plain"].logprobs)
    assert [len(asked_of(entry)) for entry in answers["3"].logprobs] == [1] * 9
