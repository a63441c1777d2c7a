"""A model that says what a test tells it to, in a tokenizer of bytes and the special tokens of its family."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from tokenizers import AddedToken

from quire.frontend.async_engine import AsyncEngine
from quire.frontend.text_model import GenerationDefaults, TextModel
from quire.frontend.tokenizer import Tokenizer
from quire.types.messages import EngineInfo
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import FakeClient, byte_tokenizer
from tests.server.helpers import FakeProvider, make_app

# Prints all that a template may be given, to be read back from the prompt.
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.reasoning_content %} THOUGHT {{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls or [] %} CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %} FOR {{ m.tool_call_id }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ opening }}{% endif %}"
)
SPECIAL_TOKENS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
    "<|python_tag|>",
    "<|eom_id|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "<unused>",
)

Script = str | Callable[[str], str]


def scripted_text(template: str = TEMPLATE) -> TextModel:
    """The text side of a model with that template."""
    plain = byte_tokenizer()
    backend = plain.backend
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = Tokenizer(backend, plain.special_tokens, (), {"default": template})
    return TextModel(tokenizer, GenerationDefaults(SamplingParams(max_tokens=64)))


TEXT = scripted_text()


class ScriptedClient(FakeClient):
    """Each completion says the next script; the last one is said again and again.

    A script is the text of an answer, with its special tokens, or a function from the prompt to it.
    """

    def __init__(self, scripts: Script | Sequence[Script], text: TextModel | None = None, **options: Any) -> None:
        super().__init__(self._say, **options)
        tokenizer = (text or TEXT).tokenizer
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self._scripts = [scripts] if isinstance(scripts, str) or callable(scripts) else list(scripts)
        self.info = EngineInfo(self._tokenizer.vocab_size, 1 << 20, 16, 1 << 16, 64)

    def _say(self, request: EngineRequest) -> Sequence[int]:
        script = self._scripts[0]
        if len(self._scripts) > 1:
            del self._scripts[0]
        said = script if isinstance(script, str) else script(self.prompt_of(request))
        return self._tokenizer.encode(said, add_special_tokens=False)

    def prompt_of(self, request: EngineRequest) -> str:
        return self._tokenizer.decode(request.token_ids, skip_special_tokens=False)

    @property
    def prompts(self) -> list[str]:
        """What the model was asked, in the order of arrival."""
        return [self.prompt_of(request) for request in self.added]


class ScriptedProvider(FakeProvider):
    """Its engine can be replaced, so that one app serves many tests: to build one takes longer than most of them."""

    def use(self, client: ScriptedClient) -> None:
        self.client = client
        self._engine = AsyncEngine(client, self.text)


@functools.cache
def scripted_app(**settings: Any) -> tuple[FastAPI, ScriptedProvider]:
    """An app with the common template. Give its provider a client before each use, on the loop that will run it."""
    provider = ScriptedProvider(ScriptedClient(""), TEXT)
    return make_app(provider=provider, **settings), provider
