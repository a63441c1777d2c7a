"""The sampler: from logits to tokens, on the device, each row as if it were alone.

Order, with the results of vLLM's:

1. masks: the grammar's, and that of allowed_token_ids
2. the features of registry.py: edits (logit_bias, min_tokens, bad_words), penalties, the end of thinking
3. greedy rows take the highest logit, the lower id among equals; for the others
4. temperature, min_p, top_k, top_p, then argmax of logit + Gumbel noise, keyed by (seed, output position, token id)
5. log-probabilities, of the logits as the model gave them

Eager and captured steps run this one list of ops; which of them a step needs is its SamplingKind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.base import Target
from quire.ops.logprobs import LOGPROBS
from quire.ops.sample import SAMPLE_WITHIN
from quire.ops.shaping import KEEP_ALLOWED
from quire.ops.step import APPEND_GREEDY, APPEND_TOKENS, GATHER_SAMPLING
from quire.runner.sampling.allowed_tokens import AllowedTokens
from quire.runner.sampling.base import Feature, RowState, RowValues
from quire.runner.sampling.logprobs import AskedLogprobs, Logprobs, pack_logprobs
from quire.runner.sampling.mask_buffer import ALLOWED, GRAMMAR, MaskBuffer, mask_words
from quire.runner.sampling.parameters import sampling_parameters
from quire.runner.sampling.registry import FEATURES, MakeFeature
from quire.runner.sampling.sharded import ShardedVocab, VocabShard, WholeVocab
from quire.types.ledger import EngineSizes, LedgerLine
from quire.types.sampling import SamplingParams
from quire.types.step import RowStart

CAPTURED_LOGPROBS = (0, 5, 20)  # numbers of top logprobs for which sampling is captured


class SamplingKind(NamedTuple):
    """What the sampling of a step has to do: what some of its rows ask for.

    There are few kinds, since each is captured when it first comes up, and everybody waits for that.
    """

    greedy: bool = True  # every row takes the highest logit
    masked: bool = False  # some row has a grammar's mask
    groups: frozenset[str] = frozenset()  # of features that some row asks for
    logprobs: int | None = None  # number of top logprobs
    eager: bool = False  # some row asks for what cannot be captured
    drafted: bool = False  # some row has drafts, so rows come several times
    adapted: bool = False  # some row has a LoRA adapter, which may be on the head too
    candidates: int = 0  # tokens that each rank offers of its slice of the vocabulary; 0: it has all logits


class Sampler:
    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        features: Sequence[MakeFeature] = FEATURES,
        max_samples: int | None = None,
        shard: VocabShard | None = None,
    ) -> None:
        """`max_samples`: places of a step that are sampled, without drafts all rows; `shard`: None has all tokens."""
        self._max_samples = max_samples or max_rows
        self.masks = MaskBuffer(vocab_size, max_rows, self._max_samples, device)
        place = (vocab_size, max_rows, device)
        self._features: list[Feature] = [
            AllowedTokens(*place, self.masks),
            *(make(*place) for make in features),
        ]
        # One more row, for the padding of a batch: its zeros are greedy.
        self._vocab_size, self._sampling_table = vocab_size, RowValues(max_rows + 1, 4, torch.float64, device)
        self._logprobs = Logprobs(vocab_size)
        self.wanted_logprobs = self._logprobs.wanted
        self.asked_logprobs, target = AskedLogprobs(device), Target(device.type)
        self._vocab = WholeVocab() if shard is None else ShardedVocab(shard, target)
        self._keep_allowed, self._gather_logprobs = KEEP_ALLOWED.bind(target), LOGPROBS.bind(target)
        self._gather, self._sample_within = GATHER_SAMPLING.bind(target), SAMPLE_WITHIN.bind(target)
        self._append, self._append_greedy = APPEND_TOKENS.bind(target), APPEND_GREEDY.bind(target)
        self._asked: dict[int, list[Feature]] = {}  # row -> features that it asks for; none: no entry
        self._sampled: set[int] = set()  # rows that are not greedy
        self._last: tuple[bool, list[int], SamplingKind] | None = None  # a steady batch is looked at once

    @staticmethod
    def contributes(sizes: EngineSizes) -> Iterable[LedgerLine]:
        """Logits, copies of them, the words of the random generator, and keys by which top logprobs are found."""
        yield from MaskBuffer.contributes(sizes)
        num_bytes = sizes.max_num_samples * sizes.vocab_size * 4 * 8
        yield LedgerLine("sampling", num_bytes, f"{sizes.max_num_samples} rows of {sizes.vocab_size} logits")

    @staticmethod
    def captured_bytes(sizes: EngineSizes) -> int:
        """What captured steps add where sampling is a part of them, and keep.

        Logits, a copy that is shaped, counts for penalties, what draws and log-probabilities know
        of parts of the vocabulary, tables of each row.
        """
        vocab, tables = sizes.vocab_size, mask_words(sizes.vocab_size) * 4 + (1 << 15)
        return sizes.max_num_samples * (vocab * (4 + 4 + 4) + vocab // 8 + tables)

    def add_request(self, row: int, start: RowStart) -> None:
        """Stage the parameters of a request that takes this row; one that pools is never sampled. Host only."""
        if not isinstance(start.params, SamplingParams):
            return
        params = start.params
        self._last = None
        asked = [feature for feature in self._features if feature.add_request(row, start)]
        if asked:
            self._asked[row] = asked
        if not params.greedy:
            self._sampled.add(row)
        self._sampling_table.set(row, *sampling_parameters(params, self._vocab_size))
        self._vocab.add_request(row, params)
        self._logprobs.add_request(row, start)
        self.asked_logprobs.add_request(row, start)

    def remove_request(self, row: int) -> None:
        """Forget the row; one that is not there does no harm."""
        self._last = None
        for feature in self._features:
            feature.remove_request(row)
        self._asked.pop(row, None)
        self._sampled.discard(row)
        self._vocab.remove_request(row)
        self._logprobs.remove_request(row)
        self.asked_logprobs.remove_request(row)

    def apply_staged_writes(self) -> None:
        """Bring staged parameters to the device. Call it before `sample`, after adding and removing rows."""
        for feature in self._features:
            feature.apply_staged_writes()
        self._sampling_table.flush()

    def kind(self, row_list: list[int], masked: bool) -> SamplingKind:
        """What sampling for these rows has to do, some of which may have a grammar's mask."""
        if self._last is None or self._last[:2] != (masked, row_list):
            self._last = (masked, list(row_list), self._find_kind(row_list, masked))
        return self._last[2]

    def draft_kind(self, row_list: list[int], masked: bool) -> SamplingKind:
        """The same for tokens that are only proposed: without features that keep something of a row, and logprobs."""
        kind = self.kind(row_list, masked)
        kept = frozenset(feature.group for feature in self._features if feature.capturable)
        return kind._replace(groups=kind.groups & kept, logprobs=None, eager=False, candidates=0)

    @property
    def usual_kinds(self) -> list[SamplingKind]:
        """Those that nearly every engine comes to."""
        return [SamplingKind(greedy=greedy, candidates=count) for greedy, count in self._vocab.usual]

    def _find_kind(self, row_list: list[int], masked: bool) -> SamplingKind:
        asking = [] if self._asked.keys().isdisjoint(row_list) else [row for row in row_list if row in self._asked]
        asked = {feature for row in asking for feature in self._asked[row]}
        most = max(self.wanted_logprobs(row_list).values(), default=None)
        is_wide = most is not None and most > CAPTURED_LOGPROBS[-1]
        if most is not None and not is_wide:
            most = next(count for count in CAPTURED_LOGPROBS if count >= most)
        kind = SamplingKind(
            greedy=self._sampled.isdisjoint(row_list),
            masked=masked,
            groups=frozenset(feature.group for feature in asked),
            logprobs=most,
            eager=is_wide
            or bool(self.asked_logprobs.wanted(row_list))
            or any(not feature.capturable for feature in asked)
            or any(feature.is_oversized(row) for row in asking for feature in self._asked[row]),
        )
        needs_all = masked or kind.groups or kind.eager or most is not None
        return kind if needs_all else kind._replace(candidates=self._vocab.candidates(row_list))

    def errors(self, row_list: list[int]) -> dict[int, str]:
        """Place in the batch -> why a feature failed for this row, after an eager step has sampled."""
        found = {}
        for place, row in enumerate(row_list):
            for feature in self._asked.get(row, ()):
                if (message := feature.error_of(row, place)) is not None:
                    found[place] = message
        return found

    def sample(
        self, kind: SamplingKind, logits: Tensor, rows: Tensor, state: RowState, ahead: Tensor | None = None
    ) -> Tensor:
        """Choose a token for each of rows [m] int64 from logits [m, vocab_size], and append it to the row. No sync.

        With candidates (sharded.py) the logits, which stay as they are, are this rank's. With drafts a row comes
        several times, with ahead [m] int32 of them before the token, behind its known tokens; those that hold and one
        token more are appended. Returns [m, 2] int32: tokens, and OK or a code of quire/types/status.py.
        """
        place = (rows, state.token_ids, state.num_tokens, state.num_computed, state.scratch_row)
        shaped, raw_highest = logits, None
        if kind.masked or kind.groups:
            shaped, raw_highest = self._shape(kind, logits, rows, state, ahead)
        elif kind.greedy:
            if not kind.candidates:
                return self._append_greedy(logits, *place, ahead)
            tokens, highest = self._vocab.choose(logits, kind.candidates)
            return self._append(tokens, highest, *place, None, ahead)
        lengths = (state.num_tokens, state.num_prompt_tokens)
        sampled = self._gather(rows, self._sampling_table.all, state.seeds, *lengths, ahead)
        if kind.candidates:
            tokens, highest = self._vocab.choose(logits, kind.candidates, sampled)
        else:
            tokens, highest = self._sample_within(shaped, *sampled)
        return self._append(tokens, highest, *place, raw_highest, ahead)

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> Tensor:
        """Packed log-probabilities [m, 2 + 2 * k] int32 of tokens [m] and of the `count` top tokens. No sync."""
        return pack_logprobs(*self._gather_logprobs(logits, tokens, count))

    def _shape(
        self, kind: SamplingKind, logits: Tensor, rows: Tensor, state: RowState, ahead: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Logits with every change that may move the highest, and the highest of what they were."""
        if kind.masked:
            self.masks.copy_staged(min(len(rows), self._max_samples))
        first = GRAMMAR if kind.masked else ALLOWED
        last = ALLOWED if kind.groups else GRAMMAR
        buffer = self.masks
        lines, of_drafts = buffer.lines[first : last + 1], ahead if kind.masked else None
        shaped, raw_highest = self._keep_allowed(logits, rows, buffer.masks, lines, of_drafts)
        for feature in self._features:
            if feature.group in kind.groups:
                feature.apply(shaped, rows, state, ahead)
        return shaped, raw_highest
