"""Models whose layers keep different things, through a whole engine: pools by size, none padded, and states."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.core import EngineCore
from quire.kv.layout import KVLayout, KVPool
from quire.layers.attention import CachedLayer
from quire.layers.fusion import whole
from quire.models.blocks import AttentionBlock
from quire.models.config import DecoderConfig, read_config
from quire.models.decoder import DecoderLM
from quire.models.kinds import MIXERS, Mixer
from quire.models.registry import ARCHITECTURES
from quire.sched.preempt import preempt
from quire.types.cache import LayerKV
from quire.types.sampling import SamplingParams
from quire.utils.registry import Registry
from tests.e2e.tiny import SIZES, VOCAB, Driver, make_engine, run_alone
from tests.runner.engines import worker_of


class WideAttention(AttentionBlock):
    """Heads twice as wide as the config says."""

    def __init__(self, config: DecoderConfig, ctx: Any, layer: int) -> None:
        super().__init__(replace(config, head_dim=2 * config.head_dim), ctx, layer)

    @classmethod
    def keeps(cls, config: DecoderConfig, layer: int) -> LayerKV | None:
        return super().keeps(replace(config, head_dim=2 * config.head_dim), layer)


class Uneven(DecoderLM):
    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return replace(
            read_config(config),
            mixers=("attention", "wide", "attention", "attention"),
            sliding_windows=(24, None, 24, None),
            rope=(None,) * 4,
        )


class SumState(CachedLayer):
    """Keeps the sum of what came before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @property
    def keeps(self) -> LayerKV:
        return LayerKV("state", bytes_per_row=4 * self.width)

    def cache_shape(self, backend: Any, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
        return num_blocks, self.width

    def heal(self, block_ids: Tensor) -> None:
        self.cache[block_ids] = self.cache[block_ids].nan_to_num()


class RunningMean(Mixer):
    """A recurrent mixer, token by token: the mean of all hidden states so far."""

    def __init__(self, config: DecoderConfig, ctx: Any, layer: int) -> None:
        super().__init__(config, ctx, layer)
        self.state = SumState(config.hidden_size)

    @classmethod
    def keeps(cls, config: DecoderConfig, layer: int) -> LayerKV | None:
        return SumState(config.hidden_size).keeps

    def forward(self, hidden: Any, rotation: Any, batch: Any) -> Tensor:
        hidden, step, cache = whole(hidden), batch.attention[self.state.group].batch, self.state.cache
        out, token = torch.zeros_like(hidden), 0
        lengths = step.lengths.queries, step.lengths.contexts
        for row, queries, context in zip(step.rows.tolist(), *lengths, strict=True):
            table, begin = step.tables[row].tolist(), context - queries
            total = torch.zeros(self.state.width)
            if begin:
                total += cache[table[(begin - 1) // step.block_size]]
            for position in range(begin, context):
                total += hidden[token]
                out[token] = total / (position + 1)
                token += 1
                if block := table[position // step.block_size]:
                    cache[block] = total
        return out


class Hybrid(DecoderLM):
    @classmethod
    def decoder_config(cls, config: dict[str, Any]) -> DecoderConfig:
        return replace(read_config(config), mixers=("mean", "attention", "mean", "attention"), rope=(None,) * 4)


@pytest.fixture
def folder(tmp_path: Path, contexts: ExitStack) -> Path:
    registries: tuple[Registry[Any], ...] = (MIXERS, ARCHITECTURES)
    for registry in registries:
        contexts.enter_context(registry.with_entries({}))
    MIXERS.register("wide", WideAttention)
    MIXERS.register("mean", RunningMean)
    ARCHITECTURES.register("UnevenForCausalLM", Uneven)
    ARCHITECTURES.register("HybridForCausalLM", Hybrid)
    return tmp_path


SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "attention_backend": "torch_ref",
    "max_model_len": 96,
    "num_threads": 1,
}


def run_batch_and_alone(folder: Path, architecture: str, memory: float) -> tuple[EngineCore, KVLayout]:
    """Serve requests that share prefixes in `memory` times what one takes; all must give what each gives alone."""
    (folder / "config.json").write_text(json.dumps({**SIZES, "architectures": [architecture]}))
    alone = make_engine(folder, enable_prefix_caching=False, **SETTINGS)
    layout = alone.scheduler.kv.layout
    size = int(layout.bytes_for(96, 32) * memory)
    core = make_engine(folder, kv_cache_memory=size, max_num_batched_tokens=32, max_num_seqs=4, **SETTINGS)
    draw = random.Random(3)
    shared = [draw.randrange(3, VOCAB) for _ in range(40)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=10, logprobs=1, ignore_eos=True)
    prompts = [shared[: draw.randrange(1, 40)] + [draw.randrange(3, VOCAB) for _ in range(9)] for _ in range(6)]
    prompts += prompts[:2]
    driver = Driver(core)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, params)
        driver.step()
        state = core.scheduler._state
        if index % 3 == 2 and state.running:
            preempt(state, state.running[-1])  # as if blocks had run out
    answers = driver.finish()
    for index, prompt in enumerate(prompts):
        assert answers[str(index)].error is None
        assert answers[str(index)].content() == run_alone(alone, prompt, params).content()
    assert core.scheduler.stats().num_preemptions > 1
    assert core.scheduler.stats().prefix_hits > 0
    core.scheduler.check_integrity()
    return core, layout


def test_pools_of_different_sizes_serve_any_batch_alike(folder: Path) -> None:
    _, layout = run_batch_and_alone(folder, "UnevenForCausalLM", 1.2)
    assert [(group.kind, group.layers, group.pool) for group in layout.groups] == [
        ("full", (3,), 0),
        ("sliding", (0,), 0),
        ("sliding", (2,), 0),
        ("full", (1,), 1),
    ]
    small, wide = layout.pools
    assert wide.page_bytes == 2 * small.page_bytes


def test_states_and_checkpoints_serve_any_batch_alike(folder: Path) -> None:
    core, layout = run_batch_and_alone(folder, "HybridForCausalLM", 1.5)
    assert [(group.kind, group.layers, group.pool) for group in layout.groups] == [
        ("full", (1, 3), 0),
        ("state", (0, 2), 1),
    ]
    assert layout.pools[1] == KVPool((4 * 64,) * 2, per_row=True)
    assert worker_of(core).model.cached_layers()[0].cache.shape[0] == len(core.scheduler.kv._pools[1].pool.blocks)
