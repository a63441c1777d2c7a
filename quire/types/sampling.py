"""What a caller may ask of generation: SamplingParams, and PoolingParams for models that do not generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec

from quire.types.errors import RequestError, require
from quire.types.structured import StructuredOutputsParams

# Below this, dividing logits by the temperature overflows float32; it is treated as greedy.
MIN_TEMPERATURE = 1e-5
# Far beyond these a logit, multiplied and divided by all of them, would no longer be a finite float32.
MAX_TEMPERATURE = 1e6
MAX_REPETITION_PENALTY = 1e6
MAX_LOGIT_BIAS = 1e12
MAX_LOGPROBS = 1 << 20
MAX_LOGPROB_TOKEN_IDS = 1024  # each is one more pass over a row's logits in every step
MAX_PATTERN_SIZE = 2048  # every distance up to it may be looked at after each token
MAX_STOP_STRINGS = 1024  # each is looked for after every token
MAX_BAD_WORDS = 1024  # each is tokenized twice and compared with the last tokens in every step
MAX_BAD_WORD_LENGTH = 1024  # characters
MAX_THINKING_BUDGET = 1 << 40
MAX_THINKING_MARK = 16  # tokens of a mark that begins or ends thinking

_INTEGERS = ("n", "top_k", "min_tokens", "stream_interval")
_OPTIONAL_INTEGERS = (
    *("seed", "max_tokens", "logprobs", "prompt_logprobs"),
    *("truncate_prompt_tokens", "thinking_token_budget"),
)
_NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_BOOLEANS = (
    *("ignore_eos", "detokenize", "skip_special_tokens", "speculate"),
    *("spaces_between_special_tokens", "include_stop_str_in_output"),
)
# Fields, the types that each may be of, and how that is said.
_EXACT: tuple[tuple[str, frozenset[type], str], ...] = (
    *((name, frozenset({int}), "an integer") for name in _INTEGERS),
    *((name, frozenset({int, type(None)}), "an integer") for name in _OPTIONAL_INTEGERS),
    *((name, frozenset({bool}), "True or False") for name in _BOOLEANS),
)
_DETECTION = "repetition_detection"
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids")

OutputKind = Literal["cumulative", "delta", "final_only"]
Side = Literal["left", "right"]
_CHOICES = (
    ("truncation_side", get_args(Side), "left or right"),
    ("output_kind", get_args(OutputKind), "cumulative, delta or final_only"),
)
PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "sparse"]
PoolingKind = Literal["cls", "last", "mean", "all", "step", "max"]
Activation = Literal["none", "normalize", "sigmoid", "softmax", "relu", "log1p_relu"]


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When an output that repeats itself ends. Names and meanings follow vLLM's class of this name."""

    max_pattern_size: int = 0
    """The longest pattern of tokens that is looked for; 0 looks for none."""
    min_pattern_size: int = 0
    """The shortest one; 0 is 1."""
    min_count: int = 0
    """End the output when its last tokens are a pattern this many times in a row; at least 2."""

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            value, field = getattr(self, name), f"{_DETECTION}.{name}"
            require(type(value) is int and value >= 0, field, value, "an integer, 0 or more")
        largest = self.max_pattern_size
        within = largest <= MAX_PATTERN_SIZE
        require(within, f"{_DETECTION}.max_pattern_size", largest, f"at most {MAX_PATTERN_SIZE}")
        least, allowed = self.min_pattern_size, f"at most max_pattern_size ({largest})"
        require(least <= largest, f"{_DETECTION}.min_pattern_size", least, allowed)
        require(self.min_count >= 2 or largest == 0, f"{_DETECTION}.min_count", self.min_count, "at least 2")


class ThinkingMarks(msgspec.Struct, frozen=True, array_like=True):
    """The tokens between which a model thinks."""

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()  # none: thinking cannot be ended
    is_open: bool = False  # whether the prompt ends inside of thinking


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """How to choose tokens and when to stop. Names and meanings follow vLLM's class of the same name."""

    n: int = 1
    """How many completions to make of one prompt."""
    presence_penalty: float = 0.0
    """Added once, with a minus sign, to the logit of every token already in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Like presence_penalty, but times the number of occurrences."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or output; above 0."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one."""
    seed: int | None = None
    """Makes sampling reproducible; without it the request gets a random seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of it unless include_stop_str_in_output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """The most tokens to generate; None goes on to the model's limit."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are impossible before this many tokens."""
    logprobs: int | None = None
    """Return the top-k log-probabilities, k being this number, and the sampled token's; -1 for all."""
    prompt_logprobs: int | None = None
    """The same for each prompt token after the first."""
    logprob_token_ids: tuple[int, ...] = ()
    """Return the log-probabilities of these token ids too, at every position; without logprobs, as if it were 0."""
    detokenize: bool = True
    """Turn tokens into text; without it only token ids are returned."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens, where they are kept in the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's tokens; -1 keeps as many as the model takes."""
    truncation_side: Side = "left"
    """Where tokens are cut off a prompt that is truncated: left keeps the last ones, right the first."""
    output_kind: OutputKind = "cumulative"
    """What each streamed output holds: everything so far, what is new, or one output at the end."""
    stream_interval: int = 1
    """Tokens in each streamed output; the first and the last output of a completion come at once."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """If given, no other token can be chosen."""
    bad_words: tuple[str, ...] = ()
    """Words that must not be generated."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """bad_words as token ids. The frontend fills this in: the engine knows no text."""
    structured_outputs: StructuredOutputsParams | None = None
    """A schema, a regular expression, choices or a grammar that the output obeys."""
    repetition_detection: RepetitionDetectionParams | None = None
    """End an output that repeats itself, with the finish reason "repetition"."""
    thinking_token_budget: int | None = None
    """The most tokens of thinking: the mark that ends it is forced then, where the model's format has one."""
    thinking_marks: ThinkingMarks | None = None
    """The marks of thinking as token ids. The frontend fills this in: the engine knows no text."""
    speculate: bool = True
    """Let steps verify draft tokens, where speculation is on. Off: one token a step; the tokens are the same."""
    return_routed_experts: bool = False
    """Return which experts every token was routed to. No cached prefix is used, and steps run eagerly."""
    extra_args: dict[str, Any] | None = None
    """Values for plug-ins; Quire itself reads none."""

    def __post_init__(self) -> None:
        # Lists and single strings are accepted for convenience; stored as tuples, so params are hashable data.
        for name in _LISTS:
            value = getattr(self, name)
            if isinstance(value, str):
                msgspec.structs.force_setattr(self, name, (value,))
            elif isinstance(value, (list, set, frozenset)) or (value is None and name != "allowed_token_ids"):
                msgspec.structs.force_setattr(self, name, tuple(value or ()))
        self._check_types()
        self._check_values()
        if self.logprob_token_ids and self.logprobs is None:
            msgspec.structs.force_setattr(self, "logprobs", 0)

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def _check_types(self) -> None:
        for name, kinds, allowed in _EXACT:
            if type(value := getattr(self, name)) not in kinds:
                require(False, name, value, allowed)
        for name in _NUMBERS:
            if not isinstance(value := getattr(self, name), int | float):
                require(False, name, value, "a number")
        for name in _LISTS:
            is_list = isinstance(value := getattr(self, name), tuple)
            if not is_list and (value is not None or name != "allowed_token_ids"):
                require(False, name, value, "a list")
        for name in ("stop", "bad_words"):
            strings = getattr(self, name)
            require(all(isinstance(string, str) for string in strings), name, strings, "strings")
        bias = self.logit_bias
        numbers = bias is None or (isinstance(bias, dict) and all(isinstance(b, int | float) for b in bias.values()))
        require(numbers, "logit_bias", bias, "a dict from token ids to numbers")
        for name, kind in (("structured_outputs", StructuredOutputsParams), (_DETECTION, RepetitionDetectionParams)):
            if (value := getattr(self, name)) is not None and not isinstance(value, kind):
                require(False, name, value, f"{kind.__name__}(...)")
        for name, choices, allowed in _CHOICES:
            require(getattr(self, name) in choices, name, getattr(self, name), allowed)

    def _check_values(self) -> None:
        for name, most, kind in _COUNTS:
            count = len(getattr(self, name))
            if count > most:
                raise RequestError(f"{name} holds {count} {kind}; give at most {most}", name)
        for name, holds, allowed in _RULES:
            if (value := getattr(self, name)) is not None and not holds(value):
                require(False, name, value, allowed)
        for name, low, high in _RANGES:
            if not low <= (value := getattr(self, name)) <= high:
                require(False, name, value, f"between {low:g} and {high:g}")
        most_tokens, least_tokens = self.max_tokens, self.min_tokens
        if most_tokens is not None and least_tokens > most_tokens:
            require(False, "min_tokens", least_tokens, f"at most max_tokens ({most_tokens})")
        in_text = not self.stop or self.detokenize
        require(in_text, "stop", self.stop, "used with detokenize=True: it is matched in text")
        longest = max(map(len, self.bad_words), default=0)
        if longest > MAX_BAD_WORD_LENGTH:
            raise RequestError(
                f"bad_words holds a word of {longest} characters; give at most {MAX_BAD_WORD_LENGTH} of each",
                "bad_words",
            )
        for token, bias in (self.logit_bias or {}).items():
            allowed = f"between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}"
            require(abs(bias) <= MAX_LOGIT_BIAS, "logit_bias", f"{token}: {bias}", allowed)


# What fields that are not None must be, and how that is said.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", lambda n: n >= 1, "at least 1"),
    ("top_p", lambda p: 0.0 < p <= 1.0, "in (0, 1]"),
    ("top_k", lambda k: k >= -1, "-1, 0 (both: keep all) or positive"),
    ("seed", lambda seed: -(1 << 63) <= seed < (1 << 64), "a 64-bit integer"),
    ("max_tokens", lambda count: count >= 1, "at least 1 or None"),
    ("min_tokens", lambda count: count >= 0, "0 or more"),
    ("logprobs", lambda count: -1 <= count <= MAX_LOGPROBS, "-1 (all), 0 or positive"),
    ("prompt_logprobs", lambda count: -1 <= count <= MAX_LOGPROBS, "-1 (all), 0 or positive"),
    ("thinking_token_budget", lambda count: 0 <= count <= MAX_THINKING_BUDGET, "0 or positive"),
    ("truncate_prompt_tokens", lambda count: count == -1 or count >= 1, "-1 (the model's limit) or positive"),
    ("stream_interval", lambda count: count >= 1, "at least 1"),
    ("stop", all, "strings that are not empty"),
    ("bad_words", lambda words: all(word.strip() for word in words), "words, not blanks"),
    ("allowed_token_ids", bool, "None or a list with at least one token id"),
)
_RANGES = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    ("temperature", 0.0, MAX_TEMPERATURE),
    ("min_p", 0.0, 1.0),
)
_COUNTS = (
    ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS, "token ids"),
    ("stop", MAX_STOP_STRINGS, "strings"),
    ("bad_words", MAX_BAD_WORDS, "words"),
)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """What to read from a model that pools. Names and meanings follow vLLM's class of the same name."""

    task: PoolingTask | None = None
    """None: what the model is for. embed: one vector for the prompt; classify: a value for each class; token_embed
    and token_classify: the same of each of the prompt's tokens; sparse: a weight of each token of the vocabulary."""
    use_activation: bool | None = None
    """Scale a vector to length 1, make probabilities of logits; None: as the model's folder says, or on."""
    dimensions: int | None = None
    """Keep only this many of a vector's first values, of models trained for that (Matryoshka)."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's first tokens; -1 keeps as many as the model takes."""
    step_tag_id: int | None = None
    """Of token_embed and token_classify: only this token's values, which ends a step for process reward models."""
    pooling: PoolingKind | None = None
    """Which hidden states become the vector. The frontend fills in this and what follows, as the model has it."""
    head: str | None = None
    """The layers of the model that the vector goes through."""
    activation: Activation | None = None
    """What is done to the result; None: `normalize`, unless use_activation is False."""
    label_token_ids: tuple[int, ...] = ()
    """Classes are these tokens: a class's value is the logit of its token. Of two, the second's minus the first's."""
    skip_token_ids: tuple[int, ...] = ()
    """Of token_embed: tokens without a vector."""
    second_text_at: int | None = None
    """Index of the first token of the second text of a pair, where the model's tokens have types."""
    attended_tokens: int | None = None
    """Tokens attend to this many of the prompt's first ones, where attention is bidirectional; None: to all."""

    def __post_init__(self) -> None:
        tasks = get_args(PoolingTask)
        require(self.task is None or self.task in tasks, "task", self.task, f"one of {', '.join(tasks)}")
        active = self.use_activation
        require(active is None or isinstance(active, bool), "use_activation", active, "True, False or None")
        size, tag = self.dimensions, self.step_tag_id
        require(size is None or (type(size) is int and size >= 1), "dimensions", size, "a positive integer")
        require(tag is None or (type(tag) is int and tag >= 0), "step_tag_id", tag, "a token id")
        seen = self.attended_tokens
        require(seen is None or (type(seen) is int and seen >= 1), "attended_tokens", seen, "a positive integer")
        keep, allowed = self.truncate_prompt_tokens, "-1 (the model's limit) or positive"
        is_count = keep is None or (type(keep) is int and (keep == -1 or keep >= 1))
        require(is_count, "truncate_prompt_tokens", keep, allowed)
