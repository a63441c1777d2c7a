"""The manager and its compiler: one compilation per content, within its time, and masks that follow the tokens."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from quire.structured.base import Backend, Grammar, Matcher, SchemaSupport
from quire.structured.compiler import GrammarCompiler
from quire.structured.manager import GrammarManager
from quire.structured.registry import BACKENDS
from quire.structured.sources import make_source
from quire.types.errors import UnknownNameError
from quire.types.masks import Masks
from quire.types.step import MaskedRow
from quire.types.structured import GrammarError, GrammarLimits, GrammarSource, StructuredOutputsParams, Vocabulary
from tests.structured.words import EOS, NUM_WORDS, OTHER_EOS, VOCABULARY, allowed

LIMIT = 30.0


class SlowGrammar(Grammar):
    def matcher(self) -> Matcher:
        raise AssertionError("nobody asks for it")


class SlowBackend(Backend):
    """Compiles "slow" only when it is let go."""

    schema_support = SchemaSupport(frozenset(), frozenset())
    released = threading.Event()
    compiled: list[str] = []  # noqa: RUF012  a fake that counts for its test

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @staticmethod
    def check_regex(pattern: str) -> str | None:
        return None

    @staticmethod
    def check_text(rule: Mapping[str, Any], text: str) -> bool | None:
        return None

    def compile(self, source: GrammarSource) -> Grammar:
        if source.text == "slow":
            assert self.released.wait(LIMIT)
        if source.text == "bug":
            raise ZeroDivisionError("oh")
        self.compiled.append(source.text)
        return SlowGrammar()

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> None:
        raise AssertionError("nobody asks for it")


@pytest.fixture
def slow_compiler() -> GrammarCompiler:
    BACKENDS.register("slow", SlowBackend)
    SlowBackend.released.clear()
    SlowBackend.compiled.clear()
    compiler = GrammarCompiler(GrammarLimits("slow", compile_timeout=0.05), cache_size=2)
    compiler.set_vocabulary(VOCABULARY)
    yield compiler
    SlowBackend.released.set()
    compiler.shutdown()


def test_equal_content_is_compiled_once_and_old_content_is_forgotten(slow_compiler: GrammarCompiler) -> None:
    names = ["a", "b", "a", "c", "b"]  # with room for two, c pushes b out
    for name in names:
        slow_compiler.compile(GrammarSource("regex", name)).result(LIMIT)
    assert SlowBackend.compiled == ["a", "b", "c", "b"]


def test_a_slow_grammar_is_refused_in_time_and_delays_no_other(slow_compiler: GrammarCompiler) -> None:
    slow = slow_compiler.compile(GrammarSource("regex", "slow"))
    assert slow_compiler.compile(GrammarSource("regex", "quick")).result(LIMIT)
    with pytest.raises(GrammarError, match=r"takes longer than 0.05 s to compile; make it simpler"):
        slow.result(LIMIT)
    SlowBackend.released.set()


def test_a_bug_in_a_backend_fails_the_grammar_only(slow_compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="cannot be compiled: oh"):
        slow_compiler.compile(GrammarSource("regex", "bug")).result(LIMIT)
    assert slow_compiler.compile(GrammarSource("regex", "fine")).result(LIMIT)


def test_without_a_vocabulary_nothing_compiles() -> None:
    compiler = GrammarCompiler(GrammarLimits())
    with pytest.raises(GrammarError, match="before its vocabulary"):
        compiler.compile(GrammarSource("regex", "a")).result(LIMIT)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown structured output backend 'none'"):
        BACKENDS.get("none")


@pytest.fixture
def manager() -> GrammarManager:
    manager = GrammarManager()
    manager.set_vocabulary(VOCABULARY)
    yield manager
    manager.shutdown()


def open_all(manager: GrammarManager, **patterns: str) -> None:
    sources = {name: make_source(StructuredOutputsParams(regex=pattern)) for name, pattern in patterns.items()}
    compiling = {name: manager.compile(source) for name, source in sources.items()}
    for name, future in compiling.items():
        manager.open(name, sources[name].kind, future.result(LIMIT), ignores_eos=name == "endless")


def rows(*names: str) -> list[MaskedRow]:
    return [MaskedRow(name) for name in names]


def test_masks_follow_the_tokens(manager: GrammarManager) -> None:
    open_all(manager, a="xy", b="[0-9]+", endless="[0-9]+")
    assert manager.in_use
    assert not manager.accept("b", [ord("1")]).is_complete
    manager.accept("endless", [ord("1")])
    masks = manager.start_masks(rows("b", "gone", "a", "endless")).result(LIMIT)
    digits = [*range(48, 58)]
    spans = [token for token, piece in enumerate(VOCABULARY.pieces) if piece == b"12"]
    assert allowed(masks, 0) == [*digits, EOS, OTHER_EOS, *spans]
    assert len(allowed(masks, 1)) == len(VOCABULARY.pieces)
    assert allowed(masks, 2) == [ord("x")]
    assert allowed(masks, 3) == [*digits, *spans]
    assert manager.accept("a", [ord("x"), ord("y")]).is_complete
    astray = manager.accept("b", [ord("x")])
    assert "its grammar cannot go on" in (astray.error or "")
    assert astray.error_field is None, "a mask was wrong, which is not the caller's mistake"
    assert np.array_equal(manager.start_masks(rows("b")).result(LIMIT), np.full_like(masks[:1], -1))


def test_masks_are_made_in_the_room_that_is_given() -> None:
    """What was there before is gone, also from the lines of requests that nobody knows."""
    room = np.zeros((3, NUM_WORDS), dtype=np.int32)
    manager = GrammarManager(room=lambda count: room[:count])
    manager.set_vocabulary(VOCABULARY)
    open_all(manager, a="x", b="y")
    masks = manager.start_masks(rows("gone", "b", "a")).result(LIMIT)
    assert np.shares_memory(masks, room)
    assert [allowed(masks, line) for line in (1, 2)] == [[ord("y")], [ord("x")]]
    assert (masks[0] == -1).all()
    masks = manager.start_masks(rows("a", "b")).result(LIMIT)
    assert np.shares_memory(masks, room)
    assert [allowed(masks, line) for line in (0, 1)] == [[ord("x")], [ord("y")]]
    manager.shutdown()


def test_a_closed_request_is_gone(manager: GrammarManager) -> None:
    manager.close("never known")
    open_all(manager, b="y")
    manager.close("b")
    assert not manager.in_use
    assert manager.accept("b", [1, 2, 3]).error is None


def test_drafts_have_masks_of_their_own_and_move_nothing(manager: GrammarManager) -> None:
    """Up to one that the grammar forbids, or that completes it: what would be sampled behind it does not count."""
    x, y, z = b"xyz"
    open_all(manager, a="xy?z", b="x[yz]", c="yyy")
    drafted = [MaskedRow("a", [x, y, z, x]), MaskedRow("b"), MaskedRow("gone", [x]), MaskedRow("c", [y, x, y])]
    expected = [[x], [y, z], [z], None, None, [x], None, None, [y], [y], None, None]
    for _ in range(2):
        masks = manager.start_masks(drafted).result(LIMIT)
        everything = list(range(len(VOCABULARY.pieces)))
        assert [allowed(masks, line) for line in range(len(masks))] == [
            everything if tokens is None else tokens for tokens in expected
        ]
    standing = manager.accept("a", [x, z, z, z])
    assert (standing.is_complete, standing.num_tokens, standing.error) == (True, 2, None)


def test_tokens_without_alternative_are_found_ahead_and_move_nothing() -> None:
    """Also behind drafts; of a text that has to come, the longest tokens; nothing where an output may end."""
    manager = GrammarManager(look_ahead=3)
    manager.set_vocabulary(VOCABULARY)
    x, y, z = b"xyz"
    true, null = VOCABULARY.pieces.index(b"true"), VOCABULARY.pieces.index(b"null")
    open_all(manager, a="xyz[xy]", b="[xy]z", c="truenull(x|y)", d="xy?", e="xxxxxxxxx")
    drafted = [
        MaskedRow("a"),
        MaskedRow("b", [x]),
        MaskedRow("c"),
        MaskedRow("d", [x]),
        MaskedRow("e"),
        MaskedRow("?"),
    ]
    for _ in range(2):
        manager.start_masks(drafted).result(LIMIT)
        manager.accept("b", [])  # waits until nobody looks ahead
        assert manager.forced("a") == (0, [x, y, z])
        assert manager.forced("b") == (1, [z])
        assert manager.forced("c") == (0, [true, null])
        assert manager.forced("d") == (1, [])
        assert manager.forced("e") == (0, [x, x, x, x]), "one of the step's own, and three ahead of it"
        assert manager.forced("?") == (0, [])
    manager.accept("a", [x])
    manager.start_masks([MaskedRow("a", [y])]).result(LIMIT)
    manager.accept("a", [])
    assert manager.forced("a") == (2, [z])
    standing = manager.accept("a", [y, z, x])
    assert (standing.is_complete, standing.error) == (True, None)
    manager.shutdown()
