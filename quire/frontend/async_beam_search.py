"""Beam search on an AsyncEngine: each round the beams' requests run side by side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import msgspec

from quire.frontend.async_engine import AsyncEngine
from quire.frontend.beam_search import BeamSearch, candidates_of
from quire.frontend.input_processor import PreparedRequest, Prompt
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.reading import Reading
from quire.frontend.tokenizer import Tokenizer
from quire.types.beam_search import BeamSearchParams, BeamSearchSequence
from quire.types.outputs import EngineOutput, LogprobsAtPosition, RequestOutput
from quire.types.request import AdapterRef
from quire.types.sampling import SamplingParams
from quire.types.step import TokenLogprobs


async def beam_search(
    engine: AsyncEngine,
    prompt: Prompt,
    params: SamplingParams,
    beam: BeamSearchParams,
    request_id: str,
    *,
    priority: int = 0,
    add_special_tokens: bool = True,
    reading: Reading | None = None,
    adapter: AdapterRef | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """Yield an announcement without completions, then the `params.n` best completions in one output.

    `params` say what is shown of them; closing the iteration aborts the search.
    """
    request = await engine.prepare(prompt, params, add_special_tokens=add_special_tokens)
    yield RequestOutput(request_id, request.prompt, request.prompt_token_ids, [], finished=False)
    search = BeamSearch(beam, request, engine.info.vocab_size)
    cached: int | None = None
    for step in itertools.count():
        if not search.beams:
            break
        names = [f"{request_id}-{step}-{index}" for index in range(len(search.beams))]
        tasks = [
            asyncio.create_task(
                _last(engine.generate(beam_prompt, search.step_params, name, priority=priority, adapter=adapter))
            )
            for beam_prompt, name in zip(search.prompts(), names, strict=True)
        ]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        cached = outputs[0].num_cached_tokens if step == 0 else cached
        search.extend(map(candidates_of, outputs))
    yield _shown(search.best()[: params.n], request, engine.tokenizer, reading, cached)


async def _last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    found = [output async for output in outputs]
    return found[-1]


def _shown(
    best: Sequence[BeamSearchSequence],
    request: PreparedRequest,
    tokenizer: Tokenizer | None,
    reading: Reading | None,
    num_cached_tokens: int | None,
) -> RequestOutput:
    """The sequences as the completions of a request, read and detokenized as those of every request are."""
    params = msgspec.structs.replace(request.params, n=len(best))
    request = replace(request, params=params, children=request.children[: len(best)])
    processor = OutputProcessor(tokenizer)
    processor.add(request, reading)
    outputs = []
    for child, sequence in zip(request.children, best, strict=True):
        tokens = sequence.tokens[len(child.token_ids) :]
        found = zip(tokens, sequence.logprobs, strict=True)
        count = request.params.logprobs
        outputs.append(
            EngineOutput(
                child.request_id,
                tokens,
                sequence.finish_reason,
                None,
                None if count is None else [_entry(token, position, count) for token, position in found],
                None,
                num_cached_tokens or 0,
            )
        )
    (output,) = processor.process(outputs).outputs
    return output


def _entry(chosen: int, position: LogprobsAtPosition, count: int) -> TokenLogprobs:
    """The chosen candidate, and the top `count` of all of them."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    ranked = ranked if count < 0 else ranked[:count]
    return TokenLogprobs(
        [chosen, *(token for token, _ in ranked)],
        [position[chosen].logprob, *(candidate.logprob for _, candidate in ranked)],
        position[chosen].rank or 1,
    )
