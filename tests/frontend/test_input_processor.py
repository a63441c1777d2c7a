from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.input_processor import InputProcessor, child_seed
from quire.types.errors import RequestError
from quire.types.messages import EngineInfo
from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import EOS, MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE

INFO = EngineInfo(VOCAB_SIZE, MAX_MODEL_LEN, 16, 64, 8)
PROCESSOR = InputProcessor(TOKENIZER, INFO)
WITHOUT_TOKENIZER = InputProcessor(None, INFO)


def ids(prompt: Any, params: SamplingParams | None = None) -> list[int]:
    return PROCESSOR.process(prompt, params).prompt_token_ids


def test_every_kind_of_prompt_gives_the_same_tokens() -> None:
    expected = list(b"Hi!")
    assert ids("Hi!") == expected
    assert ids({"prompt": "Hi!"}) == expected
    assert ids({"prompt_token_ids": expected}) == expected
    assert ids(expected) == expected
    assert ids(tuple(expected)) == expected
    both = PROCESSOR.process({"prompt": "shown", "prompt_token_ids": expected})
    assert (both.prompt, both.prompt_token_ids) == ("shown", expected)


def test_the_caller_may_change_its_list_afterwards() -> None:
    given_ids = [1, 2, 3]
    request = PROCESSOR.process(given_ids)
    given_ids.append(4)
    assert request.prompt_token_ids == [1, 2, 3]


def test_what_the_engine_is_told() -> None:
    params = SamplingParams(seed=7, max_tokens=5)
    request = PROCESSOR.process({"prompt": "Hi", "cache_salt": "me"}, params, request_id="r", priority=3)
    (child,) = request.children
    assert (child.request_id, child.seed, child.max_tokens, child.priority) == ("r", 7, 5, 3)
    assert (child.eos_token_ids, child.cache_salt, child.params) == ((EOS,), "me", params)


def test_extra_end_tokens_are_added_once_and_only_if_the_model_has_them() -> None:
    processor = InputProcessor(TOKENIZER, INFO, extra_eos_token_ids=(EOS, 10, VOCAB_SIZE))
    assert processor.process("Hi").children[0].eos_token_ids == (EOS, 10)


def test_default_params_are_used_when_none_are_given() -> None:
    default = SamplingParams(temperature=0.25)
    assert InputProcessor(TOKENIZER, INFO, default).process("Hi").params is default


def test_another_engine_brings_its_own_limits() -> None:
    processor = InputProcessor(TOKENIZER, INFO)
    processor.set_info(EngineInfo(VOCAB_SIZE, 8, 16, 64, 8))
    assert len(processor.process([1] * 7).prompt_token_ids) == 7
    with pytest.raises(RequestError, match="8"):
        processor.process([1] * 8)
    kept = processor.process([1] * 20, SamplingParams(truncate_prompt_tokens=-1))
    assert len(kept.prompt_token_ids) == 7
    processor.set_info(INFO)
    assert len(processor.process([1] * 8).prompt_token_ids) == 8


def test_no_text_reaches_the_engine() -> None:
    params = SamplingParams(stop=["END"], bad_words=["bad"])
    request = PROCESSOR.process("Hi", params)
    sent = request.children[0].params
    assert isinstance(sent, SamplingParams)
    assert (sent.stop, sent.bad_words) == ((), ())
    assert request.params is params


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    def banned(words: list[str]) -> Any:
        return PROCESSOR.process("Hi", SamplingParams(bad_words=words)).children[0].params.bad_words_token_ids

    # A byte tokenizer writes " bad" as a space and "bad": the second ban is part of the first.
    assert banned(["bad"]) == (tuple(b"bad"),)
    assert banned([" bad", "bad", "worse"]) == (tuple(b"bad"), tuple(b"worse"))

    class SpacedTokenizer:
        eos_token_ids = ()

        def encode(self, text: str, add_special_tokens: bool = True, **options: object) -> list[int]:
            return {"bad": [1, 2], " bad": [3], "Hi": [9]}[text]

    processor = InputProcessor(SpacedTokenizer(), INFO)  # type: ignore[arg-type]  # all that is needed of one
    params = processor.process("Hi", SamplingParams(bad_words=["bad"])).children[0].params
    assert isinstance(params, SamplingParams)
    assert params.bad_words_token_ids == ((1, 2), (3,))


@given(st.integers(1, MAX_MODEL_LEN - 1), st.none() | st.integers(1, 2 * MAX_MODEL_LEN))
def test_max_tokens_never_exceeds_the_context(num_tokens: int, max_tokens: int | None) -> None:
    child = PROCESSOR.process([5] * num_tokens, SamplingParams(max_tokens=max_tokens)).children[0]
    room = MAX_MODEL_LEN - num_tokens
    assert child.max_tokens == (room if max_tokens is None else min(room, max_tokens))
    assert child.max_tokens >= 1


def test_truncation_keeps_the_end_or_the_beginning() -> None:
    assert ids("abcdef", SamplingParams(truncate_prompt_tokens=2)) == list(b"ef")
    assert ids("ab", SamplingParams(truncate_prompt_tokens=5)) == list(b"ab")
    assert ids("abcdef", SamplingParams(truncate_prompt_tokens=2, truncation_side="right")) == list(b"ab")
    assert ids("ab", SamplingParams(truncate_prompt_tokens=5, truncation_side="right")) == list(b"ab")
    long = list(range(250)) * 4
    assert ids(long, SamplingParams(truncate_prompt_tokens=-1)) == long[-(MAX_MODEL_LEN - 1) :]
    right = SamplingParams(truncate_prompt_tokens=-1, truncation_side="right")
    assert ids(long, right) == long[: MAX_MODEL_LEN - 1]


def test_n_fans_out_into_children() -> None:
    params = SamplingParams(n=3, seed=11, prompt_logprobs=2, stop="x")
    request = PROCESSOR.process("Hi", params, request_id="r")
    assert [child.request_id for child in request.children] == ["0_r", "1_r", "2_r"]
    assert [child.seed for child in request.children] == [11, child_seed(11, 1), child_seed(11, 2)]
    assert all(isinstance(c.params, SamplingParams) and c.params.n == 1 for c in request.children)
    # The prompt is the same for all: one of them is asked about it.
    assert [c.params.prompt_logprobs for c in request.children if isinstance(c.params, SamplingParams)] == [
        2,
        None,
        None,
    ]


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_child_seeds_are_distinct_64_bit_numbers(seed: int) -> None:
    seeds = [child_seed(seed, index) for index in range(64)]
    assert seeds[0] == seed % (1 << 64)
    assert len(set(seeds)) == 64
    assert all(0 <= value < 1 << 64 for value in seeds)


def test_child_seeds_do_not_change_between_versions() -> None:
    # The first outputs of the reference SplitMix64 for the seed 1234567.
    assert [child_seed(1234567, i) for i in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_without_a_seed_requests_differ() -> None:
    seeds = {PROCESSOR.process("Hi").children[0].seed for _ in range(8)}
    assert len(seeds) == 8
    assert len({PROCESSOR.process("Hi").request_id for _ in range(8)}) == 8


LONG = [1] * MAX_MODEL_LEN

REFUSALS: list[tuple[Any, dict[str, Any], str, list[str]]] = [
    ("", {}, "prompt", ["empty"]),
    ([], {}, "prompt", ["empty"]),
    ({"prompt_token_ids": []}, {}, "prompt", ["empty"]),
    ({}, {}, "prompt", ["prompt_token_ids"]),
    ({"promt": "Hi"}, {}, "prompt", ["promt", "prompt_token_ids"]),
    ({"prompt": 5}, {}, "prompt", ["5", "text"]),
    ({"prompt": "Hi", "cache_salt": ""}, {}, "cache_salt", ["cache_salt"]),
    (5, {}, "prompt", ["int"]),
    (None, {}, "prompt", ["NoneType"]),
    (b"Hi", {}, "prompt", ["bytes"]),
    ({"prompt_token_ids": "Hi"}, {}, "prompt_token_ids", ["Hi"]),
    ([1, "x"], {}, "prompt_token_ids", ["'x'", "str"]),
    ([1, True], {}, "prompt_token_ids", ["True", "bool"]),
    ([1, 1.0], {}, "prompt_token_ids", ["1.0", "float"]),
    ([1, VOCAB_SIZE], {}, "prompt_token_ids", [str(VOCAB_SIZE), str(VOCAB_SIZE - 1)]),
    ([-1], {}, "prompt_token_ids", ["-1", str(VOCAB_SIZE)]),
    ("\ud800", {}, "prompt", ["ud800"]),
    (LONG, {}, "prompt", [str(len(LONG)), str(MAX_MODEL_LEN), "truncate_prompt_tokens", "max_model_len"]),
    ("Hi", {"stop_token_ids": [999]}, "stop_token_ids", ["999", str(VOCAB_SIZE)]),
    ("Hi", {"allowed_token_ids": [-2]}, "allowed_token_ids", ["-2", str(VOCAB_SIZE)]),
    ("Hi", {"logit_bias": {700: 1.0}}, "logit_bias", ["700", str(VOCAB_SIZE)]),
    ("Hi", {"bad_words_token_ids": ((700,),)}, "bad_words_token_ids", ["700"]),
    ("Hi", {"logprobs": VOCAB_SIZE + 1}, "logprobs", [str(VOCAB_SIZE + 1), str(VOCAB_SIZE)]),
    ("Hi", {"prompt_logprobs": VOCAB_SIZE + 1}, "prompt_logprobs", [str(VOCAB_SIZE + 1), str(VOCAB_SIZE)]),
]


@pytest.mark.parametrize(("prompt", "params", "field", "named"), REFUSALS)
def test_a_bad_request_is_refused_with_the_value_and_the_fix(
    prompt: Any, params: dict[str, Any], field: str, named: list[str]
) -> None:
    with pytest.raises(RequestError) as refused:
        PROCESSOR.process(prompt, SamplingParams(**params))
    assert refused.value.field == field
    for value in named:
        assert value in str(refused.value)


@pytest.mark.parametrize("request_id", ["", 5])
def test_a_request_id_is_text(request_id: Any) -> None:
    with pytest.raises(RequestError, match="request_id"):
        PROCESSOR.process("Hi", request_id=request_id)


def test_without_a_tokenizer_only_token_ids_work() -> None:
    assert WITHOUT_TOKENIZER.process([1, 2]).prompt_token_ids == [1, 2]
    with pytest.raises(RequestError, match="prompt_token_ids"):
        WITHOUT_TOKENIZER.process("Hi")
    for params in (SamplingParams(stop="x"), SamplingParams(bad_words=["x"])):
        with pytest.raises(RequestError, match="tokenizer"):
            WITHOUT_TOKENIZER.process([1, 2], params)


def test_a_long_wrong_value_is_not_repeated_in_full() -> None:
    with pytest.raises(RequestError) as refused:
        PROCESSOR.process({"prompt": ["x"] * 10_000})
    assert len(str(refused.value)) < 200
