"""Agents and SDKs wait for a first token: seven minutes with their own timeouts, in CI seconds with lowered ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anthropic
import openai
import pytest

from quire.server import sse
from quire.server.openai.responses import handler as responses
from tests.agents.scripted import pointed_at, section
from tests.agents.test_npm_clients import INSTALL_LIMIT, codex_folder, npm_folder, run_node
from tests.server.helpers import MODEL, LiveServer, live_server
from tests.server.npm import package_folder
from tests.server.waiting import HELLO, WaitingClient

CLAUDE = "@anthropic-ai/claude-code@2.1.325"
SECONDS = 420.0
"""Before the first token: more than the 300 s after which fetch, Codex and many proxies give up on silence."""
GRACE = 180.0
ANSWER = "Patience is a virtue."
# Four clients at once, each of which reads a stream.
SCRIPT = """
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";
import { streamText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const [url, model] = [URL, MODEL];
const messages = [{ role: "user", content: "Hello" }];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const compatible = createOpenAICompatible({ name: "quire", baseURL: `${url}/v1` });

async function chat() {
  let text = "";
  for await (const chunk of await openai.chat.completions.create({ model, messages, stream: true }))
    text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}
const answers = [
  chat(),
  openai.responses.stream({ model, input: "Hello" }).finalResponse().then((response) => response.output_text),
  anthropic.messages.stream({ model, max_tokens: 200, messages }).finalText(),
  streamText({ model: compatible(model), prompt: "Hello", maxRetries: 0 }).text,
];
for (const answer of await Promise.all(answers)) console.log(answer);
"""
SOON = 1.0  # seconds of silence after which clients give up in CI
# Node's own fetch gives up after 300 s: its dispatcher is made anew with other limits.
IMPATIENT = f"""
await fetch("data:,"); // makes the dispatcher
const dispatcher = Symbol.for("undici.globalDispatcher.1");
const limit = {int(1e3 * SOON)};
globalThis[dispatcher] = new globalThis[dispatcher].constructor({{ headersTimeout: limit, bodyTimeout: limit }});
"""


def ask_openai(server: LiveServer) -> str:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def ask_openai_responses(server: LiveServer) -> str:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model=MODEL, input="Hello") as stream,
    ):
        return stream.get_final_response().output_text


def ask_anthropic(server: LiveServer) -> str:
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=200, messages=HELLO) as stream,
    ):
        return stream.get_final_text()


def run(command: list[str], home: Path, **environment: str) -> str:
    """What a program prints that has a home of its own, so that nobody's settings or sessions are touched."""
    (home / "work").mkdir(parents=True)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS + GRACE,
        cwd=home / "work",
        stdin=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(home)} | environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_claude(folder: Path, server: LiveServer, home: Path) -> str:
    """With all its tools."""
    return run(
        [str(folder / "node_modules" / ".bin" / "claude"), "-p", "Hello", "--model", MODEL],
        home,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )


def run_codex(folder: Path, server: LiveServer, home: Path, settings: str = "") -> str:
    """`settings` of the provider, besides those of the page."""
    command = pointed_at(section("codex exec", "bash"), server.url)
    command = command.replace('wire_api = "responses"', f'wire_api = "responses"{settings}')
    command = command.replace("npx codex", str(folder / "node_modules" / ".bin" / "codex"))
    return run(["bash", "-c", command], home, CODEX_HOME=str(home))


def run_sdks(folder: Path, server: LiveServer, before: str = "") -> str:
    script = SCRIPT.replace("[URL, MODEL]", f'["{server.url}", "{MODEL}"]').replace("\nconst", f"{before}\nconst", 1)
    done = run_node(script, folder, timeout=SECONDS + GRACE)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def slow_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server whose first token takes longer than clients wait in CI; its keep-alives come every 5 s."""
    monkeypatch.setattr(sse, "VERDICT_SECONDS", 0.1)
    monkeypatch.setattr(responses, "LOOKS_PER_EVENT", 3)
    with live_server(WaitingClient(ANSWER, seconds=2.5 * SOON, chunk=3)) as server:
        yield server


def test_javascript_clients_wait_longer_than_their_timeouts(
    slow_server: LiveServer, pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Python SDKs are in tests/server/test_keep_alives.py."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.1)
    packages, codex = npm_folder(pytestconfig), codex_folder(pytestconfig)
    with ThreadPoolExecutor() as pool:
        sdks = pool.submit(run_sdks, packages, slow_server, IMPATIENT)
        settings = f", stream_idle_timeout_ms = {int(1e3 * SOON)}, stream_max_retries = 0"
        assert run_codex(codex, slow_server, tmp_path / "codex", settings).strip() == ANSWER
        assert sdks.result().split() == 4 * ANSWER.split()


@pytest.mark.nightly
def test_without_keep_alives_javascript_clients_would_have_given_up(
    slow_server: LiveServer, pytestconfig: pytest.Config
) -> None:
    with pytest.raises(AssertionError, match=r"Body Timeout|terminated"):
        run_sdks(npm_folder(pytestconfig), slow_server, IMPATIENT)


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 2 * GRACE + 3 * INSTALL_LIMIT)
def test_all_wait_for_a_first_token_that_takes_seven_minutes(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    packages, codex = npm_folder(pytestconfig), codex_folder(pytestconfig)
    claude = package_folder(pytestconfig, CLAUDE, limit=INSTALL_LIMIT)
    client = WaitingClient(ANSWER, seconds=SECONDS, chunk=3)
    with live_server(client) as server, ThreadPoolExecutor() as pool:
        clients: dict[str, Callable[[], str]] = {
            "openai": lambda: ask_openai(server),
            "openai responses": lambda: ask_openai_responses(server),
            "anthropic": lambda: ask_anthropic(server),
            "JavaScript SDKs": lambda: run_sdks(packages, server),
            "claude": lambda: run_claude(claude, server, tmp_path / "claude"),
            "codex": lambda: run_codex(codex, server, tmp_path / "codex"),
        }
        waiting = {name: pool.submit(ask) for name, ask in clients.items()}
        heard = {name: answer.result().strip() for name, answer in waiting.items()}
    expected = dict.fromkeys(clients, ANSWER) | {"JavaScript SDKs": "\n".join([ANSWER] * 4)}
    assert heard == expected
