"""Shapes of log-probabilities at their edges."""

from __future__ import annotations

import math

import msgspec

from quire.server.openai.logprobs import LogprobsFormatter, prompt_logprobs
from quire.types.outputs import Logprob
from tests.frontend.fake_client import TOKENIZER

POSITION = {66: Logprob(-math.inf, 9, "B"), 65: Logprob(-0.5, 1, "A"), 67: Logprob(-1.5, 2, "C")}


def test_minus_infinity_is_a_number_json_can_say() -> None:
    formatter = LogprobsFormatter(TOKENIZER, as_token_ids=False)
    chat = formatter.chat([POSITION], 2)
    completion, _ = formatter.completion([66], [POSITION], 0)
    prompt = prompt_logprobs([None, POSITION])
    for value in (chat, completion, prompt):
        assert b"null,null" not in msgspec.json.encode(value)
        assert b"-9999.0" in msgspec.json.encode(value)


def test_a_chosen_token_outside_the_top_is_not_among_them() -> None:
    formatter = LogprobsFormatter(TOKENIZER, as_token_ids=False)
    entry = formatter.chat([POSITION], 2).content[0]
    assert entry.token == "B"
    assert [top.token for top in entry.top_logprobs] == ["A", "C"]


def test_all_of_them_are_all_of_them() -> None:
    entry = LogprobsFormatter(TOKENIZER, as_token_ids=False).chat([POSITION], -1).content[0]
    assert [top.token for top in entry.top_logprobs] == ["A", "C", "B"]


def test_the_completion_shape_has_the_chosen_token_always() -> None:
    completion, offset = LogprobsFormatter(TOKENIZER, as_token_ids=False).completion([66], [POSITION], 5)
    assert completion.top_logprobs == [{"A": -0.5, "C": -1.5, "B": -9999.0}]
    assert list(completion.top_logprobs[0] or ()) == ["B", "A", "C"], "the chosen token comes first, as in vLLM"
    assert (completion.text_offset, offset) == ([5], 6)


def test_two_tokens_with_one_text_show_the_likelier() -> None:
    position = {0x80: Logprob(-1.0, 1, "\ufffd"), 0x81: Logprob(-2.0, 2, "\ufffd")}
    completion, _ = LogprobsFormatter(TOKENIZER, as_token_ids=False).completion([0x80], [position], 0)
    assert completion.top_logprobs == [{"\ufffd": -1.0}]
    by_id, _ = LogprobsFormatter(TOKENIZER, as_token_ids=True).completion([0x80], [position], 0)
    assert by_id.top_logprobs == [{"token_id:128": -1.0, "token_id:129": -2.0}]
