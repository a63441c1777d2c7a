"""Fill-in-the-middle: a prompt that asks for what stands between a beginning and an end, as code models know it.

Token ids are put together one part after the other, so that no text can pass for one of the marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.types.errors import RequestError

if TYPE_CHECKING:
    from quire.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Marks:
    """One family's spelling. `ends` end what is filled in, besides the model's own end-of-sequence tokens."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()


SPELLINGS = (
    # Qwen2.5-Coder, CodeGemma
    Marks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite code, CodeQwen1.5
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    # DeepSeek-Coder, with a fullwidth bar and SentencePiece's mark of a space
    Marks(
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
        ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|EOT|>"),
    ),
    # CodeLlama
    Marks("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),
)

# A character that no merge joins to what follows, so that a text behind it is tokenized as in the middle of a line.
_BEFORE = "\u263a"


@dataclass(frozen=True, slots=True)
class Infill:
    """How one model is asked to fill in the middle."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    end_ids: tuple[int, ...]

    def token_ids(
        self, tokenizer: Tokenizer, prefix: Sequence[int], suffix: str, add_special_tokens: bool, max_tokens: int
    ) -> list[int]:
        """The prompt; TooManyTokensError if the suffix alone has more than max_tokens.

        `add_special_tokens` lets the tokenizer add its own at the beginning.
        """
        begin = tokenizer.encode("", add_special_tokens)
        after = _continued(tokenizer, suffix, max_tokens)
        return [*begin, self.prefix_id, *prefix, self.suffix_id, *after, self.middle_id]


def find_infill(tokenizer: Tokenizer) -> Infill:
    """How the tokenizer's model fills in the middle; RequestError if it has no tokens for it."""
    for marks in SPELLINGS:
        found = _ids(tokenizer, (marks.prefix, marks.suffix, marks.middle))
        if len(found) == 3:
            return Infill(found[0], found[1], found[2], tuple(_ids(tokenizer, marks.ends)))
    raise RequestError(
        "suffix needs a model with tokens for fill-in-the-middle, and this one has none; leave it out", "suffix"
    )


def _ids(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    """The ids of those tokens that there are."""
    return [token_id for token in tokens if (token_id := tokenizer.backend.token_to_id(token)) is not None]


def _continued(tokenizer: Tokenizer, text: str, max_tokens: int) -> list[int]:
    """The tokens of a text that other text stands before: without the space that some put before a beginning."""
    lead = tokenizer.encode(_BEFORE, add_special_tokens=False)
    ids = tokenizer.encode(_BEFORE + text, add_special_tokens=False, max_tokens=max_tokens + len(lead))
    if ids[: len(lead)] == lead:
        return ids[len(lead) :]
    return tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
