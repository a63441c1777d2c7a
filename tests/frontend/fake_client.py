"""Fakes for tests of the frontend: a byte-level tokenizer, and an engine that says what it is told to say."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quire.engine.client import EngineClient
from quire.frontend.text_model import GenerationDefaults, TextModel
from quire.frontend.tokenizer import Tokenizer
from quire.types.console import EngineView
from quire.types.errors import EngineDeadError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutput, EngineOutputs
from quire.types.pooling import PoolerConfig
from quire.types.request import EngineRequest, FinishReason
from quire.types.sampling import PoolingParams, SamplingParams
from quire.types.step import Pooled, TokenLogprobs
from quire.types.structured import Vocabulary

BOS, EOS = 256, 257
VOCAB_SIZE = 258
MAX_MODEL_LEN = 512
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 begins and 257 ends a sequence; no special token is added by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    others = iter(sorted(set(alphabet) - printable))
    vocab = {chr(b) if chr(b) in printable else next(others): b for b in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, (), {"default": CHAT_TEMPLATE})


TOKENIZER = byte_tokenizer()


def text_model(params: SamplingParams | None = None) -> TextModel:
    return TextModel(TOKENIZER, GenerationDefaults(params or SamplingParams(max_tokens=64)))


@dataclass
class Running:
    request: EngineRequest
    answer: Iterator[int]
    num_tokens: int = 0


Answer = Callable[[EngineRequest], Sequence[int]]


def echo(request: EngineRequest) -> Sequence[int]:
    return request.token_ids


class FakeClient(EngineClient):
    """Each step every request says the next `chunk` tokens of its answer, then end-of-sequence.

    With `one_by_one` only the first request that is not finished takes part in a step.
    A request that comes with outputs goes on after them.
    """

    def __init__(
        self,
        answer: Answer | str = echo,
        *,
        chunk: int = 1,
        one_by_one: bool = False,
        dies_at_step: int | None = None,
        errors: dict[str, str] | None = None,
    ) -> None:
        self.info = EngineInfo(VOCAB_SIZE, MAX_MODEL_LEN, 16, 64, 8)
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.num_resets = 0
        self.num_idle_captures = 0
        self.is_shut_down = False
        self.died = asyncio.Event()
        self.vocabulary: Vocabulary | None = None
        self._answer: Answer = (lambda request: list(answer.encode())) if isinstance(answer, str) else answer
        self._chunk = chunk
        self._one_by_one = one_by_one
        self._dies_at_step = dies_at_step
        self._errors = errors or {}
        self._running: dict[str, Running] = {}
        self._said: list[EngineOutput] = []
        self._wake = asyncio.Event()

    def add_request(self, request: EngineRequest) -> None:
        assert request.request_id not in self._running
        self.added.append(request)
        given = request.num_given_outputs
        prompt = request.token_ids[: request.num_prompt_tokens]
        answer = self._answer(msgspec.structs.replace(request, token_ids=prompt, num_prompt_tokens=None))
        self._running[request.request_id] = Running(request, islice(answer, given, None), given)
        self._wake.set()

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            if self._running.pop(request_id, None) is not None:
                self._said.append(EngineOutput(request_id, [], finish_reason="abort"))
        self._wake.set()

    def get_outputs(self) -> EngineOutputs:
        said, self._said = self._said, []
        if not self._running:
            return EngineOutputs(said)
        if self.num_steps == self._dies_at_step:
            self.died.set()
            raise EngineDeadError("the fake engine died as it was told to")
        self.num_steps += 1
        chosen = list(self._running.values())[: 1 if self._one_by_one else None]
        return EngineOutputs(said + [self._step(running) for running in chosen])

    async def get_outputs_async(self) -> EngineOutputs:
        await asyncio.sleep(0)
        while not self.has_unfinished():
            self._wake.clear()
            await self._wake.wait()
        return self.get_outputs()

    def take_received(self) -> list[EngineOutput]:
        said, self._said = self._said, []
        return said

    def has_unfinished(self) -> bool:
        return bool(self._running or self._said)

    def call(self, verb: str, argument: object = None, *, limit: float | None = None) -> EngineView | None:
        if verb == "console":
            return EngineView()
        if verb == "set_vocabulary":
            assert isinstance(argument, Vocabulary)
            self.vocabulary = argument
        elif verb == "capture_next":
            self.num_idle_captures += 1  # there is nothing to capture
        else:
            assert verb == "reset_prefix_cache"
            self.num_resets += 1
        return None

    async def call_async(
        self, verb: str, argument: object = None, *, limit: float | None = None
    ) -> EngineView | None:
        return self.call(verb, argument)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _step(self, running: Running) -> EngineOutput:
        request = running.request
        params = request.params
        assert isinstance(params, SamplingParams)
        tokens: list[int] = []
        prompt_logprobs: list[TokenLogprobs] | None = None
        first = running.num_tokens == 0
        if first and params.prompt_logprobs is not None:
            prompt_logprobs = [logprobs_of(token, params.prompt_logprobs) for token in request.token_ids[1:]]
        reason: FinishReason | None = "error" if request.request_id in self._errors else None
        stop_reason = None
        while len(tokens) < self._chunk and reason is None:
            token = next(running.answer, EOS)
            tokens.append(token)
            running.num_tokens += 1
            if token in request.eos_token_ids and not params.ignore_eos:
                reason = "stop"
            elif token in params.stop_token_ids:
                reason, stop_reason = "stop", token
            elif running.num_tokens == request.max_tokens:
                reason = "length"
        if reason is not None:
            del self._running[request.request_id]
        return EngineOutput(
            request.request_id,
            tokens,
            reason,
            stop_reason,
            None
            if params.logprobs is None
            else [logprobs_of(token, params.logprobs, params.logprob_token_ids) for token in tokens],
            prompt_logprobs,
            0 if first else -1,
            self._errors.get(request.request_id),
        )


class PoolingClient(FakeClient):
    """Embeds: the vector of a prompt is its length, its first token and its last one."""

    def __init__(self, **pooler: Any) -> None:
        super().__init__()
        self.info = msgspec.structs.replace(self.info, pooler=PoolerConfig(pooler.pop("kind", "mean"), 3, **pooler))

    def _step(self, running: Running) -> EngineOutput:
        request = running.request
        params = request.params
        assert isinstance(params, PoolingParams)
        del self._running[request.request_id]
        tokens = request.token_ids
        values = self.values(tokens)[: params.dimensions]
        vectors = values * len(tokens) if params.pooling == "all" else values
        shape = (len(tokens), len(values)) if params.pooling == "all" else (len(values),)
        pooled = Pooled(array("f", vectors).tobytes(), shape)
        return EngineOutput(request.request_id, [], "stop", num_cached_tokens=0, pooled=pooled)

    def values(self, tokens: list[int]) -> list[float]:
        return [float(len(tokens)), float(tokens[0]), float(tokens[-1])]


class ClassifyingClient(PoolingClient):
    """Classifies: the more of a prompt is the letter x, the more it is of the last class."""

    def __init__(self, *labels: str, **pooler: Any) -> None:
        one = len(labels) == 1
        given: dict[str, Any] = {
            "kind": "cls",
            "tasks": ("classify",),
            "heads": {"classify": ()},
            "labels": labels,
            "activation": "sigmoid" if one else "softmax",
            "score": "cross" if one else None,
        }
        super().__init__(**{**given, **pooler})

    def values(self, tokens: list[int]) -> list[float]:
        share = sum(token == ord("x") for token in tokens) / len(tokens)
        assert self.info.pooler is not None
        rest = len(self.info.pooler.labels) - 1
        return [*[(1 - share) / max(1, rest)] * rest, share]


def logprobs_of(token: int, count: int, asked: Sequence[int] = ()) -> TokenLogprobs:
    """The chosen token is always the second likeliest; each rank is less likely than the one before by 1.

    Tokens that are asked for by id are said to have their ids as ranks.
    """
    likeliest = [(token + 1 + i) % VOCAB_SIZE if i != 1 else token for i in range(count)]
    logprobs = [-2.0, *(-1.0 - i for i in range(count)), *(float(-other) for other in asked)]
    return TokenLogprobs([token, *likeliest, *asked], logprobs, 2, list(asked))
