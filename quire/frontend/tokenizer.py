"""The tokenizer of a model: text to token ids and back, its special tokens and its chat templates.

Reads a Hugging Face folder or a GGUF file. Knows nothing of requests, and needs neither torch nor transformers.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from quire.frontend.gguf_tokenizer import build_gguf_tokenizer
from quire.frontend.long_text import LongText
from quire.frontend.token_bound import TokenBound
from quire.frontend.token_pieces import PieceTable, TokenPieces
from quire.loader.config_schema import MAX_TOKENS, TokenId
from quire.loader.gguf_file import read_metadata
from quire.types.errors import RequestError, TokenizerError
from quire.utils.schema import check_values, decode_json

_NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LONG_TEXT = 20_000
"""Characters above which a caller on an event loop should leave the encoding to a thread, which holds nobody up."""
_DOUBT = 64  # tokens that a cut may have added, where it is not known to change nothing
_LONG_NUMBER = re.compile(rb":\s*\d{8}")  # a value that may be MAX_TOKENS or more
_CONVERT_HINT = (
    'create it once where transformers and sentencepiece are installed: python -c "from transformers import '
    "AutoTokenizer; AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\""
)


class TooManyTokensError(Exception):
    """A text has more tokens than the caller can use; `num_tokens` of them have been found, perhaps not all."""

    def __init__(self, num_tokens: int, exact: bool) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens
        self.exact = exact


class _AddedTokenSchema(msgspec.Struct):
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class _TemplateSchema(msgspec.Struct):
    name: str
    template: str


class _TokenizerSchema(msgspec.Struct):
    """tokenizer_config.json and what stands beside it, as far as it is read."""

    added_tokens_decoder: dict[Annotated[str, msgspec.Meta(pattern=r"^\d{1,9}$")], _AddedTokenSchema] | None = None
    additional_special_tokens: list[Any] | dict[str, Any] | None = None
    extra_special_tokens: list[Any] | dict[str, Any] | None = None
    chat_template: str | list[_TemplateSchema] | None = None
    eos_token_id: TokenId | list[TokenId] | None = None


class Tokenizer:
    """One vocabulary with everything around it. Read-only after construction, safe to share between threads.

    `decode` is the UTF-8 decoding of the tokens' bytes. It equals the `tokenizers` library's for every
    valid sequence; bytes that are not UTF-8 become one U+FFFD per maximal invalid part, in SentencePiece
    vocabularies too, so that decoding a stream and decoding a list agree.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        first = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys((*first, *extra_eos_token_ids)))
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._pieces = TokenPieces(backend)
        self._visible_pieces = PieceTable(
            lambda token_id: b"" if token_id in self._special_ids else self._pieces.pieces[token_id]
        )

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        max_tokens: int | None = None,
        keep_last: int | None = None,
    ) -> list[int]:
        """The token ids of a text. Other threads run while a long one is encoded, and it takes little memory.

        With `max_tokens`, TooManyTokensError as soon as it is certain that there are more. With `keep_last`, ids
        before the last `keep_last` may be left out.
        """
        try:
            if len(text) <= LONG_TEXT:
                ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = self._encode_long(text, add_special_tokens, max_tokens, keep_last)
        except TypeError as error:
            # All the library says of a string that has no UTF-8 form is that it is no string.
            position = next((index for index, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if position is None:
                raise
            raise RequestError(
                f"the text has a lone surrogate {text[position]!r} at position {position}; send valid Unicode",
                field="prompt",
            ) from error
        if max_tokens is not None and len(ids) > max_tokens:
            raise TooManyTokensError(len(ids), exact=True)
        return ids

    def encode_first(self, text: str, add_special_tokens: bool, count: int) -> list[int]:
        """The token ids of a text's beginning: the first `count` of them, and perhaps more."""
        # No token spells more characters than the longest; what a cut changes is near the cut.
        return self.encode(text[: (count + _DOUBT) * self._longest_token], add_special_tokens)

    def encode_pair(
        self, before: str, first: str, second: str, behind: str, *, most: int | None, longest: int
    ) -> tuple[list[int], int | None]:
        """Token ids of two texts as one prompt, and the index from which tokens are of the second type, if any are.

        With `before` or `behind`, they are parts of one text instead: before + second + behind. To have `most`
        tokens, the second text is cut at its end; TooManyTokensError if there are more than `longest` nevertheless.
        """
        limit = None if most is None else (most + _DOUBT) * self._longest_token
        second = second[:limit]
        if before or behind:
            ids = self.encode(before + second + behind, max_tokens=longest if most is None else None)
            if most is not None and len(ids) > most:
                ends = [self.encode(part, add_special_tokens=False) for part in (before, behind)]
                room = max(0, most - len(ends[0]) - len(ends[1]))
                ids = ends[0] + self.encode(second, add_special_tokens=False)[:room] + ends[1]
            second_text_at = None
        else:
            self.encode(first, False, max_tokens=longest)  # a long one is refused before all of it is encoded
            if most is None:
                self.encode(second, False, max_tokens=longest)
            one, two = (self.backend.encode(text, add_special_tokens=False) for text in (first, second))
            if most is not None:
                two.truncate(max(0, most - len(one) - self.backend.num_special_tokens_to_add(True)))
            both = self.backend.post_process(one, two, add_special_tokens=True)
            ids = both.ids
            second_text_at = next((at for at, kind in enumerate(both.type_ids) if kind), None)
        if len(ids) > longest:
            raise TooManyTokensError(len(ids), exact=True)
        return ids, second_text_at

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.backend.get_vocab()), default=1)

    def _encode_long(
        self, text: str, add_special_tokens: bool, max_tokens: int | None, keep_last: int | None
    ) -> list[int]:
        if max_tokens is not None and self._bound is not None:
            at_least = self._bound.at_least(text, max_tokens)
            if at_least > max_tokens:
                raise TooManyTokensError(at_least, exact=False)
        first, last = self.ends if add_special_tokens else ([], [])
        if keep_last is not None:
            text = self._long_text.tail(text, self._needed_from(text, keep_last))
        ids = list(first)
        num_doubtful = 0
        for piece, exact in self._long_text.pieces(text):
            ids += self._encode_piece(piece)
            num_doubtful += not exact
            if max_tokens is not None and len(ids) > max_tokens + num_doubtful * _DOUBT:
                raise TooManyTokensError(len(ids), exact=False)
            if keep_last is not None and len(ids) > 2 * keep_last:
                del ids[:-keep_last]
        return ids + last

    def _needed_from(self, text: str, num_tokens: int) -> int:
        """A position in the text that is certain to have more than `num_tokens` tokens after it."""
        size, wanted = 8 * num_tokens, num_tokens + _DOUBT
        while self._bound is not None and size < len(text):
            if self._bound.at_least(text[-size:], wanted) > wanted:
                return len(text) - size
            size *= 2
        return 0

    def _encode_piece(self, text: str) -> list[int]:
        # The library lets other threads run only when it encodes a batch, which it hands to threads of its own.
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    @functools.cached_property
    def _bound(self) -> TokenBound | None:
        return TokenBound.of(self.backend)

    @functools.cached_property
    def _long_text(self) -> LongText:
        return LongText(self._encode_piece)

    @functools.cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """The special tokens that the library puts before and after a text."""
        text = "Any text, 1"
        plain: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        whole: list[int] = self.backend.encode(text, add_special_tokens=True).ids
        num_first = next(at for at in range(len(whole) + 1) if whole[at : at + len(plain)] == plain)
        return whole[:num_first], whole[num_first + len(plain) :]

    @functools.cached_property
    def unweighted(self) -> frozenset[int]:
        """Tokens without a meaning of their own, which have no lexical weight."""
        ids = (self._special_id(name) for name in ("cls_token", "bos_token", "eos_token", "pad_token", "unk_token"))
        return frozenset(token for token in ids if token is not None)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids outside the vocabulary stand for nothing."""
        pieces = self.piece_table(skip_special_tokens)
        for index, token_id in enumerate(token_ids):
            if self.is_visible(token_id, skip_special_tokens):
                rest = [pieces[later] for later in token_ids[index + 1 :]]
                return (self.first_piece(token_id) + b"".join(rest)).decode("utf-8", "replace")
        return ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def is_visible(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token takes part in decoding."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self.convert_id_to_token(token_id) is not None

    def convert_id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling, or None if there is no such token."""
        return self._pieces.token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds in the middle of a text; special tokens are spelled out."""
        return self._pieces.pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def first_piece(self, token_id: int) -> bytes:
        """What the token adds when nothing stands before it."""
        return self._pieces.first_pieces[token_id]

    def piece_table(self, skip_special_tokens: bool) -> PieceTable:
        """Token id -> bytes in the middle of a text, for hot loops."""
        return self._visible_pieces if skip_special_tokens else self._pieces.pieces


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write what `load_tokenizer` reads from a folder, but for the end tokens beside eos_token.

    Those are in the folder's generation_config.json.
    """
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    templates = tokenizer.chat_templates
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(path: Path) -> Tokenizer:
    """Load from a Hugging Face folder or a `.gguf` file."""
    if path.is_dir():
        return _load_folder(path)
    if not path.exists():
        raise TokenizerError(f"no tokenizer: {path} does not exist; give a model folder or a .gguf file")
    if path.suffix != ".gguf":
        raise TokenizerError(f"no tokenizer in {path}; give a Hugging Face folder or a .gguf file")
    return tokenizer_from_gguf(read_metadata(path))


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    parts = build_gguf_tokenizer(metadata)
    return Tokenizer(parts.backend, parts.special_tokens, parts.eos_token_ids, parts.chat_templates)


def _load_folder(folder: Path) -> Tokenizer:
    """tokenizer.json decides which ends are added; add_bos_token and its like do not count beside it."""
    config = _read_json(folder / "tokenizer_config.json")
    names = {**_read_json(folder / "special_tokens_map.json"), **config}
    backend = _read_backend(folder)
    backend.no_truncation()
    backend.no_padding()
    _add_missing_tokens(backend, config.get("added_tokens_decoder") or {}, folder)
    special_tokens = {
        name: token for name in _NAMED_SPECIAL_TOKENS if (token := _token_content(names.get(name))) is not None
    }
    extra = names.get("additional_special_tokens") or names.get("extra_special_tokens") or ()
    extra = list(extra.values()) if isinstance(extra, dict) else list(extra)
    found = _read_json(folder / "artifact.metadata")  # ColBERT's markers of queries and documents
    extra += [found[key] for key in ("query_token_id", "doc_token_id") if key in found]
    _mark_special(backend, [*special_tokens.values(), *(_token_content(token) for token in extra)])
    return Tokenizer(backend, special_tokens, _configured_eos(folder), _read_chat_templates(folder, config))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = decode_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}; download the file again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, not an object; download the file again")
    check_values(path, value, _TokenizerSchema, TokenizerError)
    return value


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        hint = _CONVERT_HINT.format(folder=folder)
        if (folder / "tokenizer.model").exists():
            raise TokenizerError(f"{folder} has only a SentencePiece tokenizer.model and no tokenizer.json; {hint}")
        raise TokenizerError(
            f"{folder} has no tokenizer.json; download it with the model, name a folder or a .gguf file that has a"
            f" tokenizer (--tokenizer), or {hint}"
        )
    try:
        content = file.read_bytes()
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception for any content it cannot read
        raise TokenizerError(f"cannot read {file}: {error}; download the file again") from error
    if _LONG_NUMBER.search(
        content
    ):  # listing a large vocabulary takes a quarter of a second: only where it may matter
        _check_ids(backend, file)
    return backend


def _token_content(value: Any) -> str | None:
    """A special token in a config file is a string or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, decoder: Mapping[str, Any], folder: Path) -> None:
    """Add the tokens that only tokenizer_config.json knows; their ids must follow on from the vocabulary."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for key, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        content = token["content"]
        if backend.token_to_id(content) is None:
            backend.add_tokens([AddedToken(content, **{flag: token[flag] for flag in flags if flag in token})])
        if backend.token_to_id(content) != int(key):
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'} gives token {content!r} the id {key}, "
                f"but tokenizer.json gives it {backend.token_to_id(content)}; download both files again"
            )


def _check_ids(backend: tokenizers.Tokenizer, file: Path) -> None:
    """Ids may have holes, but one that no model has a row for would only be noticed in some request."""
    token, largest = max(backend.get_vocab(with_added_tokens=True).items(), key=itemgetter(1), default=("", 0))
    if largest >= MAX_TOKENS:
        raise TokenizerError(
            f"{file} gives token {token!r} the id {largest}, but ids must be below {MAX_TOKENS}; "
            "download the file again"
        )


def _mark_special(backend: tokenizers.Tokenizer, contents: Iterable[str | None]) -> None:
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = dict.fromkeys(content for content in contents if content and content not in special)
    if missing:
        backend.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in missing])


def _configured_eos(folder: Path) -> list[int]:
    """End tokens that generation_config.json and config.json name, which may be more than the tokenizer's one."""
    config = _read_json(folder / "config.json")
    nested = config.get("text_config")
    nested = nested if isinstance(nested, dict) else {}
    check_values(folder / "config.json", nested, _TokenizerSchema, TokenizerError)
    sources = [_read_json(folder / "generation_config.json"), config, nested]
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if value is not None else []
    return [token_id for token_id in ids if token_id >= 0]


def _read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template files win over tokenizer_config.json, which wins over the older chat_template.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}
    if templates:
        return templates
    value = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    return {entry["name"]: entry["template"] for entry in value or ()}
