"""Routes that other servers have: the 404 says what this one cannot do."""

from __future__ import annotations

import pytest

from quire.server.missing import MISSING, missing_capability
from tests.server.helpers import serving


async def test_a_recording_is_refused_by_name() -> None:
    async with serving() as session:
        recording = {"file": ("a.wav", b"RIFF" + bytes(100_000), "audio/wav")}
        answer = await session.post("/v1/audio/transcriptions", files=recording, data={"model": "whisper-1"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "this server does not have /v1/audio/transcriptions: it neither hears nor speaks"
    )


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/batches/msgbatch_1/results"])
async def test_batches_are_refused_in_anthropics_words(path: str) -> None:
    async with serving() as session:
        answers = [await session.get(path), await session.post(path, json={"requests": []})]
    for answer in answers:
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"
        assert "batches" in answer.json()["error"]["message"]


async def test_no_route_is_called_missing() -> None:
    async with serving() as session:
        paths = (await session.get("/openapi.json")).json()["paths"]
    assert [path for path in paths if missing_capability(path) is not None] == []


def test_only_whole_segments_count() -> None:
    assert missing_capability("/v1/audio") is not None
    assert missing_capability("/v1/audiox") is None
    assert all(missing_capability(f"{path}/x") == text for path, text in MISSING.items())
