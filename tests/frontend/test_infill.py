"""Fill-in-the-middle: each family's spelling, what ends the middle, and how the parts are tokenized."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from quire.frontend.infill import SPELLINGS, Marks
from quire.frontend.input_processor import InputProcessor
from quire.frontend.tokenizer import Tokenizer
from quire.types.errors import RequestError
from quire.types.messages import EngineInfo
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import byte_tokenizer
from tests.frontend.text_helpers import llama_tokenizer


def tokenizer_with(marks: Marks, backend: tokenizers.Tokenizer | None = None) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str((backend or byte_tokenizer().backend).to_str())
    tokens = (marks.prefix, marks.suffix, marks.middle, *marks.ends)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def fill_in(tokenizer: Tokenizer, prompt: dict[str, Any], params: SamplingParams | None = None) -> EngineRequest:
    info = EngineInfo(tokenizer.vocab_size, 512, 16, 64, 8)
    return InputProcessor(tokenizer, info).process(prompt, params).children[0]


@pytest.mark.parametrize("marks", SPELLINGS, ids=lambda marks: marks.prefix)
def test_every_spelling(marks: Marks) -> None:
    tokenizer = tokenizer_with(marks)
    to_id = tokenizer.backend.token_to_id
    request = fill_in(tokenizer, {"prompt": "def f(", "suffix": "): pass"})
    expected = [to_id(marks.prefix), *b"def f(", to_id(marks.suffix), *b"): pass", to_id(marks.middle)]
    assert request.token_ids == expected
    assert set(request.eos_token_ids) == {to_id("</s>"), *(to_id(end) for end in marks.ends)}


def test_an_empty_beginning_and_token_ids() -> None:
    tokenizer = tokenizer_with(SPELLINGS[0])
    begin, hole, end = (
        tokenizer.backend.token_to_id(token) for token in ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    )
    assert fill_in(tokenizer, {"prompt": "", "suffix": "x"}).token_ids == [begin, hole, ord("x"), end]
    ids = fill_in(tokenizer, {"prompt_token_ids": [65, 66], "suffix": "x"}).token_ids
    assert ids == [begin, 65, 66, hole, ord("x"), end]


def test_a_sentencepiece_suffix_has_no_space_of_its_own() -> None:
    marks = SPELLINGS[-1]
    tokenizer = tokenizer_with(marks, llama_tokenizer())
    ids = fill_in(tokenizer, {"prompt": "def", "suffix": "return x"}).token_ids
    hole = ids.index(tokenizer.backend.token_to_id(marks.suffix))
    assert ids[0] == tokenizer.bos_token_id
    assert ids[1] == tokenizer.backend.token_to_id(marks.prefix)
    after = [tokenizer.token_text(token) for token in ids[hole + 1 : -1]]
    assert "".join(after) == "return x"


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ({"prompt": "a", "suffix": 3}, None),
        ({"prompt": "a", "suffix": "b"}, SamplingParams(truncate_prompt_tokens=5)),
    ],
)
def test_what_cannot_be_filled_in_is_named(prompt: dict[str, Any], params: SamplingParams | None) -> None:
    with pytest.raises(RequestError, match=r"^suffix ") as info:
        fill_in(tokenizer_with(SPELLINGS[0]), prompt, params)
    assert info.value.field == "suffix"


def test_a_tokenizer_without_the_marks() -> None:
    with pytest.raises(RequestError, match="fill-in-the-middle") as info:
        fill_in(byte_tokenizer(), {"prompt": "a", "suffix": "b"})
    assert info.value.field == "suffix"
