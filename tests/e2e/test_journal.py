"""A server that is killed and started again with its journal, with real processes and sockets on a tiny model."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import Running, start
from tests.e2e.tiny import make_model
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.engine.processes import LIMIT, Watch

URL, CHAT = "/v1/responses", "/v1/chat/completions"
KEY = {"idempotency-key": "once"}
TELL = [{"role": "user", "content": "Tell me"}]
STREAMED = {"stream": True, "messages": TELL, "max_tokens": 1500, "ignore_eos": True, "seed": 5, "temperature": 1.0}
BODY = {
    "input": "Tell me",
    "seed": 5,
    "temperature": 1.0,
    "max_output_tokens": 600,
    "ignore_eos": True,
    "include": ["message.output_text.logprobs"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(
        tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1, vocab_size=98, max_position_embeddings=2048
    )
    write_tokenizer(folder)
    return folder


def launch(model: Path, journal: Path) -> Running:
    return start(str(model), "--kv-cache-memory", "32MiB", "--max-num-seqs", "4", "--journal", str(journal))


def kill(server: Running) -> None:
    engine = Watch(server.last_engine_pid())
    server.process.send_signal(signal.SIGKILL)
    server.wait()
    engine.wait()


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


def test_a_stream_outlives_the_server(model: Path, tmp_path: Path) -> None:
    """A client that comes back with the number of its last event gets the next one, as if nothing had happened."""
    known: list[dict[str, Any]] = []
    for life in range(2):
        server = launch(model, tmp_path / "journal")
        with httpx.Client(base_url=server.url, timeout=2 * LIMIT) as client:
            if life == 0:
                keyed = client.send(client.build_request("POST", CHAT, json=STREAMED, headers=KEY), stream=True)
                said = [event for event, _ in zip(events(keyed.iter_lines()), range(5), strict=False)]
                request = client.build_request("POST", URL, json={**BODY, "background": True, "stream": True})
            else:
                query: dict[str, Any] = {"stream": True, "starting_after": known[-1]["sequence_number"]}
                request = client.build_request("GET", f"{URL}/{known[0]['response']['id']}", params=query)
            answer = client.send(request, stream=True)
            assert answer.status_code == 200
            for event in events(answer.iter_lines()):
                known.append(event)
                if life == 0 and len(known) > 40:
                    break
            if life == 0:
                kill(server)
                continue
            whole = client.get(f"{URL}/{known[0]['response']['id']}", params={"stream": True})
            assert list(events(iter(whole.text.splitlines()))) == known
            alone = client.post(URL, json=BODY).json()
            # What had begun under the key is answered as a whole, and begins with what was heard of it.
            again = list(events(iter(client.post(CHAT, json=STREAMED, headers=KEY).text.splitlines())))
            assert len(again) > len(said) == 5
            assert again[: len(said)] == said
            assert again[-1]["choices"][0]["finish_reason"] == "length"
            assert int(server.wait_line(rf"{said[0]['id']} goes on after (\d+) tokens")[1]) >= len(_text(said)) > 0
            undisturbed = list(events(iter(client.post(CHAT, json=STREAMED).text.splitlines())))
            assert _text(undisturbed) == _text(again)
            server.stop()
    assert [event["sequence_number"] for event in known] == list(range(len(known)))
    assert known[-1]["type"] == "response.incomplete"  # it ends at max_output_tokens
    (said,) = known[-1]["response"]["output"][0]["content"]
    deltas = [event for event in known if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == said["text"]
    assert alone["output"][0]["content"][0]["text"] == said["text"]
    assert alone["output"][0]["content"][0]["logprobs"] == said["logprobs"]
    assert known[-1]["response"]["usage"] == alone["usage"]


def _text(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
