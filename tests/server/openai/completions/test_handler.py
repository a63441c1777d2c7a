"""Text completions over the fake engine: prompts of all kinds, echo, log-probabilities, several prompts at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.step import TokenLogprobs
from tests.frontend.fake_client import BOS, EOS, MAX_MODEL_LEN, FakeClient, Running
from tests.server.helpers import MODEL, events_of, serving

URL = "/v1/completions"


async def complete(client: FakeClient, _status: int = 200, **body: Any) -> Any:
    async with serving(client) as session:
        response = await session.post(URL, json={"prompt": "Say", **body})
    assert response.status_code == _status, response.text
    return events_of(response.text) if body.get("stream") and _status == 200 else response.json()


async def test_the_shape_of_an_answer() -> None:
    answer = await complete(FakeClient("Hi"), model="alias/name")
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "text_completion",
        "model": "alias/name",
        "choices": [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert (await complete(FakeClient("Hi")))["model"] == MODEL


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        ([97, 98], [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
async def test_prompts_of_all_kinds(prompt: Any, expected: list[bytes]) -> None:
    client = FakeClient()
    answer = await complete(client, prompt=prompt, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert [choice["text"].encode() for choice in answer["choices"]] == [text for text in expected for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == sum(2 * (len(text) + 1) for text in expected)


@pytest.mark.parametrize("prompt", [[], "", [[]], [""], [["a"]], [1, "a"], [1.5], None, 7, [[1], "a"], [300], [-1]])
async def test_prompts_of_no_kind(prompt: Any) -> None:
    answer = await complete(FakeClient(), 400, prompt=prompt)
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"].startswith("prompt")


async def test_echo_of_text_and_of_token_ids() -> None:
    assert (await complete(FakeClient("!"), echo=True))["choices"][0]["text"] == "Say!"
    assert (await complete(FakeClient("!"), echo=True, prompt=[BOS, 83]))["choices"][0]["text"] == "<s>S!"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, "ay"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "Sa"),
        ({"truncate_prompt_tokens": 3}, "Say"),
        ({"truncate_prompt_tokens": 9}, "Say"),
        ({"truncate_prompt_tokens": -1, "prompt": "x" * 9 + "y" * MAX_MODEL_LEN}, "y" * (MAX_MODEL_LEN - 1)),
    ],
)
async def test_echo_shows_what_was_kept_of_a_prompt(fields: dict[str, Any], kept: str) -> None:
    for stream in (False, True):
        answer = await complete(FakeClient("!"), echo=True, max_tokens=0, logprobs=0, stream=stream, **fields)
        choice = answer[0]["choices"][0] if stream else answer["choices"][0]
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == kept


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_any_token(stream: bool) -> None:
    answer = await complete(
        FakeClient("!"), echo=True, max_tokens=0, logprobs=1, stream=stream, return_token_ids=True
    )
    choice = answer[0]["choices"][0] if stream else answer["choices"][0]
    assert choice["text"] == "Say"
    assert choice["token_ids"] == []
    assert choice["prompt_token_ids"] == list(b"Say")
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "tokens": ["S", "a", "y"],
        "token_logprobs": [None, -2.0, -2.0],
        "top_logprobs": [None, {"b": -1.0, "a": -2.0}, {"z": -1.0, "y": -2.0}],
    }
    ending = answer[-1]["choices"][0] if stream else choice
    assert ending["finish_reason"] == "length"
    if not stream:
        assert answer["usage"]["completion_tokens"] == 0


async def test_echo_and_one_token_with_logprobs() -> None:
    answer = await complete(FakeClient("!"), echo=True, max_tokens=1, logprobs=0)
    assert answer["choices"][0]["logprobs"] == {
        "text_offset": [0, 1, 2, 3],
        "tokens": ["S", "a", "y", "!"],
        "token_logprobs": [None, -2.0, -2.0, -2.0],
        "top_logprobs": [None, {"a": -2.0}, {"y": -2.0}, {"!": -2.0}],
    }


async def test_every_choice_of_a_stream_echoes_logprobs() -> None:
    client = FakeClient("!", one_by_one=True)  # the second choice begins after the prompt's log-probabilities came
    chunks = await complete(client, echo=True, logprobs=0, n=2, stream=True)
    for index in range(2):
        parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
        assert [token for part in parts for token in part["tokens"]] == ["S", "a", "y", "!", "</s>"]
        assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_that_token_ids_imply_are_echoed(stream: bool) -> None:
    answer = await complete(FakeClient("!"), echo=True, max_tokens=1, logprob_token_ids=[97], stream=stream)
    choice = answer[0]["choices"][0] if stream else answer["choices"][0]
    assert choice["text"] == "Say!"
    assert choice["logprobs"]["tokens"] == ["S", "a", "y", "!"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"a": -2.0}, {"y": -2.0}, {"!": -2.0, "a": -97.0}]


async def test_no_tokens_without_echo() -> None:
    choice = (await complete(FakeClient("!"), max_tokens=0))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


async def test_prompt_logprobs() -> None:
    choice = (await complete(FakeClient("!"), prompt_logprobs=0))["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {"97": {"logprob": -2.0, "rank": 2, "decoded_token": "a"}}


async def test_defaults_and_clamping() -> None:
    client = FakeClient("x" * 100)
    async with serving(client) as session:
        for body in ({}, {"max_tokens": 10**9}, {"max_tokens": None}):
            await session.post(URL, json={"prompt": "Say", **body})
    assert [request.max_tokens for request in client.added] == [64, MAX_MODEL_LEN - 3, 64]


class RankedClient(FakeClient):
    """The completions of a prompt say other texts each, and a letter is the likelier the earlier in the alphabet."""

    def __init__(self, *texts: str) -> None:
        super().__init__(lambda request: list(texts[int(request.request_id.split("_")[0])].encode()))

    def _step(self, running: Running) -> EngineOutput:
        output = super()._step(running)
        if output.logprobs is not None:
            logprobs = [TokenLogprobs([token], [-float(token % 32)], 1) for token in output.token_ids]
            return msgspec.structs.replace(output, logprobs=logprobs)
        return output


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_best_of_returns_the_likeliest_per_token(logprobs: int | None) -> None:
    client = RankedClient("zz", "c", "ab", "aaaaaa", "d")
    answer = await complete(client, best_of=5, n=2, logprobs=logprobs)
    # By the sum, short texts would be the best.
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "aaaaaa"), (1, "ab")]
    assert answer["usage"]["completion_tokens"] == 3 + 2 + 3 + 7 + 2, "all that were made are counted"
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in answer["choices"])


async def test_best_of_over_several_prompts_numbers_choices_in_order() -> None:
    def say(request: EngineRequest) -> list[int]:
        return [*request.token_ids, ord("b") if request.request_id.startswith("1_") else ord("y")]

    client = RankedClient()
    client._answer = say
    answer = await complete(client, prompt=["p", "q"], best_of=2, n=1)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "pb"), (1, "qb")]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"best_of": 1}, 200),
        ({"best_of": 2, "n": 2}, 200),
        ({"best_of": 2, "n": 2, "stream": True}, 200),
        ({"best_of": 1, "n": 2}, 400),
        ({"best_of": 0}, 400),
        ({"best_of": -1}, 400),
        ({"best_of": 65}, 400),
        ({"best_of": 2, "stream": True}, 400),
    ],
)
async def test_which_best_of_there_can_be(fields: dict[str, Any], status: int) -> None:
    answer = await complete(FakeClient("x"), status, **fields)
    if status == 400:
        assert answer["error"]["param"] == "best_of"


async def test_a_model_without_the_tokens_fills_in_nothing() -> None:
    answer = await complete(FakeClient("x"), 400, suffix="end")
    assert answer["error"]["param"] == "suffix"
    assert "fill-in-the-middle" in answer["error"]["message"]
    assert (await complete(FakeClient("x"), suffix=""))["choices"][0]["text"] == "x"
    assert (await complete(FakeClient("x"), 400, suffix="end", echo=True))["error"]["param"] == "suffix"


async def test_what_is_named_and_not_there_is_null() -> None:
    choice = (await complete(FakeClient("A"), prompt_logprobs=None, return_token_ids=False))["choices"][0]
    assert (choice["prompt_logprobs"], choice["prompt_token_ids"], choice["token_ids"]) == (None, None, None)
    plain = (await complete(FakeClient("A")))["choices"][0]
    assert not {"prompt_logprobs", "prompt_token_ids", "token_ids"} & plain.keys()


prompts = st.one_of(
    st.text("abc", min_size=1, max_size=5),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(97, 99), min_size=1, max_size=5), min_size=1, max_size=3),
)


@settings(max_examples=40, deadline=None)
@given(
    prompt=prompts,
    n=st.integers(1, 3),
    echo=st.booleans(),
    logprobs=st.none() | st.integers(0, 2),
    max_tokens=st.integers(0, 6),
    stop=st.lists(st.text("abc", min_size=1, max_size=2), max_size=2),
    chunk=st.integers(1, 4),
    one_by_one=st.booleans(),
)
async def test_a_stream_says_what_a_body_says(prompt: Any, chunk: int, one_by_one: bool, **body: Any) -> None:
    body |= {"prompt": prompt, "return_token_ids": True}
    whole = await complete(FakeClient(chunk=chunk), **body)
    chunks = await complete(
        FakeClient(chunk=chunk, one_by_one=one_by_one), **body, stream=True, stream_options={"include_usage": True}
    )
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for part in chunks for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in parts) == choice["text"]
        assert [t for c in parts for t in c["token_ids"] or ()] == choice["token_ids"]
        assert [c["prompt_token_ids"] for c in parts] == [choice["prompt_token_ids"]] + [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is None:
            assert all(c["logprobs"] is None for c in parts)
            continue
        for name, values in choice["logprobs"].items():
            assert [v for c in parts if c["logprobs"] for v in c["logprobs"][name]] == values


async def test_one_failing_prompt_ends_the_request_and_aborts_the_others() -> None:
    client = FakeClient("x" * 400)
    answer = await complete(client, 400, prompt=["good", "y" * 600])
    assert answer["error"]["param"] == "prompt"
    assert client.aborted == [request.request_id for request in client.added]


async def test_special_tokens_of_the_prompt() -> None:
    client = FakeClient("x")
    await complete(client, prompt="</s>a", add_special_tokens=False)
    assert client.added[0].token_ids == [EOS, 97]
