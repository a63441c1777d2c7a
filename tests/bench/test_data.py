"""Prompts have exactly the length that was asked for, and come out the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.bench.data import Sample, load_named_tokenizer, load_samples
from quire.bench.options import DataOptions
from quire.frontend.tokenizer import Tokenizer
from quire.types.errors import TokenizerError
from tests.bench.helpers import prefix_space_tokenizer, word_tokenizer
from tests.frontend.fake_client import TOKENIZER as BYTES

TOKENIZERS = {
    "plain": word_tokenizer(),
    "with a first token": word_tokenizer(bos=True),
    "with a space before the text": prefix_space_tokenizer(),
}


def length(sample: Sample, tokenizer: Tokenizer) -> int:
    if sample.token_ids is not None:
        return len(sample.token_ids)
    assert sample.text is not None
    return len(tokenizer.encode(sample.text))


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.sampled_from(["random", "shared-prefix"]),
    st.booleans(),
    st.integers(8, 60),
    st.sampled_from([0.0, 0.4]),
    st.integers(0, 1000),
)
def test_lengths_are_exact_and_seeds_reproducible(
    name: str, dataset: str, token_ids: bool, input_len: int, ratio: float, seed: int
) -> None:
    options = DataOptions(
        dataset_name=dataset,  # type: ignore[arg-type]  # drawn from the names above
        num_prompts=6,
        input_len=input_len,
        output_len=7,
        range_ratio=ratio,
        prefix_len=3,
        token_ids=token_ids,
        seed=seed,
    )
    samples = load_samples(options, tokenizer=TOKENIZERS[name])
    assert samples == load_samples(options, tokenizer=TOKENIZERS[name])
    assert len(samples) == 6
    for sample in samples:
        assert (sample.text is None) is token_ids
        assert length(sample, TOKENIZERS[name]) == sample.prompt_len
        assert sample.prompt_len is not None
        assert abs(sample.prompt_len - input_len) <= ratio * input_len + 1
        assert abs(sample.output_len - 7) <= ratio * 7 + 1
        if not ratio:
            assert (sample.prompt_len, sample.output_len) == (input_len, 7)


def test_seeds_make_different_prompts() -> None:
    first, second = (
        load_samples(DataOptions(num_prompts=3, seed=seed), tokenizer=word_tokenizer()) for seed in (0, 1)
    )
    assert len({sample.text for sample in first + second}) == 6


def test_without_special_tokens_the_first_token_is_not_counted() -> None:
    options = DataOptions(num_prompts=1, input_len=10)
    tokenizer = word_tokenizer(bos=True)
    (sample,) = load_samples(options, tokenizer=tokenizer, add_special_tokens=False)
    assert sample.text is not None
    assert len(tokenizer.encode(sample.text, add_special_tokens=False)) == 10


@pytest.mark.parametrize("token_ids", [True, False])
def test_prefixes_are_shared_by_turns_and_the_rest_is_not(token_ids: bool) -> None:
    options = DataOptions(
        dataset_name="shared-prefix",
        num_prompts=9,
        num_prefixes=3,
        prefix_len=12,
        input_len=20,
        token_ids=token_ids,
    )
    tokenizer = word_tokenizer()
    samples = load_samples(options, tokenizer=tokenizer)
    ids = [list(sample.token_ids or tokenizer.encode(sample.text or "")) for sample in samples]
    assert len({tuple(prompt[:12]) for prompt in ids}) == 3
    assert ids[0][:12] == ids[3][:12] == ids[6][:12]
    assert len({tuple(prompt[12:]) for prompt in ids}) == 9


def test_token_ids_are_never_special() -> None:
    samples = load_samples(DataOptions(num_prompts=20, token_ids=True), tokenizer=BYTES)
    assert {token for sample in samples for token in sample.token_ids or ()} <= set(range(256))


def test_a_vocabulary_without_words_says_what_to_do() -> None:
    with pytest.raises(TokenizerError, match="--token-ids"):
        load_samples(DataOptions(), tokenizer=BYTES)


def test_the_default_model_counts_exactly() -> None:
    options = DataOptions(num_prompts=4, input_len=100, range_ratio=0.5)
    tokenizer = load_named_tokenizer(options.tokenizer)
    for sample in load_samples(options):
        assert length(sample, tokenizer) == sample.prompt_len


def test_a_file_is_taken_in_order_and_repeated_when_it_is_too_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "output_len": 9}\n')
    options = DataOptions(dataset_name="jsonl", dataset_path=path, output_len=5)
    assert [sample.text for sample in load_samples(options)] == ["a", "b"]
    assert [sample.output_len for sample in load_samples(options, extra=1)] == [5, 9, 5]
    assert not caplog.records
    longer = DataOptions(dataset_name="jsonl", dataset_path=path, num_prompts=3)
    assert [sample.text for sample in load_samples(longer)] == ["a", "b", "a"]
    assert "they repeat" in caplog.text


def test_sharegpt_is_shuffled_by_the_seed_and_measured(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    turns = [
        {
            "conversations": [
                {"from": "human", "value": " alpha" * (4 + n)},
                {"from": "gpt", "value": " golf" * (5 + n)},
            ]
        }
        for n in range(8)
    ]
    path.write_text(json.dumps(turns))

    def lengths(seed: int) -> list[tuple[int | None, int]]:
        options = DataOptions(dataset_name="sharegpt", dataset_path=path, seed=seed)
        samples = load_samples(options, tokenizer=word_tokenizer())
        return [(sample.prompt_len, sample.output_len) for sample in samples]

    assert sorted(lengths(1), key=str) == sorted([(4 + n, 5 + n) for n in range(8)], key=str)
    assert lengths(1) == lengths(1) != lengths(2)
