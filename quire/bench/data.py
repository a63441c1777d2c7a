"""Prompts for a benchmark. The same options and seed give the same prompts; lengths are exact in tokens."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from quire.bench.data_files import read_jsonl, read_sharegpt
from quire.bench.options import DEFAULT_NUM_PROMPTS, DataOptions
from quire.types.errors import TokenizerError
from quire.utils.log import get_logger

if TYPE_CHECKING:
    from quire.frontend.tokenizer import Tokenizer

logger = get_logger(__name__)

POOL_SIZE = 2048  # words to choose from: enough that no two prompts share a KV block by chance
_TRIES_PER_WORD = 200
_REPAIRS = 16
_PLAIN_WORD = re.compile(r" [A-Za-z]{2,}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to make: a prompt in exactly one of three forms, and the length of the answer."""

    output_len: int
    prompt_len: int | None = None  # tokens, without those of the chat template; None if they were not counted
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None


def load_samples(
    options: DataOptions, extra: int = 0, *, add_special_tokens: bool = True, tokenizer: Tokenizer | None = None
) -> list[Sample]:
    """The prompts of a run, and `extra` more for its warm-up at the end.

    `add_special_tokens` says whether the server counts a beginning-of-text token into a prompt: for plain text it
    does. `tokenizer` is used instead of the one the options name.
    """
    if options.from_file:
        return _from_file(options, extra, tokenizer)
    count = (options.num_prompts or DEFAULT_NUM_PROMPTS) + extra
    vocabulary = tokenizer or load_named_tokenizer(options.tokenizer)
    maker = TokenMaker(vocabulary) if options.token_ids else TextMaker(vocabulary, add_special_tokens, options.seed)
    generator = random.Random(f"prompts/{options.seed}")
    if options.dataset_name == "shared-prefix":
        prefixes = [maker.words(options.prefix_len, generator) for _ in range(options.num_prefixes)]
    else:
        prefixes = [[]]
    samples = []
    for index in range(count):
        input_len = _length(options.input_len, options.range_ratio, generator)
        output_len = _length(options.output_len, options.range_ratio, generator)
        sample = maker.sample(prefixes[index % len(prefixes)], input_len, generator)
        samples.append(replace(sample, output_len=output_len))
    return samples


@functools.cache
def load_named_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model folder, .gguf file, hub id or built-in alias."""
    from quire.frontend.tokenizer import load_tokenizer  # here, so that --help need not wait for it
    from quire.loader.hub import resolve_model

    return load_tokenizer(resolve_model(name).path)


def _from_file(options: DataOptions, extra: int, tokenizer: Tokenizer | None) -> list[Sample]:
    assert options.dataset_path is not None
    if options.dataset_name == "jsonl":
        samples = [Sample(**fields) for fields in read_jsonl(options.dataset_path, options.output_len)]
    else:
        vocabulary = tokenizer or load_named_tokenizer(options.tokenizer)
        pairs = read_sharegpt(options.dataset_path, vocabulary.encode, options.max_total_len)
        samples = [Sample(text=text, prompt_len=length, output_len=output) for text, length, output in pairs]
        random.Random(f"prompts/{options.seed}").shuffle(samples)
    wanted = options.num_prompts or len(samples)
    if wanted > len(samples):
        logger.warning(
            "%s has %d prompts and %d are wanted: they repeat, and a prefix cache will notice",
            options.dataset_path,
            len(samples),
            wanted,
        )
    return list(islice(cycle(samples), wanted + extra))


def _length(middle: int, ratio: float, generator: random.Random) -> int:
    """Uniform from middle * (1 - ratio) to middle * (1 + ratio)."""
    if not ratio:
        return middle
    return generator.randint(max(1, int(middle * (1 - ratio))), max(1, int(middle * (1 + ratio))))


class TokenMaker:
    """Prompts as random token ids of the whole vocabulary except special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = [
            token_id
            for token_id in range(tokenizer.vocab_size)
            if tokenizer.convert_id_to_token(token_id) is not None and not tokenizer.is_special(token_id)
        ]

    def words(self, count: int, generator: random.Random) -> list[int]:
        return generator.choices(self._ids, k=count)

    def sample(self, prefix: list[int], length: int, generator: random.Random) -> Sample:
        token_ids = prefix + self.words(length - len(prefix), generator)
        return Sample(token_ids=token_ids, prompt_len=length, output_len=1)


class TextMaker:
    """Prompts as text of random words that are one token each, whatever stands around them."""

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool = True, seed: int = 0) -> None:
        self._count: Callable[[str], int] = lambda text: len(tokenizer.encode(text, add_special_tokens))
        self._pool = find_words(tokenizer, random.Random(f"words/{seed}"))

    def words(self, count: int, generator: random.Random) -> list[int]:
        """Positions in the pool, which stand for words as ids stand for tokens."""
        return generator.choices(range(len(self._pool)), k=count)

    def sample(self, prefix: list[int], length: int, generator: random.Random) -> Sample:
        words = prefix + self.words(length - len(prefix), generator)
        for _ in range(_REPAIRS):
            text = "".join(self._pool[word] for word in words)
            excess = self._count(text) - length
            if excess == 0:
                return Sample(text=text, prompt_len=length, output_len=1)
            words = words[:-excess] if excess > 0 else words + self.words(-excess, generator)
        raise TokenizerError(f"found no text of exactly {length} tokens; send token ids instead: --token-ids")


def find_words(tokenizer: Tokenizer, generator: random.Random, wanted: int = POOL_SIZE) -> list[str]:
    """Words (with the space before them) that are always one token of their own."""
    ids = list(range(tokenizer.vocab_size))
    generator.shuffle(ids)
    found: list[str] = []
    for token_id in ids[: wanted * _TRIES_PER_WORD]:
        if tokenizer.convert_id_to_token(token_id) is None or tokenizer.is_special(token_id):
            continue
        text = tokenizer.token_text(token_id)
        if _PLAIN_WORD.fullmatch(text) and tokenizer.encode(text * 3, False)[-2:] == [token_id] * 2:
            found.append(text)
            if len(found) == wanted:
                break
    if len(found) < min(2, wanted):
        raise TokenizerError("the vocabulary has no one-token words; send token ids instead: --token-ids")
    return found
