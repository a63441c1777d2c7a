"""`bench embed`: how fast the engine in this process embeds a batch of texts."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import msgspec

from quire.bench.options import EmbedOptions
from quire.bench.stats import Distribution, distribution

if TYPE_CHECKING:
    from quire.frontend.llm import LLM


class EmbedSummary(msgspec.Struct, frozen=True, kw_only=True):
    batch_size: int
    input_len: int
    repeats: int
    batch_ms: Distribution
    texts_per_s: float  # of the median batch
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def bench_embed(llm: LLM, options: EmbedOptions, *, seed: int) -> EmbedSummary:
    """Embed one batch `repeats` times. Texts are random token ids, new every time."""
    generator, size = random.Random(seed), llm.get_tokenizer().vocab_size
    times: list[float] = []
    for _ in range(options.warmup + options.repeats):
        batch = [generator.choices(range(size), k=options.input_len) for _ in range(options.batch_size)]
        started = time.perf_counter()
        llm.encode(batch, pooling_task="embed", use_tqdm=False)
        times.append(time.perf_counter() - started)
    found = distribution(times[options.warmup :], 1000.0)
    assert found is not None
    rate = options.batch_size / found.p50 * 1000.0
    return EmbedSummary(
        batch_size=options.batch_size,
        input_len=options.input_len,
        repeats=options.repeats,
        batch_ms=found,
        texts_per_s=rate,
        tokens_per_s=rate * options.input_len,
    )
