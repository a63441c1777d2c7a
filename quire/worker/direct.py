"""DirectModel: one sequence straight through a model, without scheduler or sampling. For `verify` and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.base import make_batch
from quire.config.engine import EngineConfig
from quire.layers.attention import ForwardBatch
from quire.worker.planning import plan_engine
from quire.worker.worker import bind_caches, load_model


class DirectModel:
    def __init__(self, config: EngineConfig) -> None:
        self._plan = plan_engine(config)
        self._block_size = config.cache.block_size
        self.model = load_model(self._plan, config)
        bind_caches(self._plan, self.model.attention_layers(), self._block_size)
        self.source = self._plan.source
        self.dtype = self._plan.dtype
        self.vocab_size = self._plan.description.vocab_size
        self.max_model_len = self._plan.ledger.max_model_len

    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits of every position, in one pass. [len(token_ids), vocab]"""
        count, device = len(token_ids), self._plan.platform.device
        num_groups, blocks = len(self._plan.ledger.layout.groups), -(-count // self._block_size)
        positions = torch.arange(count, device=device)
        attention = []
        for group in range(num_groups):
            table = 1 + group * blocks + torch.arange(blocks, device=device)
            batch = make_batch(
                query_lens=[count],
                context_lens=[count],
                block_tables=table[None].to(torch.int32),
                slot_mapping=table[positions // self._block_size] * self._block_size + positions % self._block_size,
                block_size=self._block_size,
            )
            attention.append(self._plan.backend.prepare(batch))
        hidden = self.model(torch.tensor(token_ids, device=device), positions, ForwardBatch(attention=attention))
        return self.model.compute_logits(hidden)
