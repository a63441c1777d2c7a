"""Small tokenizers, records made by hand, and an event loop whose clock jumps instead of waiting."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Coroutine
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.bench.records import RequestRecord
from quire.frontend.tokenizer import Tokenizer

WORDS = [
    "alpha",
    "bravo",
    "charlie",
    "delta",
    "echo",
    "foxtrot",
    "golf",
    "hotel",
    "india",
    "juliet",
    "kilo",
    "lima",
    "mike",
    "november",
    "oscar",
    "papa",
]


@functools.cache
def word_tokenizer(bos: bool = False) -> Tokenizer:
    """A byte-level vocabulary with all WORDS as single tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken("<s>", special=True)],
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(["", *WORDS])] * 4, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return Tokenizer(backend, {"bos_token": "<s>"})


@functools.cache
def prefix_space_tokenizer() -> Tokenizer:
    """As SentencePiece vocabularies do: a space is put before the text, and spaces are letters."""
    pieces = ["<unk>", "<s>", *(f"\u2581{word}" for word in WORDS), "\u2581"]
    scores = [(piece, -1.0 if piece != "\u2581" else -10.0) for piece in pieces]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(Regex(" "), "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    backend.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True)])
    return Tokenizer(backend)


def record(
    start: float = 0.0, ttft: float = 0.1, between: float = 0.01, tokens: int = 5, **fields: Any
) -> RequestRecord:
    """A request that went well, one chunk a token."""
    first = start + ttft
    last = first + between * (tokens - 1)
    return RequestRecord(
        **{
            "index": 0,
            "due": start,
            "start": start,
            "first_token": first,
            "last_token": last,
            "end": last,
            "prompt_tokens": 10,
            "output_tokens": tokens,
            "gaps": [between] * (tokens - 1),
            **fields,
        }
    )


class _JumpingSelector(selectors.SelectSelector):
    """Where the loop would wait, its clock moves on instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def run_virtual(main: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run in virtual time: sleeping costs nothing and takes exactly as long as asked."""
    selector = _JumpingSelector()

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return selector.now

    with asyncio.Runner(loop_factory=lambda: Loop(selector)) as runner:
        return runner.run(main)
