"""GET /v1/models."""

from __future__ import annotations

from tests.frontend.fake_client import MAX_MODEL_LEN
from tests.server.helpers import MODEL, serving


async def test_every_name_is_listed_and_found() -> None:
    async with serving() as session:
        listed = (await session.get("/v1/models")).json()
        found = [(await session.get(f"/v1/models/{card['id']}")).json() for card in listed["data"]]
        missing = await session.get("/v1/models/gpt-4")
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == [MODEL, "alias/name"]
    assert found == listed["data"]
    assert {
        "object": "model",
        "owned_by": "quire",
        "max_model_len": MAX_MODEL_LEN,
        "tasks": ["generate"],
    }.items() <= found[0].items()
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_the_tag_of_ollamas_clients_may_follow_a_name() -> None:
    hello = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with serving() as session:
        card = await session.get(f"/v1/models/{MODEL}:latest")
        chat = await session.post("/v1/chat/completions", json={"model": "alias/name:latest", **hello})
        message = await session.post("/v1/messages", json={"model": f"{MODEL}:latest", **hello})
        missing = await session.post("/v1/chat/completions", json={"model": "gpt-4:latest", **hello})
    assert card.json()["id"] == MODEL
    assert (chat.status_code, chat.json()["model"]) == (200, "alias/name")
    assert (message.status_code, message.json()["model"]) == (200, MODEL)
    assert missing.status_code == 404
    assert "'gpt-4:latest'" in missing.json()["error"]["message"]
