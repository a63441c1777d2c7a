"""The default model under grammars, hot enough to say anything: what it finishes obeys."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.config.engine import EngineConfig
from quire.frontend.async_engine import AsyncEngine
from quire.types.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "born": {"type": "string", "format": "date"},
        "children": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}, "maxItems": 2},
        "kind": {"enum": ["person", "fictional"]},
    },
    "required": ["name", "born", "children", "kind"],
    "additionalProperties": False,
}
SUMS = """
start: expr
expr: NUMBER | "(" expr OP expr ")"
NUMBER: /[0-9]{1,3}/
OP: /[+*]/
"""
MESSAGES = [{"role": "user", "content": "Describe somebody in JSON."}]
SETTINGS = {"kv_cache_memory": 64 << 20, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm


def test_hot_and_obedient(llm: LLM) -> None:
    grammars = [
        StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        StructuredOutputsParams(regex=r"\+[0-9]{2} [0-9]{3}-[0-9]{4}"),
        StructuredOutputsParams(choice=["Paris", "London", "the 8th arrondissement"]),
        StructuredOutputsParams(grammar=SUMS),
    ]
    params = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=100, structured_outputs=grammar)
        for seed in range(3)
        for grammar in grammars
    ]
    outputs = llm.chat([MESSAGES] * len(params), params, use_tqdm=False)
    texts = [output.outputs[0].text if output.outputs[0].finish_reason == "stop" else None for output in outputs]
    assert sum(text is not None for text in texts) >= len(texts) - 3
    for index, text in enumerate(texts):
        if text is None:
            continue
        match index % len(grammars):
            case 0:
                jsonschema.validate(json.loads(text), SCHEMA)
            case 1:
                assert re.fullmatch(r"\+[0-9]{2} [0-9]{3}-[0-9]{4}", text)
            case 2:
                assert text in ("Paris", "London", "the 8th arrondissement")
            case _:
                assert re.fullmatch(r"[0-9+*()]+", text)
                assert text.count("(") == text.count(")")


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.from_config(EngineConfig.from_flat(**SETTINGS)) as engine:
        yield engine


async def test_streams_over_the_async_engine(engine: AsyncEngine) -> None:
    grammar = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=100, structured_outputs=grammar, output_kind="delta")
    text = ""
    async for output in engine.chat(MESSAGES, params):
        text += output.outputs[0].text
    if output.outputs[0].finish_reason == "stop":
        jsonschema.validate(json.loads(text), SCHEMA)
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="start: nothing"))
    with pytest.raises(RequestError, match='unknown name: "nothing"'):
        await anext(engine.chat(MESSAGES, bad))
