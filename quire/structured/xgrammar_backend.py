"""The xgrammar backend: pushdown automata compiled ahead, with masks mostly precomputed. An extra: quire[xgrammar].

It takes fewer parts of JSON Schema than llguidance, and grammars in its own EBNF only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from quire.structured.base import Backend, Grammar, Matcher, SchemaSupport
from quire.types.masks import Masks
from quire.types.structured import GrammarError, GrammarSource, Vocabulary

_KEYWORDS = """
    type enum const anyOf $ref $defs definitions $schema
    properties required additionalProperties items prefixItems minItems maxItems
    minimum maximum exclusiveMinimum exclusiveMaximum
"""
_MAX_WHITESPACE = 17  # characters in a row: a line break and an indentation


class XGrammarMatcher(Matcher):
    def __init__(self, inner: Any, text_tokens: Masks) -> None:
        self.inner = inner
        self._text_tokens = text_tokens
        self._error: str | None = None

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            if not self.inner.accept_token(token):
                self._error = f"token {token} does not fit the grammar"
                return False
        return True

    def try_accept(self, token_id: int) -> bool:
        return bool(self.inner.accept_token(token_id))

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)

    @property
    def is_complete(self) -> bool:
        if not self.inner.is_completed():
            return False
        mask = np.zeros_like(self._text_tokens)
        return bool(self.inner.fill_next_token_bitmask(mask)) and not (mask & self._text_tokens).any()

    @property
    def error(self) -> str | None:
        return self._error


class XGrammarGrammar(Grammar):
    def __init__(self, compiled: Any, text_tokens: Masks) -> None:
        self._compiled = compiled
        self._text_tokens = text_tokens

    def matcher(self) -> Matcher:
        from xgrammar import GrammarMatcher

        return XGrammarMatcher(GrammarMatcher(self._compiled), self._text_tokens)


class XGrammarBackend(Backend):
    package = "xgrammar"
    schema_support = SchemaSupport(frozenset(_KEYWORDS.split()), frozenset(), combines=False)

    def __init__(self, vocabulary: Vocabulary) -> None:
        from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

        special = frozenset(vocabulary.special_token_ids)
        # A token without bytes is one that no text reaches.
        pieces = [b"" if token in special else piece for token, piece in enumerate(vocabulary.pieces)]
        info = TokenizerInfo(
            pieces, VocabType.RAW, vocab_size=len(pieces), stop_token_ids=list(vocabulary.eos_token_ids)
        )
        self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
        # [1, words] int32: the tokens that do not end an output.
        self._text_tokens = np.zeros((1, -(-len(pieces) // 32)), dtype=np.int32)
        for token in set(range(len(pieces))).difference(vocabulary.eos_token_ids):
            self._text_tokens.view(np.uint32)[0, token // 32] |= np.uint32(1 << token % 32)

    @staticmethod
    def check_regex(pattern: str) -> str | None:
        try:
            re.compile(pattern)
        except re.error as error:
            return str(error)
        return None

    @staticmethod
    def check_text(rule: Mapping[str, Any], text: str) -> bool | None:
        return None

    def compile(self, source: GrammarSource) -> Grammar:
        try:
            compiled = self._compile(source)
        except RuntimeError as error:  # all that the library raises for a source it cannot use
            name = f"structured_outputs.{source.kind}"
            reason = str(error).strip().splitlines()[0].split(": ", 1)[-1]
            raise GrammarError(f"{name} cannot be compiled: {reason}; change it", name) from error
        return XGrammarGrammar(compiled, self._text_tokens)

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> None:
        for index, matcher in enumerate(matchers):
            inner = cast(XGrammarMatcher, matcher).inner
            if inner.fill_next_token_bitmask(masks, index) is False:
                masks[index] = -1  # nothing is forbidden

    def _compile(self, source: GrammarSource) -> Any:
        compiler = self._compiler
        match source.kind:
            case "json":
                return self._compile_schema(source)
            case "regex":
                return compiler.compile_regex(source.text)
            case "choice":
                choices = " | ".join(json.dumps(choice) for choice in json.loads(source.text))
                return compiler.compile_grammar(f"root ::= {choices}")
            case "grammar":
                return compiler.compile_grammar(source.text)
            case "structural_tag":
                return compiler.compile_structural_tag(source.text)

    def _compile_schema(self, source: GrammarSource) -> Any:
        if source.whitespace:
            raise GrammarError(
                "structured_outputs.whitespace_pattern is not understood by xgrammar; leave it out",
                "structured_outputs.whitespace_pattern",
            )
        # Not strict: an object is open unless its schema says otherwise, as the standard has it.
        return self._compiler.compile_json_schema(
            source.text,
            any_whitespace=source.whitespace is None,
            strict_mode=False,
            max_whitespace_cnt=_MAX_WHITESPACE if source.whitespace is None else None,
        )
