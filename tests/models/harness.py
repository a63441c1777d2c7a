"""Run a Quire model beside transformers on the same weights: any chunking of one sequence, with a paged KV cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quire.attention.base import AttentionBackend, make_batch
from quire.attention.state import StateBackend
from quire.attention.torch_latent import TorchLatentAttention
from quire.attention.torch_ref import TorchAttention
from quire.layers.attention import ForwardBatch
from quire.layers.latent_attention import LatentAttention
from quire.layers.state import StateCache
from quire.loader.checkpoint import Checkpoint, TensorInfo
from quire.loader.mapper import load_weights
from quire.models.base import BuildContext, CausalLM
from quire.models.registry import model_class

BLOCK_SIZE = 4
BACKEND = TorchAttention()  # one for all: it probes each head size and dtype once
LATENT_BACKEND = TorchLatentAttention()
MIN_TOKENS = 4  # rows a step is padded to


class FolderCheckpoint(Checkpoint):
    """A one-file safetensors folder as `save_pretrained` writes it."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "pt") as file:
            self.data = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        self.reads: list[str] = []

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(x.shape), x.dtype, x.nbytes) for name, x in self.data.items()}

    def get(self, name: str) -> Tensor:
        self.reads.append(name)
        return self.data[name]


def build(config: dict[str, Any], max_model_len: int, dtype: torch.dtype = torch.float32) -> CausalLM:
    return model_class(config).from_config(config, BuildContext(dtype=dtype, max_model_len=max_model_len))


def load(folder: Path, max_model_len: int) -> CausalLM:
    checkpoint = FolderCheckpoint(folder)
    model = build(checkpoint.config, max_model_len)
    load_weights(model, checkpoint)
    return model


class PagedSequence:
    """One sequence in a model: feeds tokens in chunks and keeps its KV blocks, deliberately out of order."""

    def __init__(
        self,
        model: CausalLM,
        max_len: int,
        backend: AttentionBackend = BACKEND,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if backend is BACKEND and any(isinstance(layer, LatentAttention) for layer in model.cached_layers()):
            backend = LATENT_BACKEND
        self.model, self.backend = model, backend
        self.length = 0
        num_blocks = -(-max_len // BLOCK_SIZE)
        self.table = (torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1).to(torch.int32)
        self.states = StateBackend(backend)
        dtype = kv_dtype or next(parameter.dtype for name, parameter in model.named_parameters() if "norm" in name)
        for layer in model.cached_layers():
            is_state = isinstance(layer, StateCache)
            cache = torch.full(
                layer.cache_shape(backend, num_blocks + 1, BLOCK_SIZE, dtype),
                float("nan") if is_state else 0.0,  # a state is never read that was not written
                dtype=layer.cache_dtype(dtype),
            )
            layer.bind(self.states if is_state else backend, cache, group=int(is_state))

    def inputs(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor, ForwardBatch]:
        """What a model's forward takes for the next chunk, padded to MIN_TOKENS."""
        count = len(tokens)
        positions = torch.arange(self.length, self.length + count)
        slots = self.table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        self.length += count

        def pad(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, max(0, MIN_TOKENS - count)))

        attention = make_batch(
            query_lens=[count],
            context_lens=[self.length],
            block_tables=self.table.unsqueeze(0),
            slot_mapping=pad(slots),
            block_size=BLOCK_SIZE,
        )
        batch = ForwardBatch([part.prepare_eager(attention) for part in (self.backend, self.states)])
        return pad(torch.tensor(tokens)), pad(positions), batch

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Logits [len(tokens), vocab] of the next chunk."""
        hidden = self.model(*self.inputs(tokens))
        return self.model.compute_logits(hidden)[: len(tokens)]


def run_chunks(
    model: CausalLM,
    tokens: Sequence[int],
    sizes: Sequence[int],
    backend: AttentionBackend = BACKEND,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    """Logits of a whole sequence, fed in chunks of the given sizes (the last one repeats)."""
    sequence, logits, start, sizes = PagedSequence(model, len(tokens), backend, kv_dtype), [], 0, list(sizes)
    while start < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        logits.append(sequence.feed(tokens[start : start + size]))
        start += size
    return torch.cat(logits)


def greedy(model: CausalLM, prompt: Sequence[int], count: int) -> list[int]:
    sequence = PagedSequence(model, len(prompt) + count)
    logits, generated = sequence.feed(prompt), []
    for _ in range(count):
        generated.append(int(logits[-1].argmax()))
        logits = sequence.feed(generated[-1:])
    return generated
