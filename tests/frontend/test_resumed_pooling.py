"""Embeddings outlive engines: what an engine took with it is computed by the next, and nobody notices."""

from __future__ import annotations

import asyncio

import msgspec

from quire.frontend.async_engine import AsyncEngine
from quire.types.pooling import PoolerConfig
from tests.frontend.fake_client import PoolingClient, text_model
from tests.frontend.mortal import Keeper, MortalClient

TEXTS = [f"text {number}" for number in range(20)]


class MortalPooler(MortalClient):
    """Dies in its first step: before it, or with its outputs unread."""

    def __init__(self, age: int) -> None:
        self._left = age
        super().__init__("", kills=self._dies)
        self.info = msgspec.structs.replace(self.info, pooler=PoolerConfig("mean", 3))

    def _dies(self, client: MortalClient) -> bool:
        self._left -= 1
        return self._left == 0

    _step = PoolingClient._step
    values = PoolingClient.values


async def test_vectors_come_from_the_next_engine() -> None:
    ages = iter((1, 2, -1))
    async with Keeper(lambda: MortalPooler(next(ages))) as keeper:
        engine = AsyncEngine(keeper.client, text_model())
        outputs = await asyncio.wait_for(asyncio.gather(*map(engine.embed, TEXTS)), 20)
        assert [output.outputs.embedding[0] for output in outputs] == [len(text) for text in TEXTS]
        assert len(keeper.engines) == 3
        assert engine.num_requests == 0
        engine.shutdown()
