"""GrammarManager: the grammars of an engine's requests, from compilation to the mask of each step.

A matcher is always at the end of its request's known tokens: only results that count move it on. So preemption,
retries and steps in flight need no rollback; making the masks of drafts does. Knows request ids and tokens; knows no
scheduler and no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, takewhile

import numpy as np

from quire.structured.base import Grammar, Matcher
from quire.structured.compiler import GrammarCompiler
from quire.types.masks import Masks
from quire.types.step import MaskedRow
from quire.types.structured import GrammarKind, GrammarLimits, GrammarSource, Vocabulary


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a request's grammar stands after its last token."""

    is_complete: bool = False  # nothing may follow: the output ends here
    num_tokens: int = 0  # of those that were accepted, up to there
    error: str | None = None  # why it cannot go on
    error_field: str | None = None  # the part of the request that has to change, if it is that


_FREE = Standing()
_FEW = 16  # tokens: more of them are no beginnings of one text


@dataclass(slots=True)
class _Entry:
    matcher: Matcher
    kind: GrammarKind
    ignores_eos: bool
    num_accepted: int = 0  # tokens
    forced: tuple[int, list[int]] = (0, [])  # tokens that have no alternative, and the number of those before them


class GrammarManager:
    """Everything but the completion of compilations and masks happens on the engine's thread."""

    def __init__(
        self,
        limits: GrammarLimits | None = None,
        cache_size: int = 128,
        room: Callable[[int], Masks] | None = None,
        *,
        look_ahead: int = 0,
    ) -> None:
        """`room(n)` returns an array of `n` mask rows to write into; earlier rows have been read by then.

        `look_ahead`: after the masks of a step, find as many tokens as this that have no alternative.
        """
        self._compiler = GrammarCompiler(limits or GrammarLimits(), cache_size)
        self._entries: dict[str, _Entry] = {}
        self._eos_token_ids: list[int] = []
        self._num_words = 0
        self._thread: ThreadPoolExecutor | None = None
        self._room = room or self._new_masks
        self._look_ahead = look_ahead
        self._pieces: Sequence[bytes] = ()
        self._ends: frozenset[int] = frozenset()
        self._looking: Future[None] | None = None  # ahead: matchers are in use until it is done

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the vocabulary; called before the first `compile`."""
        self._eos_token_ids = vocabulary.eos_token_ids
        self._num_words = -(-len(vocabulary.pieces) // 32)
        self._pieces = vocabulary.pieces
        self._ends = frozenset(vocabulary.eos_token_ids)
        self._compiler.set_vocabulary(vocabulary)

    @property
    def in_use(self) -> bool:
        """Whether any request has a grammar that is ready."""
        return bool(self._entries)

    def compile(self, source: GrammarSource) -> Future[Grammar]:
        """The grammar, now or later; a GrammarError if it cannot be made. Never blocks."""
        return self._compiler.compile(source)

    def open(self, request_id: str, kind: GrammarKind, grammar: Grammar, *, ignores_eos: bool = False) -> None:
        """Put a request at the beginning of its grammar.

        Under `ignores_eos` end-of-sequence is not allowed anywhere: the output goes on while the grammar does.
        """
        self._entries[request_id] = _Entry(grammar.matcher(), kind, ignores_eos)

    def close(self, request_id: str) -> None:
        """Forget a request; does nothing for one without a grammar."""
        self._entries.pop(request_id, None)

    def start_masks(self, rows: Sequence[MaskedRow]) -> Future[Masks]:
        """Compute what may come next on another thread: a line per row, and one behind it for each of its drafts.

        Tokens are accepted after it is done. Lines of a request that is not known any more, or whose matcher fails,
        allow everything; so do those behind a draft that the grammar forbids, which count for nothing.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")
        entries = [self._entries.get(row.request_id) for row in rows]
        if any(row.draft_token_ids for row in rows):
            masks = self._thread.submit(self._fill_ahead, entries, [row.draft_token_ids for row in rows])
        else:
            masks = self._thread.submit(self._fill, entries)
        if self._look_ahead:  # when the step has its masks, so that it does not wait for this
            drafts = [row.draft_token_ids for row in rows]
            self._looking = self._thread.submit(self._find_forced, entries, drafts, masks)
        return masks

    def forced(self, request_id: str) -> tuple[int, list[int]]:
        """Tokens that its grammar forces on a request, and the number of its output tokens before them."""
        entry = self._entries.get(request_id)
        return (0, []) if entry is None else entry.forced

    def accept(self, request_id: str, token_ids: Sequence[int]) -> Standing:
        """Go on over a request's new tokens, if it has a grammar, up to the one that completes it."""
        entry = self._entries.get(request_id)
        if entry is None:
            return _FREE
        if self._looking is not None:
            self._looking.result()
            self._looking = None
        matcher = entry.matcher
        entry.num_accepted += len(token_ids)
        for count, token in enumerate(token_ids, 1):
            if not matcher.accept((token,)):
                return _astray(entry)
            if matcher.is_complete:
                return Standing(is_complete=True, num_tokens=count)
        return _FREE

    def shutdown(self) -> None:
        self._compiler.shutdown()
        if self._thread is not None:
            self._thread.shutdown()

    def _new_masks(self, count: int) -> Masks:
        return np.empty((count, self._num_words), dtype=np.int32)

    def _fill(self, entries: list[_Entry | None]) -> Masks:
        masks = self._room(len(entries))
        known = {index: entry for index, entry in enumerate(entries) if entry is not None}
        if len(known) == len(entries):
            self._fill_into(masks, list(known.values()))
        else:
            masks.fill(-1)
            self._fill_lines(masks, known)
        return masks

    def _fill_ahead(self, entries: list[_Entry | None], drafts: list[Sequence[int]]) -> Masks:
        """The same with lines for drafts: matchers go on over them, one draft of each at a time, and back again."""
        starts = list(accumulate((1 + len(tokens) for tokens in drafts), initial=0))
        masks = self._room(starts.pop())
        masks.fill(-1)
        ahead = {index: entry for index, entry in enumerate(entries) if entry is not None}
        gone: dict[int, int] = {}  # index -> drafts that its matcher went over
        for depth in range(1 + max(map(len, drafts))):
            self._fill_lines(masks, {starts[index] + depth: entry for index, entry in ahead.items()})
            ahead = {
                index: entry
                for index, entry in ahead.items()
                if depth < len(drafts[index]) and entry.matcher.try_accept(drafts[index][depth])
            }
            gone |= dict.fromkeys(ahead, depth + 1)
            ahead = {index: entry for index, entry in ahead.items() if not entry.matcher.is_complete}
        for index, count in gone.items():
            entry = entries[index]
            assert entry is not None
            entry.matcher.rollback(count)
        return masks

    def _find_forced(self, entries: list[_Entry | None], drafts: list[Sequence[int]], masks: Future[Masks]) -> None:
        """Let matchers go on behind their drafts over tokens without alternative, all at a time, and back again."""
        known = {index: entry for index, entry in enumerate(entries) if entry is not None}
        ends = [end - 1 for end in accumulate(1 + len(tokens) for tokens in drafts)]
        gone: dict[int, list[int]] = {}  # index -> what its matcher went over
        lines = masks.result()[[ends[index] for index in known]] if known else self._new_masks(0)
        for depth in range(1 + self._look_ahead):
            going: dict[int, _Entry] = {}
            for (index, entry), token in zip(known.items(), self._without_alternative(lines), strict=True):
                if token is None:
                    continue
                ahead = [*drafts[index], token] if depth == 0 else [token]
                accepted = list(takewhile(entry.matcher.try_accept, ahead))
                gone.setdefault(index, []).extend(accepted)
                if accepted == ahead and not entry.matcher.is_complete:
                    going[index] = entry
            known = going
            if not known:
                break
            lines = self._new_masks(len(known))
            self._fill_into(lines, list(known.values()))
        for index, looked in enumerate(entries):  # what was found before holds until now: a plan may read it
            if looked is not None:
                tokens, before = gone.get(index, []), len(drafts[index])
                if tokens:
                    looked.matcher.rollback(len(tokens))
                looked.forced = looked.num_accepted + before, tokens[before:]

    def _without_alternative(self, masks: Masks) -> list[int | None]:
        """For each mask, the token that has to come: the only one, or the longest if all others are its beginnings.

        Of a text that has to come, the model may choose how to spell it; it mostly takes the longest token.
        """
        counts = np.bitwise_count(masks.view(np.uint32)).sum(axis=1)
        found: list[int | None] = []
        for mask, count in zip(masks, counts, strict=True):
            token = None
            if 0 < count <= _FEW:
                words = np.flatnonzero(mask)
                places, bits = np.nonzero(mask[words].view(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32) & 1)
                allowed = (32 * words[places] + bits).tolist()
                pieces = [self._pieces[other] for other in allowed]
                longest = max(pieces, key=len)
                may_end = not self._ends.isdisjoint(allowed)
                if count == 1 or (not may_end and all(piece and longest.startswith(piece) for piece in pieces)):
                    token = allowed[pieces.index(longest)]
            found.append(token)
        return found

    def _fill_lines(self, masks: Masks, entries: dict[int, _Entry]) -> None:
        """Write the masks of these entries, by line, between others."""
        if entries:
            filled = self._new_masks(len(entries))
            self._fill_into(filled, list(entries.values()))
            masks[list(entries)] = filled

    def _fill_into(self, filled: Masks, known: list[_Entry]) -> None:
        if not known:
            return
        self._compiler.backend().fill([entry.matcher for entry in known], filled)
        endless = [index for index, entry in enumerate(known) if entry.ignores_eos]
        if endless:
            for token in self._eos_token_ids:
                filled.view(np.uint32)[endless, token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        for index, entry in enumerate(known):
            if entry.matcher.error is not None:
                filled[index] = -1


def _astray(entry: _Entry) -> Standing:
    matcher = entry.matcher
    if not matcher.is_too_complex:
        return Standing(error=f"its grammar cannot go on: {matcher.error}")
    field = f"structured_outputs.{entry.kind}"
    return Standing(error=f"{field} is too complex: {matcher.error}; make it simpler", error_field=field)
