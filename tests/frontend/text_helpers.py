"""Tiny trained tokenizers, and their GGUF metadata as converters write it, for the text tests."""

from __future__ import annotations

import functools
import io
import json
from typing import Any

import sentencepiece
import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import generate_merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12345 times 678; I'LL say SO.",
    "Grüße aus Zürich! Καλημέρα κόσμε. Привет, мир. 你好\uff0c世界。こんにちは世界 안녕하세요 สวัสดี",
    "def main():\n    for i in range(10):\n\t\tprint(i ** 2)\n\n\n    return {'a': [1, 2, 3]}\r\n",
    "emoji 😀👍🏽👩‍👩‍👧 and math ∑∞≠ and e\u0301 combining, camelCaseWords HTTPServer   spaces    here",
] * 3

# Plain text, text with what tokenizers treat apart, and arbitrary Unicode.
TEXTS = st.one_of(
    st.text(st.sampled_from("ab eE's\n\t 019.,!'<|>_éß世界😀\u0301\u00a0\u3000\u2581"), max_size=40),
    st.lists(
        st.sampled_from(
            ["<|end|>", "<tool>", "<s>", " ", "  ", "   ", "\n\n", "\r\n", "The", " quick", "12345", "'LL", "don't"]
        ),
        max_size=12,
    ).map("".join),
    st.text(max_size=40),
)

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
O200K_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre -> (pre-tokenizer, normalizer, ignore_merges) as the published tokenizer.json has them.
BYTE_LEVEL_KINDS: dict[str, tuple[Any, Any, bool]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
    "smollm": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        None,
        False,
    ),
    "llama-bpe": (_split(LLAMA3_WORDS), None, True),
    "dbrx": (_split(LLAMA3_WORDS), None, False),
    "qwen2": (_split(QWEN2_WORDS), normalizers.NFC(), False),
    "gpt-4o": (_split(O200K_WORDS), None, False),
}


@functools.cache
def byte_level(kind: str) -> tokenizers.Tokenizer:
    """A byte-level BPE as in a tokenizer.json, with a control and a user-defined token, and BOS where usual."""
    pre_tokenizer, normalizer, ignore_merges = BYTE_LEVEL_KINDS[kind]
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(
        [
            AddedToken("<s>", special=True, normalized=False),
            AddedToken("<|end|>", special=True, normalized=False),
            AddedToken("<tool>", special=False, normalized=False),
        ]
    )
    if kind == "llama-bpe":
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return backend


def byte_level_metadata(backend: tokenizers.Tokenizer, kind: str) -> dict[str, Any]:
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    added = backend.get_added_tokens_decoder()
    types = [NORMAL] * len(tokens)
    for index, token in added.items():
        types[index] = CONTROL if token.special else USER_DEFINED
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": backend.token_to_id("<s>"),
        "tokenizer.ggml.eos_token_id": backend.token_to_id("<|end|>"),
    }


@functools.cache
def sentencepiece_model(
    add_dummy_prefix: bool = True, remove_extra_whitespaces: bool = False, user_defined: tuple[str, ...] = ()
) -> sentencepiece.SentencePieceProcessor:
    """A Llama-like SentencePiece model: BPE, byte fallback, no normalization, digits apart."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=640,
        character_coverage=0.99,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=remove_extra_whitespaces,
        user_defined_symbols=list(user_defined),
        add_dummy_prefix=add_dummy_prefix,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(
    model: sentencepiece.SentencePieceProcessor, add_space_prefix: bool = True, added: bool = True
) -> dict[str, Any]:
    size = model.get_piece_size()
    types = [
        UNKNOWN
        if model.is_unknown(index)
        else CONTROL
        if model.is_control(index)
        else BYTE
        if model.is_byte(index)
        else NORMAL
        for index in range(size)
    ]
    extra = [("<|end|>", CONTROL), ("<tool>", USER_DEFINED)] if added else []
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in range(size)] + [token for token, _ in extra],
        "tokenizer.ggml.scores": [model.get_score(index) for index in range(size)] + [-1000.0] * len(extra),
        "tokenizer.ggml.token_type": types + [kind for _, kind in extra],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


@functools.cache
def llama_tokenizer(add_space_prefix: bool = True) -> tokenizers.Tokenizer:
    """The tokenizer.json of the SentencePiece model above, as transformers' converter makes it."""
    model = sentencepiece_model(add_space_prefix)
    metadata = sentencepiece_metadata(model, add_space_prefix)
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    size = model.get_piece_size()
    vocabulary = {token: index for index, token in enumerate(tokens[:size])}
    merges = generate_merges(vocabulary, dict(zip(tokens[:size], scores[:size], strict=True)))
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    prepend = [normalizers.Prepend("\u2581")] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>", "<|end|>")]
        + [AddedToken("<tool>", special=False, normalized=False)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend
