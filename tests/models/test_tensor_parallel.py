"""Ranks in threads: a model split over a group gives the logits of the whole one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.quant.in_parts import NUM_PARTS, InParts
from quire.loader.mapper import load_weights
from quire.models.base import BuildContext
from quire.models.decoder import DecoderLM
from quire.models.minimax import MiniMax
from quire.models.registry import model_class
from quire.parallel.collectives import Collectives
from quire.parallel.groups import ParallelGroup
from quire.parallel.shared_memory import SharedMemory, SharedMemoryCollectives, collective_bytes
from quire.types.errors import ConfigError
from tests.models.harness import FolderCheckpoint, PagedSequence, load
from tests.models.zoo import ARCHITECTURES, LATENTS, MIXTURES, RECURRENT, SIZES

TOKENS = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(3)).tolist()


class ThreadCollectives(Collectives):
    """Ranks are threads that meet at a barrier; `shared` holds what each one brings."""

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[Tensor]) -> None:
        self.rank, self.barrier, self.shared = rank, barrier, shared
        self.num_gathered = 0

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.shared[self.rank] = x
        self.barrier.wait(timeout=30)
        everyone = list(self.shared)
        self.barrier.wait(timeout=30)
        return everyone

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange(x)).sum(0)

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        gathered = torch.cat(self.exchange(x), dim=-1)
        assert gathered.shape[-1] == total
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.own_rows(self.all_reduce(x))

    def own_rows(self, x: Tensor) -> Tensor:
        share = -(-x.shape[0] // self.barrier.parties)
        mine = x[self.rank * share : (self.rank + 1) * share]
        return torch.cat((mine, mine.new_zeros(share - len(mine), *x.shape[1:])))

    def gather_rows(self, x: Tensor, total: int) -> Tensor:
        self.num_gathered += 1
        return torch.cat(self.exchange(x))[:total]

    def minimum(self, values: Sequence[int]) -> list[int]:
        raise AssertionError("nothing is planned here")


class TreeCollectives(ThreadCollectives):
    """Sums as real collectives do: halves of the ranks, halved again and again."""

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.exchange(x)
        while len(parts) > 1:
            parts = [parts[index] + parts[index + 1] for index in range(0, len(parts), 2)]
        return parts[0]


class GatheredParts(ThreadCollectives):
    """Leaves sums over ranks to the norm that reads them, as NCCL does."""

    gathers_parts = True

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums = getattr(self, "num_sums", 0) + 1
        return super().all_reduce(x)

    def gather_parts(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange(x))

    def scatter_parts(self, x: Tensor) -> Tensor:
        return torch.stack([self.own_rows(part) for part in self.exchange(x)])


def logits_of_ranks(
    folder: Path, size: int, *, splits_experts: bool = False, kind: type[ThreadCollectives] = ThreadCollectives
) -> list[Tensor]:
    barrier, shared = threading.Barrier(size), [torch.empty(0)] * size

    def run(rank: int) -> Tensor:
        checkpoint, links = FolderCheckpoint(folder), kind(rank, barrier, shared)
        group = ParallelGroup(rank, size, links, splits_experts=splits_experts)
        ctx = BuildContext(dtype=torch.float32, max_model_len=64, group=group)
        model = model_class(checkpoint.config).from_config(checkpoint.config, ctx)
        load_weights(model, checkpoint)
        sequence = PagedSequence(model, len(TOKENS))
        found = torch.cat((sequence.feed(TOKENS[:13]), sequence.feed(TOKENS[13:])))
        assert getattr(links, "num_sums", 2) == 2, "the embeddings of both steps alone are summed by themselves"
        sequence, links.num_gathered = PagedSequence(model, len(TOKENS)), 0
        by_rows = []
        for part in (TOKENS[:13], TOKENS[13:]):  # sequence parallel, by numbers of rows that ranks do not divide
            with group.rows.of_step(len(part)):
                by_rows.append(sequence.feed(part))
        assert torch.equal(torch.cat(by_rows), found)
        assert isinstance(model, DecoderLM)
        assert isinstance(model, MiniMax) or links.num_gathered >= 2 * len(model.model.layers), "in every layer"
        return found

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


CASES = [
    (name, size)
    for name, sizes in {
        "llama-tied-biases": (2, 4),  # four ranks share two KV heads
        "qwen2": (2,),
        "gemma2": (2,),
        "phi3": (2,),
        "olmo2": (2,),
        "granite": (4,),
        "qwen2-moe": (2,),
        "gpt-oss": (2,),
        "ernie-moe": (2,),
        "deepseek-v2-lite": (2,),  # the latent is whole on each rank
        "deepseek-v3": (2,),
        "deepseek-v32": (2,),
        "glm-moe-dsa-shared": (2,),
        "longcat-flash": (2,),
        "kimi-linear-published": (2,),
        "nemotron-h-latent-moe": (2,),
        "bailing-hybrid": (2,),
        "minimax": (2,),  # a norm over the heads of all ranks
        "lfm2": (2,),
        "qwen3-next": (2,),
        "qwen3.5": (2, 4),  # four ranks share two heads of keys
        "jamba": (2,),
        "falcon-mamba": (2,),
        "bamba": (2,),  # one norm over the heads of all ranks
        "nemotron-h": (2,),
        "falcon-h1": (2,),
    }.items()
    for size in sizes
]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_split_models_give_the_same_logits(name: str, size: int, tmp_path: Path) -> None:
    next(tiny for tiny in (*ARCHITECTURES, *MIXTURES, *LATENTS, *RECURRENT) if tiny.name == name).make(tmp_path)
    expected = PagedSequence(load(tmp_path, 64), len(TOKENS)).feed(TOKENS)
    for logits in logits_of_ranks(tmp_path, size):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


REAL = ("llama-tied-biases", "deepseek-v2-lite", "minimax", "qwen3.5")  # dense, latent, a norm over all ranks, states
SHARED = [
    pytest.param(name, size, marks=() if name in REAL else pytest.mark.nightly)
    for name, size in [*CASES, ("deepseek-v2-lite", 4), ("minicpm3", 4), ("gemma2", 4)]
]


@pytest.mark.parametrize(("name", "size"), SHARED)
def test_split_models_give_the_same_logits_over_shared_memory(name: str, size: int, tmp_path: Path) -> None:
    """The collectives of ranks on a CPU themselves, with ranks in threads."""
    next(tiny for tiny in (*ARCHITECTURES, *MIXTURES, *LATENTS, *RECURRENT) if tiny.name == name).make(tmp_path)
    expected = PagedSequence(load(tmp_path, 64), len(TOKENS)).feed(TOKENS)
    memory = SharedMemory(collective_bytes(size))

    def run(rank: int) -> Tensor:
        checkpoint = FolderCheckpoint(tmp_path)
        group = ParallelGroup(rank, size, SharedMemoryCollectives(memory, rank, size))
        ctx = BuildContext(dtype=torch.float32, max_model_len=64, group=group)
        model = model_class(checkpoint.config).from_config(checkpoint.config, ctx)
        load_weights(model, checkpoint)
        sequence = PagedSequence(model, len(TOKENS))
        return torch.cat((sequence.feed(TOKENS[:13]), sequence.feed(TOKENS[13:])))

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    memory.close()
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "size"), [("llama-tied-biases", 4), ("qwen2", 2)])
def test_norms_add_up_what_ranks_have(name: str, size: int, tmp_path: Path) -> None:
    next(tiny for tiny in ARCHITECTURES if tiny.name == name).make(tmp_path)
    expected = PagedSequence(load(tmp_path, 64), len(TOKENS)).feed(TOKENS)
    for logits in logits_of_ranks(tmp_path, size, kind=GatheredParts):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "size"), [("qwen2-moe", 2), ("gpt-oss", 2), ("deepseek-v3", 4)])
def test_ranks_with_whole_experts_give_the_same_logits(name: str, size: int, tmp_path: Path) -> None:
    next(tiny for tiny in (*MIXTURES, *LATENTS) if tiny.name == name).make(tmp_path)
    expected = PagedSequence(load(tmp_path, 64), len(TOKENS)).feed(TOKENS)
    for logits in logits_of_ranks(tmp_path, size, splits_experts=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


EXACT = {  # of each kind of layer, where it is not refused
    "gemma2": (2, 4),  # windows and soft caps
    "olmo2": (2,),  # a norm over the heads of all ranks
    "minicpm3": (2, 4),  # latent attention
    "qwen3.5": (2, 4),  # gated delta rule
    "falcon-mamba": (2, 4),
    "bamba": (2, 4),  # one norm over the heads of all ranks, behind a recurrence
    "lfm2": (2, 4),  # short convolutions
}


def exact_logits(folder: Path, size: int, quantization: str) -> list[Tensor]:
    barrier, shared = threading.Barrier(size), [torch.empty(0)] * size

    def run(rank: int) -> Tensor:
        checkpoint = FolderCheckpoint(folder)
        group = ParallelGroup(rank, size, TreeCollectives(rank, barrier, shared), exact=True)
        ctx = BuildContext(dtype=torch.float32, max_model_len=64, group=group, quantization=quantization)
        model = model_class(checkpoint.config).from_config(checkpoint.config, ctx)
        load_weights(model, checkpoint)
        methods = [part for module in model.modules() if isinstance(module, InParts) for part in module.parts]
        assert len(methods) >= NUM_PARTS // size
        if quantization == "int8":
            assert {matrix.format for part in methods for matrix in part.matrices} == {"code8"}
        sequence = PagedSequence(model, len(TOKENS))
        return torch.cat((sequence.feed(TOKENS[:13]), sequence.feed(TOKENS[13:])))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize(("name", "quantization"), [*((name, "auto") for name in EXACT), ("gemma2", "int8")])
def test_sums_in_fixed_parts_give_equal_bits(name: str, quantization: str, tmp_path: Path) -> None:
    tiny = next(tiny for tiny in (*ARCHITECTURES, *LATENTS, *RECURRENT) if tiny.name == name)
    wide = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512} if quantization == "int8" else {}
    replace(tiny, keys={**tiny.keys, **wide}).make(tmp_path)
    (expected,) = exact_logits(tmp_path, 1, quantization)
    for size in EXACT[name]:
        for logits in exact_logits(tmp_path, size, quantization):
            assert torch.equal(logits, expected)


def test_a_norm_over_all_kv_heads_needs_them_apart() -> None:
    config: dict[str, Any] = {**SIZES, "architectures": ["Olmo2ForCausalLM"]}
    ctx = BuildContext(dtype=torch.float32, max_model_len=64, group=ParallelGroup(0, 4))
    with pytest.raises(ConfigError, match="at most 2"):
        model_class(config).from_config(config, ctx)
