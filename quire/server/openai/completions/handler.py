"""Text completions: a checked request in, a body or a stream of chunks out, over one prompt or many."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec
from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.mailbox import merge_deltas
from quire.server.context import ServerContext
from quire.server.conversation.request import OutputFormat
from quire.server.errors import json_response
from quire.server.generation.field_table import check_extra_fields
from quire.server.generation.fields import engine_prompt
from quire.server.generation.record import record_of
from quire.server.generation.request import Generation, ids_of, origin_of
from quire.server.generation.run import finished_outputs, run
from quire.server.generation.usage import UsageCounter
from quire.server.openai.completions.protocol import Completion, CompletionChoice, CompletionRequest
from quire.server.openai.logprobs import CompletionLogprobs, LogprobsFormatter, concatenated, prompt_logprobs
from quire.server.openai.sampling import beam_search_params, check_n, check_stream_options, sampling_params
from quire.server.openai.shown import Shown
from quire.server.openai.structured import output_format
from quire.server.openai.usage import Usage, usage_of
from quire.server.sse import ACCEPTED, EventStream, event, while_connected
from quire.types.errors import RequestError
from quire.types.outputs import CompletionOutput, LogprobsAtPosition, RequestOutput
from quire.types.request import FinishReason
from quire.types.sampling import SamplingParams

ROUTE = "/v1/completions"


async def create_completion(context: ServerContext, body: CompletionRequest, request: Request) -> Response:
    answer = CompletionAnswer(context, body, make_generation(context, body, request))
    if body.stream:
        return EventStream(answer.events())
    return json_response(await while_connected(request.receive, answer.body()))


def make_generation(context: ServerContext, body: CompletionRequest, request: Request) -> Generation:
    """Check everything that can be checked without the engine."""
    model = context.check_model(body.model, "generate")
    check_extra_fields(body.model_extra or {}, context, ROUTE)
    check_stream_options(body)
    check_best_of(body)
    if body.suffix and body.echo:
        raise RequestError("suffix is given with echo; leave one of them out", "suffix")
    if body.prompt_embeds is not None:
        check_embeds(body)
    engine = context.provider.engine
    wanted = output_format(body.response_format, body.structured_outputs)
    params = _params(context, body, engine.info.max_model_len, wanted)
    return Generation(
        ids=ids_of("cmpl-", body, request),
        model=model,
        prompts=engine_prompts(body),
        prompt_field="prompt" if body.prompt_embeds is None else "prompt_embeds",
        format_field=None if wanted is None else wanted.where,
        params=params,
        beam_search=beam_search_params(
            body, params, context.text.defaults.params, context.settings, engine.info.max_model_len
        ),
        priority=body.priority or 0,
        add_special_tokens=body.add_special_tokens is not False,
        origin=origin_of(request),
        record=record_of(request),
    )


def check_best_of(body: CompletionRequest) -> None:
    if body.best_of is None:
        return
    n = 1 if body.n is None else body.n
    if body.use_beam_search and body.best_of > n:
        raise RequestError("best_of is given with use_beam_search; use beam_width instead", "best_of")
    if body.best_of < n:
        raise RequestError(f"best_of is {body.best_of} but must be at least n ({n})", "best_of")
    if body.stream and body.best_of > n:
        raise RequestError("best_of cannot be streamed: the best is known at the end; leave stream out", "best_of")


def _with_suffix(prompt: dict[str, Any], suffix: str | None) -> dict[str, Any]:
    return {**prompt, "suffix": suffix} if suffix else prompt


def check_embeds(body: CompletionRequest) -> None:
    for name in ("prompt", "suffix", "echo", "use_beam_search"):
        if getattr(body, name):
            raise RequestError(f"{name} is given with prompt_embeds; leave one of them out", name)


def engine_prompts(body: CompletionRequest) -> list[dict[str, Any]]:
    if body.prompt_embeds is not None:
        return [
            {**engine_prompt(body, []), "prompt_token_ids": None, "prompt_embeds": body.prompt_embeds.model_dump()}
        ]
    return [_with_suffix(engine_prompt(body, prompt), body.suffix) for prompt in prompts_of(body)]


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts as a list: a text or a list of integers is one prompt."""
    prompt = body.prompt
    if prompt is None:
        raise RequestError("prompt is missing; give it", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list; give a text or token ids", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


def _params(
    context: ServerContext, body: CompletionRequest, max_model_len: int, wanted: OutputFormat | None
) -> SamplingParams:
    # The engine always generates a token; with max_tokens 0 it is not shown.
    max_tokens = 1 if body.max_tokens == 0 else body.max_tokens
    compares = body.best_of is not None and body.best_of > (body.n or 1)
    params = sampling_params(
        body,
        context.text.defaults.params,
        context.settings,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        logprobs=0 if compares and body.logprobs is None else body.logprobs,
    )
    if body.best_of is not None:
        check_n("best_of", body.best_of, context.settings)
        params = msgspec.structs.replace(params, n=body.best_of)
    if wanted is not None:
        params = msgspec.structs.replace(params, structured_outputs=wanted.constraint)
    shows_logprobs = body.logprobs is not None or bool(body.logprob_token_ids)
    if body.echo and shows_logprobs and params.prompt_logprobs is None:
        if body.use_beam_search:
            raise RequestError("echo with logprobs is not supported with use_beam_search; leave one out", "echo")
        return msgspec.structs.replace(params, prompt_logprobs=body.logprobs or 0)
    return params


def best_of(completions: Sequence[CompletionOutput], n: int) -> Sequence[CompletionOutput]:
    """The n completions with the highest log-probability per token, the best first, numbered anew."""
    if len(completions) <= n:
        return completions
    best = sorted(completions, key=_mean_logprob, reverse=True)[:n]
    return [msgspec.structs.replace(completion, index=index) for index, completion in enumerate(best)]


def _mean_logprob(completion: CompletionOutput) -> float:
    return (completion.cumulative_logprob or 0.0) / max(1, len(completion.token_ids))


class CompletionAnswer:
    """Builds the answer to one request. Choice `i * n + j` is completion j of prompt i."""

    def __init__(self, context: ServerContext, body: CompletionRequest, generation: Generation) -> None:
        self._context = context
        self._generation = generation
        self._usage = UsageCounter(has_prediction=body.prediction is not None)
        self._n = generation.params.n if body.best_of is None else body.n or 1
        self._echo = bool(body.echo)
        self._keeps = body.truncate_prompt_tokens
        self._no_tokens = body.max_tokens == 0
        self._shows_prompt_logprobs = body.prompt_logprobs is not None
        self._offsets: dict[int, int] = {}  # by choice: where in its text the next token begins
        self._prompt_logprobs: dict[int, Sequence[LogprobsAtPosition | None]] = {}  # by prompt, to be echoed
        self._shown = Shown(context, body, with_logprobs=body.logprobs is not None or bool(body.logprob_token_ids))

    async def body(self) -> bytes:
        outputs = await finished_outputs(self._context, self._generation)
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._count(output)
            for completion in best_of(output.outputs, self._n):
                choice = self._choice(prompt_index, output, completion)
                choice.finish_reason, choice.stop_reason = self._ending(completion)
                if self._shown.names_prompt_logprobs:
                    shown = output.prompt_logprobs if self._shows_prompt_logprobs else None
                    choice.prompt_logprobs = prompt_logprobs(shown)
                choices.append(choice)
        return msgspec.json.encode(self._completion(choices, usage_of(self._usage)))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one for each output, with all its chunks."""
        waiting: dict[int, list[RequestOutput]] = {}  # by prompt: outputs that came before its log-probabilities
        needs_prompt = set(range(len(self._generation.prompts))) if self._echo and self._shown.formatter else set()
        async with aclosing(run(self._context, self._generation)) as outputs:
            await anext(outputs)
            yield ACCEPTED
            async for index, item in outputs:
                output = item
                if index in needs_prompt:
                    waiting.setdefault(index, []).append(output)
                    if output.prompt_logprobs is None:
                        continue
                    needs_prompt.discard(index)
                    self._prompt_logprobs[index] = output.prompt_logprobs
                    output = merge_deltas(waiting.pop(index))
                chunks = self._chunks(index, output)
                if chunks:
                    yield b"".join([event(msgspec.json.encode(chunk)) for chunk in chunks])
        if self._shown.with_usage:
            yield event(msgspec.json.encode(self._completion([], usage_of(self._usage))))

    def _chunks(self, prompt_index: int, output: RequestOutput) -> list[Completion]:
        self._count(output)
        usage = self._shown.chunk_usage(self._usage)
        chunks = []
        for completion in output.outputs:
            choice = self._choice(prompt_index, output, completion)
            if choice.text or (completion.token_ids and self._shown.tokens):
                chunks.append(self._completion([choice], usage))
            if completion.finish_reason is not None:
                last = CompletionChoice(choice.index, "", None, *self._ending(completion))
                last.token_ids = last.prompt_token_ids = self._shown.token_ids(None)
                chunks.append(self._completion([last], usage))
        return chunks

    def _choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """What is new of a completion; the first time, with the prompt if it is to be echoed."""
        index = prompt_index * self._n + completion.index
        first = index not in self._offsets
        self._offsets.setdefault(index, 0)
        token_ids = [] if self._no_tokens else completion.token_ids
        choice = CompletionChoice(index, "" if self._no_tokens else completion.text)
        if first and self._echo:
            choice.text = self._prompt_text(output) + choice.text
        if self._shown.formatter is not None:
            choice.logprobs = self._logprobs(self._shown.formatter, index, output, completion, first)
        choice.token_ids = self._shown.token_ids(token_ids)
        choice.prompt_token_ids = self._shown.token_ids(output.prompt_token_ids if first else None)
        return choice

    def _logprobs(
        self,
        formatter: LogprobsFormatter,
        index: int,
        output: RequestOutput,
        completion: CompletionOutput,
        first: bool,
    ) -> CompletionLogprobs:
        echoed = CompletionLogprobs([], [], [], [])
        offset = self._offsets[index]
        if first and self._echo:
            # Only one output of a stream has them, and choices may begin after it.
            found = self._prompt_logprobs.get(index // self._n, output.prompt_logprobs)
            if found is not None:
                echoed, offset = formatter.completion(output.prompt_token_ids, found, offset)
        if self._no_tokens:
            return echoed
        new, offset = formatter.completion(completion.token_ids, completion.logprobs or (), offset)
        self._offsets[index] = offset
        return concatenated(echoed, new)

    def _prompt_text(self, output: RequestOutput) -> str:
        """The prompt as far as it was kept: text and tokens agree."""
        kept = self._context.provider.engine.info.max_model_len - 1 if self._keeps == -1 else self._keeps
        if output.prompt is not None and (kept is None or len(output.prompt_token_ids) < kept):
            return output.prompt
        return self._context.tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)

    def _ending(self, completion: CompletionOutput) -> tuple[FinishReason | None, int | str | None]:
        if self._no_tokens:
            return "length", None
        return completion.finish_reason, completion.stop_reason

    def _count(self, output: RequestOutput) -> None:
        self._usage.add(output)
        if self._no_tokens:
            self._usage.completion_tokens = 0

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        generation = self._generation
        return Completion(generation.ids.response, generation.created, generation.model, choices, usage)
