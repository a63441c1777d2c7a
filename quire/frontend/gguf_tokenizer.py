"""Rebuilds a tokenizer from GGUF metadata, so that it cuts text exactly as the original tokenizer.json does.

Takes the metadata as a mapping and knows neither files nor tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.frontend.pretokenizers import pre_tokenizer_named
from quire.types.errors import TokenizerError

_SPACE = "\u2581"  # how SentencePiece vocabularies spell a space

_SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_WITHOUT_EXTRA_SPACES = (
    normalizers.Replace(Regex(r"\A +| +\z"), ""),
    normalizers.Replace(Regex(" {2,}"), " "),
)
_NO_TOKEN = (-1, (1 << 32) - 1)  # the same bits: the format stores ids without a sign

# Files often name one end token only. These control tokens end a turn in every model that has them.
_END_OF_TURN = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
# The Harmony format ends messages, not turns, with <|end|>.
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GgufTokenizer:
    """The tokenizer settings of a file."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str] = field(default_factory=dict)


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    vocabulary = _Vocabulary.read(metadata)
    model = metadata.get("tokenizer.ggml.model")
    builder = _BUILDERS.get(str(model))
    if builder is None:
        raise TokenizerError(
            f"tokenizer.ggml.model is {model!r}; known: {', '.join(_BUILDERS)}. "
            "Use the model's Hugging Face folder with a tokenizer.json instead"
        )
    backend = builder(vocabulary)
    backend.add_tokens(_added_tokens(vocabulary, rstrip=_strips_after_special(metadata)))
    return GgufTokenizer(backend, vocabulary.special_tokens(), _end_ids(vocabulary), _chat_templates(metadata))


class _Vocabulary:
    """The token table and the typed view of its settings."""

    def __init__(self, metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> None:
        self.metadata = metadata
        self.tokens = tokens
        self.types = types
        self.ids = {token: index for index, token in enumerate(tokens)}

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        raw = metadata.get("tokenizer.ggml.tokens")
        if raw is None or len(raw) == 0:
            raise TokenizerError(
                "the GGUF file has no tokenizer.ggml.tokens; convert the model again with its tokenizer"
            )
        # Unique, never produced from text: ids must stay decodable even where a converter left a hole.
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(raw)]
        types = metadata.get("tokenizer.ggml.token_type")
        types = [TokenType.NORMAL] * len(tokens) if types is None else types
        if len(types) != len(tokens):
            raise TokenizerError(
                f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; "
                "the file is damaged, download it again"
            )
        vocabulary = cls(metadata, tokens, types)
        if len(vocabulary.ids) != len(tokens):
            twice = next(token for index, token in enumerate(tokens) if vocabulary.ids[token] != index)
            raise TokenizerError(
                f"tokenizer.ggml.tokens lists {twice!r} twice; convert the model again with a newer converter"
            )
        return vocabulary

    def setting(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def required(self, name: str) -> Sequence[Any]:
        value: Sequence[Any] | None = self.setting(name)
        if value is None:
            raise TokenizerError(
                f"the GGUF file has no tokenizer.ggml.{name}, which its tokenizer model needs; "
                "convert the model again with its tokenizer"
            )
        return value

    def token_at(self, key: str, default: int | None = None) -> str | None:
        token_id = self.token_id(key)
        token_id = default if token_id is None else token_id
        return self.tokens[token_id] if token_id is not None and token_id < len(self.tokens) else None

    def token_id(self, key: str) -> int | None:
        """The id that the file gives under this name, if any."""
        value = self.setting(key)
        if value is None or value in _NO_TOKEN:
            return None
        if isinstance(value, int) and 0 <= value < len(self.tokens):
            return value
        if key == _SPECIAL_TOKEN_KEYS["pad_token"]:  # files that name one they lack are common, and nothing is padded
            return None
        raise TokenizerError(
            f"tokenizer.ggml.{key} is {value!r} but the file's tokens go from 0 to {len(self.tokens) - 1}; "
            "download it again, or convert the model again"
        )

    def special_tokens(self) -> dict[str, str]:
        found = {name: self.token_at(key) for name, key in _SPECIAL_TOKEN_KEYS.items()}
        return {name: token for name, token in found.items() if token is not None}

    def of_type(self, *types: TokenType) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in types]


def _merge_pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    # A token may itself begin with a space, so the separator is the first space after one character.
    pairs = []
    for merge in merges:
        at = merge.find(" ", 1)
        if at < 0:
            raise TokenizerError(f"tokenizer.ggml.merges holds {merge!r}, not a pair; download the file again")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception, for a merge of unknown tokens
        raise TokenizerError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error


def _build_byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte has a printable stand-in, merges are listed in order."""
    rules = pre_tokenizer_named(str(vocabulary.setting("pre", "default")))
    merges = _merge_pairs(vocabulary.required("merges"))
    backend = _bpe(vocabulary.ids, merges, ignore_merges=rules.ignore_merges)
    normalizer = rules.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rules.build()
    backend.decoder = decoders.ByteLevel()
    _add_ends(
        backend,
        vocabulary.token_at("bos_token_id") if vocabulary.setting("add_bos_token", rules.add_bos) else None,
        vocabulary.token_at("eos_token_id") if vocabulary.setting("add_eos_token", False) else None,
    )
    return backend


def _build_sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Llama's, Mistral's and Gemma's kind: scores instead of merges, unknown characters become bytes."""
    unknown = vocabulary.token_at("unknown_token_id", 0)
    backend = _bpe(
        vocabulary.ids,
        merges_by_score(vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_type(TokenType.BYTE)),
    )
    add_space = bool(vocabulary.setting("add_space_prefix", True))
    steps: list[normalizers.Normalizer] = []
    if vocabulary.setting("remove_extra_whitespaces", False):
        steps += _WITHOUT_EXTRA_SPACES
    if add_space:
        steps.append(normalizers.Prepend(_SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    backend.decoder = _sentencepiece_decoder(strip_first_space=add_space)
    _add_ends(
        backend,
        vocabulary.token_at("bos_token_id", 1) if vocabulary.setting("add_bos_token", True) else None,
        vocabulary.token_at("eos_token_id", 2) if vocabulary.setting("add_eos_token", False) else None,
    )
    return backend


def _build_unigram(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """XLM-RoBERTa's and T5's kind: of all ways to cut a text into tokens, the one with the best sum of scores."""
    pieces = list(zip(vocabulary.tokens, map(float, vocabulary.required("scores")), strict=True))
    unknown = vocabulary.token_id("unknown_token_id")
    has_bytes = bool(vocabulary.of_type(TokenType.BYTE))
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=has_bytes))
    steps: list[normalizers.Normalizer] = []
    charsmap = vocabulary.setting("precompiled_charsmap")
    if charsmap is not None and len(charsmap):
        steps.append(normalizers.Precompiled(bytes(int(value) & 0xFF for value in charsmap)))
    if vocabulary.setting("remove_extra_whitespaces", True):
        steps += _WITHOUT_EXTRA_SPACES
    backend.normalizer = normalizers.Sequence(steps)
    add_space = bool(vocabulary.setting("add_space_prefix", True))
    scheme = "always" if add_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = _sentencepiece_decoder(strip_first_space=add_space)
    _add_ends(
        backend,
        vocabulary.token_at("bos_token_id") if vocabulary.setting("add_bos_token", False) else None,
        vocabulary.token_at("eos_token_id") if vocabulary.setting("add_eos_token", True) else None,
    )
    return backend


def _sentencepiece_decoder(strip_first_space: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip_first_space else steps)


def merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token from two others, best token first.

    SentencePiece joins the neighbours whose union has the best score. A merge list ranks pairs instead,
    so a token's pairs stand together, the one with the longer left half first, as converters rank them.
    """
    scores = vocabulary.required("scores")
    ids = vocabulary.ids
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED)
    usable = {vocabulary.tokens[index] for index in vocabulary.of_type(*mergeable)}
    ranked = []
    for token in usable:
        token_id = ids[token]
        score = scores[token_id]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                ranked.append((-score, -cut, cut - len(token), token_id, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _build_gemma4(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Gemma 4: SentencePiece spelling with listed merges."""
    backend = _bpe(
        vocabulary.ids,
        _merge_pairs(vocabulary.required("merges")),
        unk_token=vocabulary.token_at("unknown_token_id"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = _sentencepiece_decoder(strip_first_space=False)
    # Early files say add_bos_token = false, but the model was trained with it.
    _add_ends(backend, vocabulary.token_at("bos_token_id"), None)
    return backend


def _build_wordpiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """BERT's kind. The file marks the start of a word; the original marks its continuation."""
    ids = {_bert_spelling(token): index for token, index in vocabulary.ids.items()}
    unknown = vocabulary.token_at("unknown_token_id", vocabulary.ids.get("[UNK]")) or "[UNK]"
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=ids, unk_token=unknown))
    lowercase = bool(vocabulary.setting("normalizer.lowercase", True))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=bool(vocabulary.setting("normalizer.strip_accents", lowercase))
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    begin = vocabulary.token_at("cls_token_id") or vocabulary.token_at("bos_token_id", ids.get("[CLS]"))
    end = vocabulary.token_at("seperator_token_id", ids.get("[SEP]"))
    _add_ends(
        backend,
        begin if vocabulary.setting("add_bos_token", True) else None,
        end if vocabulary.setting("add_sep_token", True) else None,
    )
    return backend


def _bert_spelling(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(_SPACE) else f"##{token}"


_BUILDERS = {
    "gpt2": _build_byte_level,
    "llama": _build_sentencepiece,
    "gemma4": _build_gemma4,
    "bert": _build_wordpiece,
    "t5": _build_unigram,
}


def _add_ends(backend: tokenizers.Tokenizer, begin: str | None, end: str | None) -> None:
    if begin is None and end is None:
        return
    parts = [token for token in (begin, "$A", end) if token is not None]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)


def _strips_after_special(metadata: Mapping[str, Any]) -> bool:
    """Phi-3's control tokens swallow the white space after them; the file format cannot say so."""
    return metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"


def _added_tokens(vocabulary: _Vocabulary, rstrip: bool) -> list[AddedToken]:
    never_strip = {"<unk>", "<s>", "<|endoftext|>"}
    return [
        AddedToken(
            (token := vocabulary.tokens[index]),
            special=vocabulary.types[index] != TokenType.USER_DEFINED,
            normalized=False,
            rstrip=rstrip and token not in never_strip,
        )
        for index in vocabulary.of_type(TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
    ]


def _end_ids(vocabulary: _Vocabulary) -> tuple[int, ...]:
    named = [vocabulary.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    control = {vocabulary.tokens[index]: index for index in vocabulary.of_type(TokenType.CONTROL)}
    ends = _END_OF_TURN - {"<|end|>"} if control.keys() >= _HARMONY_ENDS else _END_OF_TURN
    ids = [token_id for token_id in named if token_id is not None]
    return tuple(dict.fromkeys([*ids, *(index for token, index in control.items() if token in ends)]))


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(f"{prefix}."): value for key, value in metadata.items() if key.startswith(f"{prefix}.")
    }
    if prefix in metadata:
        templates["default"] = metadata[prefix]
    return templates
