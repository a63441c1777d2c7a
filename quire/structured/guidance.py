"""The llguidance backend: an Earley parser over a lexer, in Rust, that computes masks from the grammar at each step.

The library is imported when something is first checked or compiled. It works without the interpreter's lock, except
while it builds its tree of tokens.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from quire.structured.base import FORMATS, Backend, Grammar, Matcher, SchemaSupport
from quire.structured.structural_tag import lark_of_tag
from quire.types.masks import Masks
from quire.types.structured import GrammarError, GrammarSource, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Without this the library would force the spelling of text that has no alternative, for which it needs a tokenizer.
_HEADER = '%llguidance {"no_forcing": true}\n'
# A blank, or a line break and an indentation: a small model would spend its tokens on more than that.
_WHITESPACE = r"[ \t]?|\r?\n[ \t]{0,16}"
# Characters that the library neither generates nor takes inside of strings, and those that are no Unicode.
_UNPRINTED = re.compile("[\x7f\ud800-\udfff]")
# The library's reasons that mention its own options, in words that help a caller.
_OUR_WORDS = (
    ("oneOf constraints are not supported", "oneOf has alternatives that cannot be shown to exclude each other"),
    ("Unsatisfiable schema: prefixItems", "no array obeys it"),
    ("Unsatisfiable schema: incompatible types", "no value obeys all of it that a grammar can say"),
    ("circular references with sibling keys", "$ref leads back to a schema that it stands in, beside other keywords"),
)
_MAX_MASK_THREADS = 4  # more of them take longer to wake than they save

_KEYWORDS = """
    type enum const anyOf allOf oneOf $ref $defs definitions $id $anchor $schema
    properties required additionalProperties patternProperties minProperties maxProperties
    items prefixItems additionalItems minItems maxItems
    minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf
"""


class GuidanceMatcher(Matcher):
    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    def accept(self, token_ids: Sequence[int]) -> bool:
        return self.inner.consume_tokens(list(token_ids))

    def try_accept(self, token_id: int) -> bool:
        return self.inner.try_consume_tokens([token_id]) == 1

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)

    @property
    def is_complete(self) -> bool:
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def error(self) -> str | None:
        return _reason(self.inner.get_error()) if self.inner.is_error() else None

    @property
    def is_too_complex(self) -> bool:
        # The only other failure of a compiled grammar is a token that does not fit.
        return self.inner.is_error() and "doesn't satisfy the grammar" not in self.inner.get_error()


class GuidanceGrammar(Grammar):
    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype

    def matcher(self) -> Matcher:
        return GuidanceMatcher(self._prototype.deep_copy())


class GuidanceBackend(Backend):
    package = "llguidance"
    schema_support = SchemaSupport(frozenset(_KEYWORDS.split()), FORMATS)

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLExecutor, LLParserLimits, LLTokenizer, TokenizerWrapper

        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.eos_token_ids))
        self._num_bytes = -(-len(vocabulary.pieces) // 32) * 4
        self._limits = LLParserLimits(verbose_errors=False)
        self._executor = LLExecutor(max(1, min(_MAX_MASK_THREADS, (os.cpu_count() or 1) - 1)))

    @staticmethod
    def check_regex(pattern: str) -> str | None:
        from llguidance import LLMatcher

        message = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
        return _reason(message) if message else None

    @staticmethod
    def check_text(rule: Mapping[str, Any], text: str) -> bool | None:
        matcher = _text_matcher(json.dumps({"type": "string", **rule})).deep_copy()
        if matcher.is_error() or _UNPRINTED.search(text) is not None:
            return None
        spelled = list(json.dumps(text, ensure_ascii=False).encode())
        return matcher.try_consume_tokens(spelled) == len(spelled) and matcher.is_accepting()

    def compile(self, source: GrammarSource) -> Grammar:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, to_lark(source), log_level=0, limits=self._limits)
        if not matcher.is_error():
            # What the first mask needs is computed here and shared by all copies, and not during a step.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _explain(source, matcher.get_error())
        return GuidanceGrammar(matcher)

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> None:
        assert masks.flags.c_contiguous
        assert masks.shape[1] * 4 == self._num_bytes
        lines = [(cast(GuidanceMatcher, matcher).inner, index) for index, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(lines, masks.ctypes.data, self._num_bytes, len(masks))


class _Tokens:
    """A vocabulary as the library asks for it. It never tokenizes: no text is forced."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.pieces
        self.special_token_ids = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None

    def __call__(self, text: object) -> list[int]:
        return []


@functools.lru_cache(maxsize=64)
def _text_matcher(schema: str) -> LLMatcher:
    from llguidance import LLMatcher, LLTokenizer

    return LLMatcher(LLTokenizer("byte"), f"start: %json {schema}\n", log_level=0)


def to_lark(source: GrammarSource) -> str:
    """The grammar in the library's own form."""
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    match source.kind:
        case "json":
            return f"{_HEADER}start: {inline_schema(source.text, source.whitespace)}\n"
        case "regex":
            # As in JavaScript, \\d and \\w are ASCII.
            return f"{_HEADER}start: /{regex_to_lark(source.text, use_ascii='dw')}/\n"
        case "choice":
            # Choices of the lexer and not of the parser, which keeps track of each of them and takes few thousand.
            choices = " | ".join(json.dumps(choice) for choice in json.loads(source.text))
            return f"{_HEADER}start: CHOICE\nCHOICE: {choices}\n"
        case "structural_tag":
            return _HEADER + lark_of_tag(json.loads(source.text), inline_schema)
        case "grammar":
            try:
                return _HEADER + any_to_lark(source.text)
            except Exception as error:  # the converter raises whatever it meets in a grammar that is none
                raise GrammarError(
                    f"the grammar is neither Lark nor GBNF: {error}; correct it", "structured_outputs.grammar"
                ) from error


def inline_schema(schema: str, whitespace: str | None = None) -> str:
    """A JSON schema as a part of a Lark rule."""
    options: dict[str, Any] = {"whitespace_flexible": False}
    if whitespace != "":
        options = {"whitespace_pattern": _WHITESPACE if whitespace is None else whitespace}
    text = "{}" if schema == "true" else schema
    comma = "" if text == "{}" else ", "
    return f'%json {text[:-1]}{comma}"x-guidance": {json.dumps(options)}}}'


def _explain(source: GrammarSource, error: str) -> GrammarError:
    name = f"structured_outputs.{source.kind}"
    reason = _reason(error)
    keyword = "oneOf" if reason.startswith("oneOf") else None
    return GrammarError(f"{name} cannot be compiled: {reason}; change it", name, keyword)


def _reason(message: str) -> str:
    """The library marks the error in the source; the reason is on the first line, or behind "error:" in a regex."""
    if message.startswith("NoExtension"):
        return "no text obeys it"
    lines = message.strip().splitlines()
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    line = re.sub(r"^((at \d+\(\d+\)|Parser Error|failed to compile JSON schema): )+", "", lines[0])
    return next((words for pattern, words in _OUR_WORDS if re.match(pattern, line)), line)
