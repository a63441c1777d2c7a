"""LLM: the offline API. Prompts in, finished (or streamed) RequestOutputs out, on the caller's own thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from quire.config.engine import EngineConfig
from quire.config.groups import DEFAULT_MODEL
from quire.engine.client import EngineClient, make_inproc_client
from quire.engine.settings import check_settings
from quire.frontend.adapters import LoRARequest, find_adapter
from quire.frontend.batches import Batch, as_batch, of_each, spread
from quire.frontend.beam_search import BeamSearch, run_searches
from quire.frontend.controls import Controls, add_counts
from quire.frontend.input_processor import InputProcessor, PreparedRequest, Prompt
from quire.frontend.interrupts import interrupt_afterwards
from quire.frontend.mailbox import Mailbox
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.pooled import (
    as_classification,
    as_embedding,
    as_pooling,
    for_reward,
    for_task,
    scored,
    values_of,
    with_task,
)
from quire.frontend.progress import NullProgress, make_progress
from quire.frontend.restarting import make_process_client
from quire.frontend.scoring import LateText, TextPair, plan_scores
from quire.frontend.text_model import Message, TextModel, is_batch, is_conversation, load_text_model
from quire.frontend.thinking import thinking_marks
from quire.frontend.topology import with_topology
from quire.types.beam_search import BeamSearchOutput, BeamSearchParams
from quire.types.errors import (
    EngineDeadError,
    EngineError,
    RequestError,
)
from quire.types.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    EngineOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from quire.types.sampling import OutputKind, PoolingParams, PoolingTask, SamplingParams
from quire.utils.collector import paused_collector, spared_heap
from quire.utils.phases import ReportPhase, ignore_phase

if TYPE_CHECKING:
    from quire.frontend.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Lora = LoRARequest | Sequence[LoRARequest | None] | None
_STEPS_AHEAD = 4  # whose tokens wait in the engine before it runs beside the preparation of more prompts


class LLM(Controls):
    """A model and its engine, in this process unless told otherwise. Calls from several threads take turns.

    A bad request in a batch fails alone: the others run, then BatchError is raised with their results.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        tokenizer: str | None = None,
        seed: int | None = None,
        on_phase: ReportPhase = ignore_phase,
        engine_process: bool = False,
        **settings: Any,
    ) -> None:
        """`settings` are the fields of quire.config.groups, e.g. max_model_len=2048.

        With a `seed`, requests that bring none are reproducible too: those of another LLM, asked in the same order.
        `on_phase` hears what loading is busy with. With `engine_process` the engine is a process of its own: if it
        dies, another one goes on with every open request.
        """
        if seed is not None:
            settings["seed"] = seed
        settings.setdefault("step_time_target", 0.0)  # nobody waits for a part of a batch
        config = with_topology(EngineConfig.from_flat(model=model, tokenizer=tokenizer, **settings), most_replicas=1)
        check_settings(config)
        with paused_collector():
            text = load_text_model(config.model)
            make = make_process_client if engine_process else make_inproc_client
            self._wire(make(config, on_phase), text, seed)
        self._model = config.model

    @classmethod
    def from_client(cls, client: EngineClient, text: TextModel, seed: int | None = None) -> Self:
        """Around an engine that runs already."""
        llm = cls.__new__(cls)
        llm._wire(client, text, seed)
        return llm

    def _wire(self, client: EngineClient, text: TextModel, seed: int | None) -> None:
        self._client = client
        self._text = text
        defaults = text.defaults
        self._inputs = InputProcessor(
            text.tokenizer,
            client.info,
            defaults.params,
            defaults.eos_token_ids,
            seed,
            partial(thinking_marks, text),
        )
        self._outputs = OutputProcessor(text.tokenizer)
        self._mailboxes: dict[str, Mailbox] = {}
        self._turn = threading.RLock()  # held while requests are submitted, stepped and ended
        self._ids = map(str, itertools.count())
        self._vocabulary_is_known = False
        self._alive = True
        self.expert_load = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora_request: Lora = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results are in the order of the prompts.

        A prompt is text, a list of token ids, or a dict (see Prompt). Without sampling_params the model's own
        suggestions are used. `use_tqdm` shows a progress bar on a terminal. `lora_request` is the adapter for all
        prompts, or one or None for each.
        """
        batch = as_batch(prompts)
        params = spread(sampling_params, len(batch), "sampling_params", self.get_default_sampling_params())
        priorities = spread(priority, len(batch), "priority", 0)
        adapters = spread(lora_request, len(batch), "lora_request", None)

        def prepare(index: int) -> PreparedRequest:
            return self._prepare(
                batch[index], params[index], "final_only", priority=priorities[index], lora=adapters[index]
            )

        return self._run(len(batch), prepare, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Lora = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. Without sampling_params an answer goes on until the model ends it."""
        conversations: list[Any] = list(messages) if is_batch(messages) else [messages]
        params = spread(sampling_params, len(conversations), "sampling_params", self._text.chat_params())
        adapters = spread(lora_request, len(conversations), "lora_request", None)

        def prepare(index: int) -> PreparedRequest:
            prompt = self._text.render_chat(
                conversations[index],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            return self._prepare(prompt, params[index], "final_only", add_special_tokens=False, lora=adapters[index])

        return self._run(len(conversations), prepare, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        prompt_name: str | None = None,
        instruction: str | None = None,
        lora_request: Lora = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """A vector of each prompt, in the order of the prompts: `outputs.embedding` of each result.

        `prompt_name` chooses one of the texts that the model's folder has for what goes before a prompt;
        `instruction` goes before it instead.
        """
        batch = as_batch(prompts)
        given: list[PoolingParams | None] = spread(pooling_params, len(batch), "pooling_params", None)
        params = of_each(given, lambda p: for_task(p, "embed", "embed"))
        outputs = self._pool(batch, params, use_tqdm, lora_request, prompt_name, instruction)
        return [as_embedding(output) for output in outputs]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool = True,
        prompt_name: str | None = None,
        instruction: str | None = None,
        lora_request: Lora = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the task reads of each prompt, as an array: `outputs.data` of each result."""
        batch = as_batch(prompts)
        given: list[PoolingParams | None] = spread(pooling_params, len(batch), "pooling_params", None)
        params = of_each(given, lambda p: with_task(p, pooling_task))
        outputs = self._pool(batch, params, use_tqdm, lora_request, prompt_name, instruction)
        return [as_pooling(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Lora = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """A value for each class, in the order of the prompts: `outputs.probs` of each result."""
        batch = as_batch(prompts)
        given: list[PoolingParams | None] = spread(pooling_params, len(batch), "pooling_params", None)
        params = of_each(given, lambda p: for_task(p, "classify", "classify"))
        return [as_classification(output) for output in self._pool(batch, params, use_tqdm, lora_request)]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Lora = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What a reward model gives each prompt, or each of its tokens, before any activation: `outputs.data`."""
        batch = as_batch(prompts)
        given = spread(pooling_params, len(batch), "pooling_params", PoolingParams(use_activation=False))
        params = [for_reward(p, self._client.info.pooler) for p in given]
        return [as_pooling(output) for output in self._pool(batch, params, use_tqdm, lora_request)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well each text of data_1 goes with that of data_2: `outputs.score`. One text goes with all others.

        Rerankers read both at once; embedders compare vectors, by cosine or, of multi-vector models, by MaxSim.
        """
        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        plan = plan_scores(self._client.info.pooler, first, second, instruction)
        params = for_task(pooling_params, plan.task, "score")
        if truncate_prompt_tokens is not None:
            params = msgspec.structs.replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
        outputs = self._pool(plan.prompts, [params] * len(plan.prompts), use_tqdm, lora_request)
        scores = plan.scores([values_of(output) for output in outputs])
        return [
            scored(as_pooling(outputs[one]), as_pooling(outputs[two]), value)
            for (one, two), value in zip(plan.pairs, scores, strict=True)
        ]

    def _pool(
        self,
        batch: Sequence[Prompt | TextPair | LateText],
        params: list[PoolingParams],
        use_tqdm: bool,
        lora_request: Lora,
        prompt_name: str | None = None,
        instruction: str | None = None,
    ) -> list[RequestOutput]:
        adapters = spread(lora_request, len(batch), "lora_request", None)

        def prepare(index: int) -> PreparedRequest:
            return self._inputs.process_pooling(
                batch[index],
                params[index],
                prompt_name=prompt_name,
                instruction=instruction,
                request_id=next(self._ids),
                adapter=find_adapter(adapters[index]),
            )

        return self._run(len(batch), prepare, use_tqdm, _STEPS_AHEAD * self._client.info.max_num_batched_tokens)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the completions of each prompt with the highest probability, in the order of the prompts.

        `concurrency_limit` is the most prompts that are searched for at a time; without it, all are.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is {params!r} but must be BeamSearchParams(...)", "params")
        batch, checked = as_batch(prompts), SamplingParams(max_tokens=params.max_tokens)
        vocab_size, size = self._client.info.vocab_size, concurrency_limit or max(1, len(batch))
        searches = [BeamSearch(params, self._prepare(prompt, checked, "final_only"), vocab_size) for prompt in batch]
        with make_progress(len(searches), use_tqdm) as progress:
            for first in range(0, len(searches), size):
                group = searches[first : first + size]
                run_searches(group, partial(self.generate, use_tqdm=False))
                progress.advance(len(group), 0)
        return [search.output(self._text.tokenizer) for search in searches]

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Complete a prompt, or answer a conversation, piece by piece. Closing the generator aborts the request."""
        if is_conversation(prompt):
            params = sampling_params or self._text.chat_params()
            rendered = self._text.render_chat(prompt)
            return self._stream(self._prepare(rendered, params, "delta", add_special_tokens=False))
        params = sampling_params or self.get_default_sampling_params()
        return self._stream(self._prepare(cast(Prompt, prompt), params, "delta"))

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its output."""
        return self._client.info.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        if self._text.tokenizer is None:
            raise RequestError("this LLM has no tokenizer; it takes prompt_token_ids only")
        return self._text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json suggests, over SamplingParams' own defaults."""
        return self._text.defaults.params

    def shutdown(self) -> None:
        """Stop the engine and free its memory; streams that are open end with EngineDeadError."""
        with self._turn:
            self._end_all("the engine was shut down")
            self._client.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        kind: OutputKind,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        lora: LoRARequest | None = None,
    ) -> PreparedRequest:
        if isinstance(params, SamplingParams) and params.output_kind != kind:
            params = msgspec.structs.replace(params, output_kind=kind)
        return self._inputs.process(
            prompt,
            params,
            request_id=next(self._ids),
            priority=priority,
            add_special_tokens=add_special_tokens,
            adapter=find_adapter(lora),
        )

    def _run(
        self, count: int, prepare: Callable[[int], PreparedRequest], use_tqdm: bool, most_ahead: int = 0
    ) -> list[RequestOutput]:
        """Submit requests, wait for all; when the engine has `most_ahead` tokens to compute, a step comes first."""
        batch = Batch(count)

        def take_step(progress: NullProgress) -> None:
            heard, num_tokens = self._pump()
            done = [request_id for request_id in heard if request_id in batch.waiting]
            for request_id in done:
                batch.end(request_id, self._mailboxes.pop(request_id).take)
            progress.advance(len(done), num_tokens)

        with self._turn:
            try:
                with spared_heap(), make_progress(count, use_tqdm) as progress:
                    for index in range(count):
                        try:
                            request = prepare(index)
                            self._submit(request)
                            batch.add(index, request)
                        except RequestError as error:
                            batch.fail(index, error)
                            progress.advance(1, 0)
                        while 0 < most_ahead <= batch.num_tokens:
                            take_step(progress)
                    with interrupt_afterwards() as raise_interrupt:
                        while batch.waiting:
                            take_step(progress)
                            raise_interrupt()
            finally:
                self._abort(list(batch.waiting))
        return batch.results()

    def _stream(self, request: PreparedRequest) -> Generator[RequestOutput, None, None]:
        with self._turn:
            request_id = self._submit(request)
            mailbox = self._mailboxes[request_id]
        try:
            finished = False
            while not finished:
                with self._turn:
                    while (output := mailbox.take()) is None:
                        self._pump()
                finished = output.finished
                yield output
        finally:
            with self._turn:
                self._abort([request_id])

    def _submit(self, request: PreparedRequest) -> str:
        self.check_awake()
        self._outputs.add(request)
        self._mailboxes[request.request_id] = Mailbox(request.params.output_kind)
        sent = False
        try:
            if request.children[0].grammar is not None and not self._vocabulary_is_known:
                self._client.call("set_vocabulary", self._inputs.vocabulary())
                self._vocabulary_is_known = True
            for child in request.children:
                self._client.add_request(child)
            sent = True
        finally:
            if not sent:
                self._abort([request.request_id])
        return request.request_id

    def _pump(self) -> tuple[list[str], int]:
        """Let the engine finish a step and hand out what it said: the requests heard of, the tokens generated."""
        self.check_awake()
        with interrupt_afterwards():
            try:
                batch = self._client.get_outputs()
                outputs = batch.outputs
                add_counts(self.expert_load, batch.stats)
                if not outputs and len(self._outputs) > 0 and not self._client.has_unfinished():
                    raise EngineDeadError("the engine stopped working before every request had finished")
            except EngineError as error:
                self._end_all(str(error))
                raise
            return self._hand_out(outputs), sum(len(output.token_ids) for output in outputs)

    def finish_open(self) -> None:
        while len(self._outputs) > 0:
            self._pump()

    def _hand_out(self, outputs: list[EngineOutput]) -> list[str]:
        result = self._outputs.process(outputs)
        if result.aborts:
            self._client.abort(result.aborts)
        for output in result.outputs:
            self._mailboxes[output.request_id].put(output)
        for failure in result.failures:
            self._mailboxes[failure.request_id].fail(failure)
        return [each.request_id for each in (*result.outputs, *result.failures)]

    def _abort(self, request_ids: list[str]) -> None:
        """Forget requests here and in the engine; those that have finished are merely forgotten."""
        engine_ids: list[str] = []
        for request_id in request_ids:
            self._mailboxes.pop(request_id, None)
            engine_ids += self._outputs.abort(request_id)[0]
        if engine_ids:
            self._client.abort(engine_ids)
        # The engine runs only when it is asked for outputs. The last one out lets it free what was aborted.
        while self._alive and len(self._outputs) == 0 and self._client.has_unfinished():
            self._pump()

    def _end_all(self, reason: str) -> None:
        """No request will hear from the engine again: each ends with EngineDeadError."""
        self._alive = False
        for request_id in self._outputs.clear(reason):
            self._mailboxes[request_id].fail(EngineDeadError(reason))
