"""The lower bound on a text's tokens is never more than its tokens, and seldom much less."""

from __future__ import annotations

import functools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from quire.frontend.token_bound import TokenBound
from tests.frontend.fake_client import byte_tokenizer
from tests.frontend.text_helpers import BYTE_LEVEL_KINDS, CORPUS, TEXTS, byte_level, llama_tokenizer

_UNITS = [
    "a ",
    "e\u0301",
    "=",
    "    ",
    "\n",
    "\u2581",
    "世界",
    "<|end|>",
    "<|end|>\u0338",
    " \t",
    "Grüße ",
    "12",
    "가",
]
SUSPECT_TEXTS = st.one_of(
    st.lists(TEXTS, min_size=1, max_size=12).map("".join),
    st.tuples(st.sampled_from(_UNITS), st.sampled_from(_UNITS), st.integers(1, 90)).map(
        lambda t: (t[0] + t[1]) * t[2]
    ),
    st.lists(st.sampled_from([*CORPUS[:4], *_UNITS]), max_size=12).map("".join),
)


@functools.cache
def backends() -> dict[str, tokenizers.Tokenizer]:
    made = {kind: byte_level(kind) for kind in BYTE_LEVEL_KINDS}
    made |= {"llama": llama_tokenizer(), "llama without prefix": llama_tokenizer(False)}
    made["bytes"] = byte_tokenizer().backend
    stripping = tokenizers.Tokenizer.from_str(byte_level("gpt-2").to_str())
    stripping.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    state = json.loads(byte_level("gpt-2").to_str())
    for char in "\u0104\u0106a":  # bytes 4 and 6 and a letter: what such a vocabulary does not have is left out
        del state["model"]["vocab"][char]
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "a" not in pair]
    return made | {"stripping": stripping, "incomplete": tokenizers.Tokenizer.from_str(json.dumps(state))}


@functools.cache
def bound_of(name: str) -> TokenBound:
    bound = TokenBound.of(backends()[name], piece=50)
    assert bound is not None
    return bound


@pytest.mark.parametrize(
    "name", [*BYTE_LEVEL_KINDS, "llama", "llama without prefix", "bytes", "stripping", "incomplete"]
)
@settings(max_examples=50)
@given(text=SUSPECT_TEXTS)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    if name == "stripping":
        text = text.replace("<|end|>", "  <mask> \u3000\u2003 ").replace("=", " " * 30)
    assert bound_of(name).at_least(text, 10**9) <= len(backends()[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", list(BYTE_LEVEL_KINDS))
def test_the_bound_is_near_the_truth(name: str) -> None:
    """Within a factor of four: so no text is tokenized that has many times the tokens that a context takes."""
    bound = TokenBound.of(backends()[name])
    assert bound is not None
    for text in ["".join(CORPUS) * 30, "a " * 10_000, "=" * 10_000, " \n" * 10_000, "世界" * 5_000]:
        tokens = len(backends()[name].encode(text, add_special_tokens=False).ids)
        assert bound.at_least(text, 10**9) > tokens / 4


def test_looks_no_further_than_needed() -> None:
    bound = bound_of("bytes")
    assert 100 < bound.at_least("x" * 10_000, 100) < 200


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("normalizer", normalizers.Lowercase()),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        (
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel()]),
        ),
        ("model", models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    ],
)
def test_there_is_none_where_tokens_do_not_spell_the_text(change: str, value: object) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level("gpt-2").to_str())
    setattr(backend, change, value)
    assert TokenBound.of(backend) is None
