"""Turns a prompt and its SamplingParams into EngineRequests: text to token ids, checked against the model's limits.

Knows the tokenizer and the model's limits; knows nothing of scheduling, and does not talk to the engine.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import msgspec

from quire.frontend.infill import find_infill
from quire.frontend.pooled import as_shown, filled, prefix_of, with_prefix
from quire.frontend.prompt_embeds import read_prompt_embeds
from quire.frontend.scoring import LateText, TextPair
from quire.frontend.tokenizer import Tokenizer, TooManyTokensError
from quire.structured.sources import make_source
from quire.types.errors import ContextLengthError, RequestError, WrongTaskError
from quire.types.messages import EngineInfo
from quire.types.pooling import PoolerConfig, able_tasks, only_pools
from quire.types.request import AdapterRef, EngineRequest, PromptEmbeds
from quire.types.sampling import MAX_THINKING_MARK, PoolingParams, SamplingParams, ThinkingMarks
from quire.types.structured import GrammarSource, Vocabulary

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text; token ids; or a dict with "prompt" or "prompt_token_ids" (or both), and optionally "cache_salt" and "suffix".

With a suffix, the model fills in what stands between the prompt and the suffix. A "prediction", text or token ids, is
what the output will be much like: its tokens are drafts. No outputs of one "tenant" are drafts for another.
Requests of one "session" stay in one replica. Instead of text or token ids there may be "prompt_embeds", where they
are enabled: an array [tokens, hidden size] of what the first layer is to read.
"""

FindThinking = Callable[[str | None, list[int]], ThinkingMarks | None]
"""From a prompt's text, if there is any, and its token ids to the marks of thinking, for a model that thinks."""

_PROMPT_KEYS = frozenset(
    {"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "suffix", "prediction", "tenant", "session"}
)
_Dict = Mapping[str, Any]
_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, the increment of SplitMix64


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One checked request: what the caller asked for, and the engine requests (one per completion) it becomes."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    children: tuple[EngineRequest, ...]
    trace_headers: Mapping[str, str] | None = None
    """The caller's trace context: traceparent, tracestate."""

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.children[0].token_ids


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index`: the request's own for 0, else output `index` of SplitMix64 seeded with it."""
    if index == 0:
        return seed & _MASK_64
    z = (seed + index * _GOLDEN_64) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def child_id(request_id: str, index: int, n: int) -> str:
    """The engine's name for completion `index` of a request: the request's own name when there is only one."""
    return request_id if n == 1 else f"{index}_{request_id}"


class InputProcessor:
    """Builds EngineRequests, one per frontend. Keeps the generator of seeds and the last pooling parameters."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        info: EngineInfo,
        default_params: SamplingParams | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        seed: int | None = None,
        thinking: FindThinking | None = None,
    ) -> None:
        """`extra_eos_token_ids` end the output besides the tokenizer's own, e.g. those of generation_config.json.

        Requests without a seed get one that is generated from `seed`, in their order; without `seed`, a random one.
        `thinking` finds the marks of thinking for requests with a budget of it; without it the model does not think.
        """
        self._tokenizer = tokenizer
        self._info = info
        self._find_thinking = thinking
        self.default_params = default_params or SamplingParams()
        eos = dict.fromkeys((*(tokenizer.eos_token_ids if tokenizer else ()), *extra_eos_token_ids))
        self._draw_bits = secrets.randbits if seed is None else random.Random(seed).getrandbits
        self._eos_token_ids = tuple(token for token in eos if 0 <= token < info.vocab_size)
        self._pooling: tuple[PoolingParams | None, PoolingParams, SamplingParams]
        self._pooling = None, PoolingParams(), self.default_params

    def set_info(self, info: EngineInfo) -> None:
        """Another engine of the same model serves from now on; its limits may differ."""
        self._info = info
        self._pooling = None, *self._pooling[1:]

    @property
    def _longest_prompt(self) -> int:
        # What generates needs room for a token.
        return self._info.max_model_len - (not only_pools(self._info.pooler))

    @property
    def takes_grammars(self) -> bool:
        """Whether there is a tokenizer that grammars could be about, with a token that ends an output."""
        return self._tokenizer is not None and bool(self._eos_token_ids)

    def vocabulary(self) -> Vocabulary:
        """What the tokens stand for, which the engine has to know before its first grammar. Takes a while."""
        tokenizer, size = self._tokenizer, self._info.vocab_size
        assert tokenizer is not None, "no request with a grammar is made without a tokenizer"
        return Vocabulary(
            [tokenizer.token_bytes(token) for token in range(size)],
            [token for token in range(size) if tokenizer.is_special(token)],
            list(self._eos_token_ids),
        )

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
        trace_headers: Mapping[str, str] | None = None,
        arrival_time: float | None = None,
        adapter: AdapterRef | None = None,
    ) -> PreparedRequest:
        """Check everything that can be wrong with a request, before it is sent to the engine.

        `arrival_time` is on the monotonic clock; without it the request arrives now.
        """
        self._check_adapter(adapter)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params is {_short(params)} but must be SamplingParams(...)", "sampling_params"
            )
        if type(priority) is not int:
            raise RequestError(f"priority is {_short(priority)} but must be an integer", "priority")
        request_id = secrets.token_hex(8) if request_id is None else request_id
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id is {request_id!r} but must be a string that is not empty", "request_id")
        if only_pools(self._info.pooler):
            raise WrongTaskError("generate", able_tasks(self._info.pooler))
        embeds = self._read_embeds(prompt, params)
        speculation = self._read_speculation(prompt)
        if embeds is not None:  # what the tokens are is not known; there are as many
            prompt = {"prompt_token_ids": [0] * embeds.shape[0], "cache_salt": cast(_Dict, prompt).get("cache_salt")}
        text, token_ids, cache_salt = self._read_prompt(prompt, params, add_special_tokens)
        eos_token_ids = self._eos_token_ids
        if (suffix := _suffix(prompt)) is not None:
            token_ids, ends = self._fill_in(token_ids, suffix, params, add_special_tokens)
            eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *ends)))
        token_ids = self._fit(token_ids, params)
        self._check_params(params)
        grammar = self._make_grammar(params)
        if params.thinking_token_budget is not None and params.thinking_marks is None and self._find_thinking:
            params = msgspec.structs.replace(params, thinking_marks=self._find_thinking(text, token_ids))
        children = self._fan_out(
            request_id, token_ids, params, priority, cache_salt, grammar, arrival_time, eos_token_ids
        )
        if embeds is not None or adapter is not None or speculation:
            more = {"prompt_embeds": embeds, "adapter": adapter, **speculation}
            children = tuple(msgspec.structs.replace(child, **more) for child in children)
        return PreparedRequest(
            request_id=request_id,
            prompt=text,
            params=params,
            children=children,
            trace_headers=trace_headers,
        )

    def process_pooling(
        self,
        prompt: Prompt | TextPair | LateText,
        params: PoolingParams | None = None,
        *,
        prompt_name: str | None = None,
        instruction: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        arrival_time: float | None = None,
        adapter: AdapterRef | None = None,
    ) -> PreparedRequest:
        """The same for a prompt that is pooled. `prompt_name`: which of the model's own goes before a text;
        `instruction`: what goes before it instead."""
        self._check_adapter(adapter)
        pooler = self._info.pooler
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise RequestError(f"pooling_params is {_short(params)} but must be PoolingParams(...)", "pooling_params")
        if pooler is None:
            raise WrongTaskError(params.task or "embed", ("generate",))
        given, told, shown = self._pooling  # of the last request: those of a batch are alike
        if given is not params and given != params:
            told, shown = filled(params, pooler, self._tokenizer), as_shown(params)
            self._pooling = params, told, shown
        request_id = secrets.token_hex(8) if request_id is None else request_id
        text: str | None = None
        cache_salt: str | None = None
        if isinstance(prompt, TextPair):
            token_ids, second_text_at = self._encode_pair(prompt, pooler, params.truncate_prompt_tokens)
            told = msgspec.structs.replace(told, second_text_at=second_text_at)
        elif isinstance(prompt, LateText):
            text, token_ids, cache_salt = self._read_prompt(prompt.marked(pooler), shown, True)
            if params.truncate_prompt_tokens is not None:
                token_ids = self._keep_last_tokens(token_ids, params.truncate_prompt_tokens)
            if prompt.is_document and pooler.skiplist:
                told = msgspec.structs.replace(told, skip_token_ids=self._ids_of(pooler.skiplist))
            elif not prompt.is_document and pooler.query_length is not None:
                if not pooler.attends_to_masks:
                    told = msgspec.structs.replace(told, attended_tokens=len(token_ids))
                token_ids = token_ids + [self._mask_token()] * (pooler.query_length - len(token_ids))
        else:
            prefix = prefix_of(pooler, prompt_name, instruction)
            text, token_ids, cache_salt = self._read_prompt(with_prefix(prompt, prefix), shown, True)
            is_text = text is not None and not (isinstance(prompt, Mapping) and prompt.get("prompt_token_ids"))
            if is_text and params.truncate_prompt_tokens is not None:
                token_ids = self._keep_last_tokens(token_ids, params.truncate_prompt_tokens)
        token_ids = self._fit(token_ids, shown)
        if told.step_tag_id is not None and told.step_tag_id not in token_ids:
            raise RequestError(
                f"step_tag_id is {told.step_tag_id}, which is no token of the prompt; end each step with this token",
                "step_tag_id",
            )
        if told.skip_token_ids and not set(token_ids).difference(told.skip_token_ids):
            raise RequestError("all of the prompt's tokens are such that have no vector; give a text", "prompt")
        child = EngineRequest(
            request_id=request_id,
            token_ids=token_ids,
            params=told,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            adapter=adapter,
        )
        return PreparedRequest(request_id, text, shown, (child,), trace_headers)

    def _check_adapter(self, adapter: AdapterRef | None) -> None:
        if adapter is not None and not self._info.takes_adapters:
            raise RequestError("this engine serves no LoRA adapters; start it with --enable-lora", "lora_request")

    def _encode_pair(self, pair: TextPair, pooler: PoolerConfig, keep: int | None) -> tuple[list[int], int | None]:
        """(token ids, where the second text's type begins); to fit, the document is cut at its end."""
        if self._tokenizer is None:
            raise RequestError("a pair of texts needs a tokenizer, and there is none", "prompt")
        if not pair.query or not pair.document:
            raise RequestError("a text of a pair is empty; give at least one character", "prompt")
        most = None if keep is None else self._longest_prompt if keep == -1 else min(keep, self._longest_prompt)
        parts = ("", pair.query, pair.document, "")
        if pooler.score_template is not None:
            first, document, last = pair.filled(pooler.score_template)
            parts = (first, "", document, last)
        try:
            ids, second_text_at = self._tokenizer.encode_pair(*parts, most=most, longest=self._longest_prompt)
        except TooManyTokensError as error:
            raise self._too_long(error.num_tokens, exact=error.exact) from error
        self._check_token_ids("prompt", (min(ids), max(ids)))
        return ids, second_text_at

    def _ids_of(self, tokens: Iterable[str]) -> tuple[int, ...]:
        assert self._tokenizer is not None
        found = map(self._tokenizer.backend.token_to_id, tokens)
        return tuple(token for token in found if token is not None)

    def _mask_token(self) -> int:
        assert self._tokenizer is not None
        named = self._tokenizer.special_tokens
        name = named.get("mask_token") or named.get("eos_token")  # the latter as PyLate has it
        if name is None:
            raise RequestError("queries of this model are filled up with mask tokens, which its tokenizer has not")
        return self._ids_of((name,))[0]

    def _keep_last_tokens(self, token_ids: list[int], keep: int) -> list[int]:
        """Cut a text so that the special tokens that the tokenizer puts at its end stay there."""
        assert self._tokenizer is not None
        last = self._tokenizer.ends[1]
        kept = self._longest_prompt if keep == -1 else min(keep, self._longest_prompt)
        if len(token_ids) <= kept or len(last) >= kept:
            return token_ids
        return token_ids[: kept - len(last)] + last

    def _too_long(self, num_tokens: int, *, exact: bool = True) -> ContextLengthError:
        pools = only_pools(self._info.pooler)
        return ContextLengthError(num_tokens, self._info.max_model_len, exact=exact, pools=pools)

    def _read_embeds(self, prompt: Prompt, params: SamplingParams) -> PromptEmbeds | None:
        if not isinstance(prompt, Mapping) or prompt.get("prompt_embeds") is None:
            return None
        for name in ("prompt", "prompt_token_ids", "suffix"):
            if prompt.get(name) is not None:
                raise RequestError(f"prompt_embeds is given with {name}; leave one of them out", "prompt_embeds")
        for name, unused in (
            ("prompt_logprobs", None),
            ("truncate_prompt_tokens", None),
            ("repetition_penalty", 1.0),
        ):
            if getattr(params, name) != unused:
                raise RequestError(f"{name} needs the tokens of a prompt, and prompt_embeds has none", name)
        return read_prompt_embeds(prompt["prompt_embeds"], self._info)

    def _make_grammar(self, params: SamplingParams) -> GrammarSource | None:
        if params.structured_outputs is None:
            return None
        if not self.takes_grammars:
            raise RequestError(
                "structured_outputs needs a tokenizer with an end-of-sequence token, and there is none",
                "structured_outputs",
            )
        return make_source(params.structured_outputs, self._info.grammar_limits)

    def _fan_out(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        grammar: GrammarSource | None,
        arrival_time: float,
        eos_token_ids: tuple[int, ...],
    ) -> tuple[EngineRequest, ...]:
        if params.return_routed_experts and not self._info.routes:
            raise RequestError(
                "return_routed_experts is set but the model has no experts, or is cut into stages; leave it out",
                "return_routed_experts",
            )
        max_tokens = self._info.max_model_len - len(token_ids)
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, params.max_tokens)
        # What only the frontend acts on stays here: the engine knows no text.
        first = params
        if params.n > 1 or params.stop or params.bad_words or grammar is not None:
            bad_words = params.bad_words_token_ids + self._encode_bad_words(params.bad_words)
            first = msgspec.structs.replace(
                params, n=1, stop=(), bad_words=(), bad_words_token_ids=bad_words, structured_outputs=None
            )
        # One completion is enough to learn the prompt's log-probabilities; the others may reuse its cached prefix.
        rest = first if first.prompt_logprobs is None else msgspec.structs.replace(first, prompt_logprobs=None)
        seed = self._draw_bits(64) if params.seed is None else params.seed
        return tuple(
            EngineRequest(
                request_id=child_id(request_id, index, params.n),
                token_ids=token_ids,
                params=rest if index else first,
                eos_token_ids=eos_token_ids,
                seed=child_seed(seed, index),
                max_tokens=max_tokens,
                priority=priority,
                cache_salt=cache_salt,
                arrival_time=arrival_time,
                grammar=grammar,
            )
            for index in range(params.n)
        )

    def _read_prompt(
        self, prompt: Prompt, params: SamplingParams, add_special_tokens: bool
    ) -> tuple[str | None, list[int], str | None]:
        """(text if there is any, token ids, cache salt) of any kind of prompt."""
        text: Any = None
        token_ids: Any = None
        cache_salt: Any = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            unknown = sorted(str(key) for key in prompt if key not in _PROMPT_KEYS)
            if unknown:
                raise RequestError(
                    f"unknown prompt key {unknown[0]!r}; known: {', '.join(sorted(_PROMPT_KEYS))}", "prompt"
                )
            text = prompt.get("prompt")
            token_ids = prompt.get("prompt_token_ids")
            cache_salt = prompt.get("cache_salt")
        elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            token_ids = prompt
        else:
            raise RequestError(
                f"a prompt of type {type(prompt).__name__} is not understood; give text, a list of token ids, or a"
                ' dict with "prompt" or "prompt_token_ids"',
                "prompt",
            )
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt is {_short(text)} but must be text", "prompt")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError(f"cache_salt is {_short(cache_salt)} but must be text that is not empty", "cache_salt")
        if token_ids is not None:
            return text, self._read_token_ids(token_ids, params), cache_salt
        if text is None:
            raise RequestError('the prompt is a dict without "prompt" or "prompt_token_ids"; give one', "prompt")
        if _suffix(prompt) is not None:  # what is filled in may begin the text; the tokenizer adds nothing inside it
            return text, self._encode(text, params, False) if text else [], cache_salt
        return text, self._encode(text, params, add_special_tokens), cache_salt

    def _read_speculation(self, prompt: Prompt) -> dict[str, Any]:
        """What a prompt says for drafts and replicas: predicted tokens, whose request it is, and of which session."""
        if not isinstance(prompt, Mapping):
            return {}
        found: dict[str, Any] = {}
        tenant, predicted = prompt.get("tenant"), prompt.get("prediction")
        if tenant is not None:
            if not isinstance(tenant, str):
                raise RequestError(f"tenant is {_short(tenant)} but must be text", "tenant")
            found["tenant"] = tenant
        if (session := prompt.get("session")) is not None:
            if not isinstance(session, str):
                raise RequestError(f"session is {_short(session)} but must be text", "session")
            named = blake2b(f"{tenant}/{session}".encode(errors="replace"), digest_size=6).digest()
            found["session"] = 1 + int.from_bytes(named)
        if predicted is None:
            return found
        # The output is no longer than this, and what differs at its end costs nothing but a few drafts.
        limit = self._info.max_model_len
        if isinstance(predicted, str):
            if self._tokenizer is None:
                raise RequestError("prediction needs a tokenizer, and there is none; give token ids", "prediction")
            predicted = self._tokenizer.encode_first(predicted, False, limit) if predicted else []
        elif not isinstance(predicted, Sequence) or not set(map(type, predicted)) <= {int}:
            raise RequestError(f"prediction is {_short(predicted)} but must be text or token ids", "prediction")
        ids = list(predicted[:limit])
        self._check_token_ids("prediction", (min(ids), max(ids)) if ids else ())
        return {**found, "prediction": ids}

    def _fill_in(
        self, prefix: list[int], suffix: Any, params: SamplingParams, add_special_tokens: bool
    ) -> tuple[list[int], tuple[int, ...]]:
        """A prompt that asks for what is between the two, and the tokens that end it."""
        if not isinstance(suffix, str):
            raise RequestError(f"suffix is {_short(suffix)} but must be text", "suffix")
        if params.truncate_prompt_tokens is not None:
            raise RequestError(
                "suffix is given with truncate_prompt_tokens, which would cut off what it needs; leave one out",
                "suffix",
            )
        if self._tokenizer is None:
            raise RequestError("suffix needs a tokenizer, and there is none", "suffix")
        infill = find_infill(self._tokenizer)
        try:
            ids = infill.token_ids(self._tokenizer, prefix, suffix, add_special_tokens, self._info.max_model_len - 1)
        except TooManyTokensError as error:
            raise ContextLengthError(error.num_tokens, self._info.max_model_len, exact=error.exact) from error
        self._check_token_ids("suffix", (min(ids), max(ids), *infill.end_ids))
        return ids, infill.end_ids

    def _read_token_ids(self, token_ids: Any, params: SamplingParams) -> list[int]:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes, bytearray)):
            raise RequestError(
                f"prompt_token_ids is {_short(token_ids)} but must be a list of token ids", "prompt_token_ids"
            )
        if params.truncate_prompt_tokens is None and len(token_ids) > self._longest_prompt:
            raise self._too_long(len(token_ids))
        ids = list(token_ids)
        if not set(map(type, ids)) <= {int}:
            wrong = next(token for token in ids if type(token) is not int)
            raise RequestError(
                f"prompt_token_ids holds {_short(wrong)} of type {type(wrong).__name__} but must hold integers only",
                "prompt_token_ids",
            )
        if ids:
            self._check_token_ids("prompt_token_ids", (min(ids), max(ids)))
        return ids

    def _encode(self, text: str, params: SamplingParams, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; give prompt_token_ids instead", "prompt")
        if not text:
            raise RequestError("the prompt is empty; give at least one character or token", "prompt")
        limit, keep = self._longest_prompt, params.truncate_prompt_tokens
        try:
            if keep is not None and params.truncation_side == "right":
                ids = self._tokenizer.encode_first(text, add_special_tokens, limit if keep == -1 else keep)
            elif keep is None:
                ids = self._tokenizer.encode(text, add_special_tokens, max_tokens=limit)
            else:
                ids = self._tokenizer.encode(text, add_special_tokens, keep_last=limit if keep == -1 else keep)
        except TooManyTokensError as error:
            raise self._too_long(error.num_tokens, exact=error.exact) from error
        if ids:  # a tokenizer may have tokens that were added after the model was trained
            self._check_token_ids("prompt", (min(ids), max(ids)))
        return ids

    def _fit(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Truncate as asked, then require at least one token and, to generate, room for at least one more."""
        keep = params.truncate_prompt_tokens
        if keep is not None:
            kept = self._longest_prompt if keep == -1 else keep
            token_ids = token_ids[:kept] if params.truncation_side == "right" else token_ids[-kept:]
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one character or token", "prompt")
        if len(token_ids) > self._longest_prompt:
            raise self._too_long(len(token_ids))
        return token_ids

    def _check_params(self, params: SamplingParams) -> None:
        vocab_size = self._info.vocab_size
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_token_ids("logit_bias", params.logit_bias or ())
        self._check_token_ids("logprob_token_ids", params.logprob_token_ids)
        marks = params.thinking_marks or ThinkingMarks()
        for ids in (marks.begin, marks.end):
            self._check_token_ids("thinking_marks", ids)
            if len(ids) > MAX_THINKING_MARK:
                raise RequestError(
                    f"thinking_marks has a mark of {len(ids)} tokens; give at most {MAX_THINKING_MARK}",
                    "thinking_marks",
                )
        for ids in params.bad_words_token_ids:
            self._check_token_ids("bad_words_token_ids", ids)
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise RequestError(
                    f"{name} is {count} but the model has {vocab_size} tokens; give at most that, or -1 for all", name
                )
        if self._tokenizer is None:
            for name, strings in (("stop", params.stop), ("bad_words", params.bad_words)):
                if strings:
                    raise RequestError(f"{name} is {strings!r} but text needs a tokenizer, and there is none", name)

    def _check_token_ids(self, field: str, token_ids: Iterable[int]) -> None:
        vocab_size = self._info.vocab_size
        for token in token_ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RequestError(
                    f"{field} holds {_short(token)} but token ids of this model go from 0 to {vocab_size - 1}"
                    f" (vocabulary of {vocab_size})",
                    field,
                )

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written at the start of a text and after a space, which are different tokens."""
        if not words or self._tokenizer is None:
            return ()
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            plain = tuple(self._tokenizer.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
            found[plain] = None
            # A spaced form that merely puts a space token first is banned already: its tail is.
            if spaced[-len(plain) :] != plain:
                found[spaced] = None
        return tuple(ids for ids in found if ids)


def _suffix(prompt: Prompt) -> Any:
    return prompt.get("suffix") if isinstance(prompt, Mapping) else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
