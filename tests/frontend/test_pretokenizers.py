"""How text is cut before merging: nothing is lost, and each kind cuts where its published tokenizer does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from quire.frontend.pretokenizers import PRE_TOKENIZERS, pre_tokenizer_named
from quire.types.errors import TokenizerError


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@given(text=st.text(max_size=30))
@settings(max_examples=15)
def test_every_pre_tokenizer_keeps_all_text(name: str, text: str) -> None:
    pieces = [piece for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]
    assert decoders.ByteLevel().decode(pieces) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("default", "a1234", ["a", "123", "4"]),
        ("falcon", "a1234!", ["a", "123", "4", "!"]),
        ("smollm", "a12", ["a", "1", "2"]),
        ("llama-bpe", "I'LL 1234", ["I", "'LL", "Ġ", "123", "4"]),
        ("qwen2", "12", ["1", "2"]),
        ("ufakzeka", "I'LL", ["I", "'LL"]),
        ("tekken", "camelCase's", ["camel", "Case", "'s"]),
        ("gpt-4o", "camelCase's", ["camel", "Case's"]),
        ("deepseek-v3", "a1234 b", ["a", "123", "4", "Ġb"]),
        ("deepseek-coder", "a12\n\nb", ["a", "1", "2", "Ċ", "Ċ", "b"]),
        ("deepseek-llm", "\u03a9\u03a9 b\u4e2d!", ["Î©Î©", "Ġb", "ä\u00b8Ń", "!"]),
        ("seed-coder", "a!\n", ["a", "!", "Ċ"]),
        ("bloom", "a b.c", ["a", "Ġb", ".", "c"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("kimi-k2", "a\u4e2db", ["a", "ä\u00b8Ń", "b"]),
        ("qwen35", "ne\u0301 12", ["neÌģ", "Ġ", "1", "2"]),  # marks are parts of words
    ],
)
def test_what_sets_pre_tokenizers_apart(name: str, text: str, expected: list[str]) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)] == expected


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"'martian'.*known:.*deepseek-v3.*smollm"):
        pre_tokenizer_named("martian")


def test_normalization_and_whole_tokens_are_facts_of_the_kind() -> None:
    normalizer = pre_tokenizer_named("qwen2").normalizer()
    assert normalizer is not None
    assert normalizer.normalize_str("e\u0301") == "\u00e9"
    assert pre_tokenizer_named("gpt-2").normalizer() is None
    assert pre_tokenizer_named("qwen35").normalizer() is None  # unlike Qwen2's
    assert {name for name, rules in PRE_TOKENIZERS.items() if rules.add_bos} >= {"llama-bpe", "tekken"}
    assert pre_tokenizer_named("llama-bpe").ignore_merges
