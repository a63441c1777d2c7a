"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.fake_client import BOS, CHAT_TEMPLATE, EOS, MAX_MODEL_LEN, VOCAB_SIZE
from tests.server.helpers import MODEL, serving

HELLO = [{"role": "user", "content": "Hi"}]


async def post(path: str, **body: Any) -> Any:
    async with serving() as session:
        return await session.post(path, json=body)


async def test_text() -> None:
    answer = await post("/tokenize", prompt="Hi</s>", model=MODEL, return_token_strs=True)
    assert answer.json() == {
        "count": 3,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [72, 105, EOS],
        "token_strs": ["H", "i", "</s>"],
    }
    assert (await post("/tokenize", prompt="")).json()["tokens"] == []
    assert (await post("/tokenize", prompt="x" * 30_000)).json()["count"] == 30_000


async def test_a_conversation() -> None:
    answer = await post("/tokenize", messages=HELLO)
    assert bytes(answer.json()["tokens"]) == b"[user]Hi\n[assistant]"
    plain = await post("/tokenize", messages=HELLO, add_generation_prompt=False)
    assert bytes(plain.json()["tokens"]) == b"[user]Hi\n"


async def test_there_and_back() -> None:
    assert (await post("/detokenize", tokens=[BOS, *"Grüße".encode()])).json() == {"prompt": "<s>Grüße"}
    assert (await post("/detokenize", tokens=[])).json() == {"prompt": ""}
    unknown = await post("/detokenize", tokens=[65, 99_999])
    assert unknown.status_code == 400
    assert unknown.json()["error"]["param"] == "tokens"
    assert "tokens[1] is 99999" in unknown.json()["error"]["message"]


async def test_the_tokenizer_tells_what_it_is() -> None:
    async with serving() as session:
        info = (await session.get("/tokenizer_info")).json()
    assert info == {
        "tokenizer_class": "BPE",
        "vocab_size": VOCAB_SIZE,
        "model_max_length": MAX_MODEL_LEN,
        "eos_token_ids": [EOS],
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 3}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [1 << 31]}, 400),
    ],
)
async def test_refusals(path: str, body: dict[str, Any], status: int) -> None:
    assert (await post(path, **body)).status_code == status


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"prompt": "a " * 1_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a " * 1_000_000}]}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a " * 1_000_000}]}, None),
    ],
)
async def test_no_text_is_tokenized_that_no_model_takes(
    path: str, body: dict[str, object], field: str | None
) -> None:
    async with serving() as session:
        response = await session.post(path, json=body)
    assert response.status_code == 400
    assert "more than 1048576 tokens" in response.json()["error"]["message"]
    assert response.json()["error"].get("param") == field
