"""AsyncEngine: many concurrent streams over one engine, on one event loop. Each stream is an async iterator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from quire.config.engine import EngineConfig
from quire.engine.client import EngineClient, make_inproc_client
from quire.frontend.adapters import LoRARequest, find_adapter
from quire.frontend.controls import AsyncControls, add_counts
from quire.frontend.input_processor import InputProcessor, PreparedRequest, Prompt
from quire.frontend.mailbox import AsyncMailbox
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.pooled import as_pooling, for_reward, for_task, scored, with_outputs
from quire.frontend.reading import Reading
from quire.frontend.scoring import LateText, TextPair, plan_scores
from quire.frontend.text_model import Message, TextModel, load_text_model
from quire.frontend.thinking import thinking_marks
from quire.frontend.tokenizer import LONG_TEXT, Tokenizer
from quire.frontend.topology import with_topology
from quire.metrics.stats import NULL_OBSERVER, Observer
from quire.structured.sources import is_large
from quire.types.console import ConsoleQuery, EngineView, RequestView
from quire.types.errors import EngineDeadError, EngineError
from quire.types.messages import EngineInfo
from quire.types.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    EngineOutput,
    EngineStats,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from quire.types.request import AdapterRef
from quire.types.sampling import PoolingParams, SamplingParams
from quire.utils.log import get_logger

logger = get_logger(__name__)

# Outputs of a large batch are handed out in slices, so that readers of the first ones need not wait for the last.
_SLICE = 128
_MANY_WORDS = 100  # bad_words, each of which is tokenized twice


class AsyncEngine(AsyncControls):
    """Streams of requests. Everything but `shutdown` must be called on the event loop it was first used on."""

    def __init__(
        self,
        client: EngineClient,
        text: TextModel,
        *,
        observer: Observer = NULL_OBSERVER,
    ) -> None:
        """`observer` gets the events of all requests; the caller closes it."""
        defaults = text.defaults
        self._client: EngineClient = client
        self._text = text
        self._inputs = InputProcessor(
            text.tokenizer,
            client.info,
            defaults.params,
            defaults.eos_token_ids,
            thinking=partial(thinking_marks, text),
        )
        self._outputs = OutputProcessor(text.tokenizer, observer)
        self._observer = observer
        self._mailboxes: dict[str, AsyncMailbox] = {}
        self._drain: asyncio.Task[None] | None = None
        self._dead: str | None = None
        self._vocabulary: asyncio.Task[None] | None = None
        self._stats = EngineStats()
        self.expert_load = {}
        self._idle = asyncio.Event()
        self._idle.set()
        observer.on_engine_start(client.info)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Load the model in this process. Blocks until it is loaded."""
        text = load_text_model(config.model)
        engine = cls(make_inproc_client(with_topology(config, most_replicas=1)), text)
        engine._model = config.model
        return engine

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def stats(self) -> EngineStats:
        """The engine's statistics of its last output."""
        return self._stats

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._text.tokenizer

    @property
    def is_dead(self) -> bool:
        return self._dead is not None

    @property
    def num_requests(self) -> int:
        """Streams that are open."""
        return len(self._mailboxes)

    @property
    def request_ids(self) -> list[str]:
        """Of the streams that are open, oldest first."""
        return list(self._mailboxes)

    async def wait_idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json suggests, over SamplingParams' own defaults."""
        return self._text.defaults.params

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        trace_headers: Mapping[str, str] | None = None,
        arrival_time: float | None = None,
        reading: Reading | None = None,
        announce: bool = False,
        adapter: AdapterRef | None = None,
        lora_request: LoRARequest | None = None,
        given: RequestOutput | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt. Closing or cancelling the iteration aborts the request.

        What each output holds is chosen by sampling_params.output_kind. A slow reader gets several steps' deltas
        in one output; it delays nobody else. `add_special_tokens` lets the tokenizer add its own to a text.
        `arrival_time`, on the monotonic clock, is when the request came to the caller; it came now if not given.
        With a `reading`, outputs also have the text as events. With `announce`, the first output comes as soon as
        the request was checked and sent to the engine, and has no completions. `lora_request` names an adapter;
        `adapter` is one that was found already. `given` is what a request that was cut off had said, not all of its
        completions being finished; outputs are of what follows it.
        """
        params = sampling_params or self.get_default_sampling_params()
        arrived = time.monotonic() if arrival_time is None else arrival_time

        async def prepare() -> PreparedRequest:
            found = adapter or find_adapter(lora_request)
            return await self._process(
                prompt, params, request_id, priority, add_special_tokens, trace_headers, arrived, found
            )

        return self._stream(prepare, reading, announce, given)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation; otherwise like generate. By default an answer goes on until the model ends it."""
        params = sampling_params or self._text.chat_params()
        arrived = time.monotonic()

        async def prepare() -> PreparedRequest:
            prompt = self._text.render_chat(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            adapter = find_adapter(lora_request)
            return await self._process(prompt, params, request_id, priority, False, trace_headers, arrived, adapter)

        return self._stream(prepare)

    async def encode(
        self,
        prompt: Prompt | TextPair | LateText,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        prompt_name: str | None = None,
        instruction: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        arrival_time: float | None = None,
        adapter: AdapterRef | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """What the task reads of a prompt, a vector unless it says otherwise. Cancelling it aborts the request.

        The adapter is as in generate.
        """
        arrived = time.monotonic() if arrival_time is None else arrival_time

        async def prepare() -> PreparedRequest:
            def process() -> PreparedRequest:
                return self._inputs.process_pooling(
                    prompt,
                    pooling_params,
                    prompt_name=prompt_name,
                    instruction=instruction,
                    request_id=request_id,
                    priority=priority,
                    trace_headers=trace_headers,
                    arrival_time=arrived,
                    adapter=adapter or find_adapter(lora_request),
                )

            return await asyncio.to_thread(process) if _is_long(prompt) else process()

        stream = self._stream(prepare)
        try:
            return as_pooling(await anext(stream))
        finally:
            await stream.aclose()

    async def embed(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None, **how: Any
    ) -> PoolingRequestOutput[EmbeddingOutput]:
        """The vector of a prompt as a list; otherwise like encode."""
        found = await self.encode(prompt, for_task(pooling_params, "embed", "embed"), request_id, **how)
        return with_outputs(found, EmbeddingOutput(found.outputs.data.tolist()))

    async def classify(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None, **how: Any
    ) -> PoolingRequestOutput[ClassificationOutput]:
        """A value for each class; otherwise like encode."""
        found = await self.encode(prompt, for_task(pooling_params, "classify", "classify"), request_id, **how)
        return with_outputs(found, ClassificationOutput(found.outputs.data.tolist()))

    async def reward(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None, **how: Any
    ) -> PoolingRequestOutput[PoolingOutput]:
        """What a reward model gives a prompt or each of its tokens, before any activation; otherwise like encode."""
        params = for_reward(pooling_params or PoolingParams(use_activation=False), self.info.pooler)
        return await self.encode(prompt, params, request_id, **how)

    async def score(
        self,
        text_1: str,
        text_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        instruction: str | None = None,
        **how: Any,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well a text goes with each of others. Cancelling it aborts all requests; `how` is as in encode."""
        plan = plan_scores(self.info.pooler, [text_1], [text_2] if isinstance(text_2, str) else text_2, instruction)
        params = for_task(pooling_params, plan.task, "score")
        tasks = [asyncio.ensure_future(self.encode(prompt, params, **how)) for prompt in plan.prompts]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        scores = plan.scores([output.outputs.data for output in found])
        return [scored(found[one], found[two], score) for (one, two), score in zip(plan.pairs, scores, strict=True)]

    async def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> PreparedRequest:
        """What generate would send to the engine: tokenized and checked, and not sent."""
        params = sampling_params or self.get_default_sampling_params()
        return await self._process(prompt, params, None, 0, add_special_tokens, None, time.monotonic())

    async def abort(self, request_id: str) -> None:
        """Stop a request; its stream ends with finish_reason "abort". An unknown or finished one is ignored."""
        engine_ids, last = self._outputs.abort(request_id)
        if engine_ids:
            self._client.abort(engine_ids)
        if last is not None:
            self._mailboxes[request_id].put(last)

    async def prepare_structured_outputs(self) -> None:
        """Let the engine get ready for grammars, once. Else the first request with one does it, and others wait."""
        if not self._inputs.takes_grammars:
            return
        if self._vocabulary is None:
            self._vocabulary = asyncio.get_running_loop().create_task(self._send_vocabulary())
        await asyncio.shield(self._vocabulary)

    async def _send_vocabulary(self) -> None:
        vocabulary = await asyncio.to_thread(self._inputs.vocabulary)
        await self._client.call_async("set_vocabulary", vocabulary, limit=None)  # however long a step takes

    async def console(self, query: ConsoleQuery) -> EngineView:
        """What the console is shown of the engine; it records its steps from the first query to one that stops it."""
        view: EngineView = await self._client.call_async("console", query)
        return view

    def held_requests(self, why: str) -> list[RequestView]:
        """The open completions, for the console while there is no engine, because of `why`."""
        return self._outputs.held(why)

    def prompt_of(self, engine_id: str) -> str | None:
        """The text of the prompt of an open completion, by the engine's name for it; None where there is none."""
        return self._outputs.prompt_of(engine_id)

    def note_restart(self) -> None:
        """Another engine serves the client now: requests are checked by its limits from now on."""
        self._inputs.set_info(self._client.info)
        self._observer.on_engine_start(self._client.info)

    def shutdown(self, reason: str = "the engine was shut down") -> None:
        """Stop the engine; streams that are open end with EngineDeadError. May be called twice."""
        self._die(reason)
        if self._drain is not None and not self._drain.get_loop().is_closed():
            self._drain.cancel()
        self._client.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.shutdown()

    async def _process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        add_special_tokens: bool,
        trace_headers: Mapping[str, str] | None,
        arrival_time: float,
        adapter: AdapterRef | None = None,
    ) -> PreparedRequest:
        def process() -> PreparedRequest:
            return self._inputs.process(
                prompt,
                params,
                request_id=request_id,
                priority=priority,
                add_special_tokens=add_special_tokens,
                trace_headers=trace_headers,
                arrival_time=arrival_time,
                adapter=adapter,
            )

        # For what is quick the hop to a thread would cost more.
        if isinstance(params, SamplingParams) and _takes_long(prompt, params):
            return await asyncio.to_thread(process)
        return process()

    async def _stream(
        self,
        prepare: Callable[[], Awaitable[PreparedRequest]],
        reading: Reading | None = None,
        announce: bool = False,
        given: RequestOutput | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_usable()
        request = await prepare()
        if request.children[0].grammar is not None:
            await self.prepare_structured_outputs()
        self._check_usable()
        mailbox = self._open(request, reading)
        try:
            for child in request.children if given is None else self._outputs.resume(request, given):
                self._client.add_request(child)
            if announce:
                yield RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, [], finished=False)
            finished = False
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                yield output
        finally:
            self._close(request.request_id)

    def _check_usable(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self._drain is not None and self._drain.get_loop() is not asyncio.get_running_loop():
            raise EngineError("this AsyncEngine is in use on another event loop; call it there, or make one per loop")

    def _open(self, request: PreparedRequest, reading: Reading | None) -> AsyncMailbox:
        self._outputs.add(request, reading)
        mailbox = self._mailboxes[request.request_id] = AsyncMailbox(request.params.output_kind)
        self._idle.clear()
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_outputs(), name="quire-outputs")
            self._drain.add_done_callback(self._on_drain_done)
        return mailbox

    def _close(self, request_id: str) -> None:
        """The stream was closed: abort the request if it has not finished."""
        del self._mailboxes[request_id]
        if not self._mailboxes:
            self._idle.set()
        engine_ids, _ = self._outputs.abort(request_id)
        if engine_ids:
            self._client.abort(engine_ids)

    async def _drain_outputs(self) -> None:
        while True:
            batch = await self._client.get_outputs_async()
            if batch.stats is not None:
                self._stats = batch.stats
                self._observer.on_stats(batch.stats)
                add_counts(self.expert_load, batch.stats)
            outputs = batch.outputs
            for begin in range(0, len(outputs), _SLICE):
                if begin:
                    await asyncio.sleep(0)
                self._hand_out(outputs[begin : begin + _SLICE])

    def _hand_out(self, outputs: list[EngineOutput]) -> None:
        result = self._outputs.process(outputs)
        if result.aborts:
            self._client.abort(result.aborts)
        for output in result.outputs:
            self._mailboxes[output.request_id].put(output)
        for failure in result.failures:
            self._mailboxes[failure.request_id].fail(failure)

    def _on_drain_done(self, task: asyncio.Task[None]) -> None:
        """The task that reads outputs has ended: end all streams, whatever the cause."""
        if task.cancelled():
            self._die("the task that reads the engine's outputs was cancelled; make a new AsyncEngine")
            return
        error = task.exception()
        if error is not None and not isinstance(error, EngineError):
            logger.error("reading the engine's outputs failed", exc_info=error)
        self._die(str(error), error)

    def _die(self, reason: str, cause: BaseException | None = None) -> None:
        if self._dead is not None:
            return
        self._dead = reason
        self._observer.on_engine_down()
        for request_id in self._outputs.clear(reason):
            error = EngineDeadError(reason)
            error.__cause__ = cause
            self._mailboxes[request_id].fail(error)


def _is_long(prompt: Prompt | TextPair | LateText) -> bool:
    if isinstance(prompt, TextPair):
        return len(prompt.query) + len(prompt.document) > LONG_TEXT
    if isinstance(prompt, LateText):
        return len(prompt.text) > LONG_TEXT
    if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
        return True
    names = ("prompt", "prompt_token_ids", "suffix", "prediction")
    parts = [prompt.get(name) for name in names] if isinstance(prompt, Mapping) else [prompt]
    return any(isinstance(part, Sequence) and len(part) > LONG_TEXT for part in parts)


def _takes_long(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether preparing a request would block the event loop for milliseconds."""
    if _is_long(prompt):
        return True
    grammar = params.structured_outputs
    return len(params.bad_words) > _MANY_WORDS or (grammar is not None and is_large(grammar))
