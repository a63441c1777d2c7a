from __future__ import annotations

import torch

from quire.layers.rope.embedding import RotaryEmbedding
from quire.layers.rope.parameters import RopeParameters
from quire.ops.base import Target

ROPE = RopeParameters(rotary_dim=16, theta=1e4, max_position_embeddings=64)


def test_table_covers_every_position_and_is_not_a_weight() -> None:
    rotary = RotaryEmbedding(ROPE, 100, Target(dtype=torch.bfloat16))
    assert rotary.cos_sin.shape == (100, 16)
    assert rotary.cos_sin.dtype == torch.float32, "only the gathered rows take the model's dtype"
    assert rotary.state_dict() == {}
    cos, sin = rotary(torch.tensor([99, 0]))
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert torch.equal(cos[1], torch.ones(1, 16).bfloat16())


def test_builds_on_meta() -> None:
    with torch.device("meta"):
        assert RotaryEmbedding(ROPE, 8, Target()).cos_sin.is_meta
