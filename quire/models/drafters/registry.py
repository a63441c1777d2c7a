"""Heads that draft: by speculative method, and those in a target's own checkpoint by its architecture."""

from __future__ import annotations

from quire.models.base import Model
from quire.models.drafters.base import DraftHead
from quire.utils.registry import Registry

HEADS: Registry[type[Model]] = Registry(
    "draft head",
    "quire.models.drafters",
    {"eagle": "eagle:Eagle", "eagle3": "eagle:Eagle3", "medusa": "medusa:Medusa"},
)
MTP_MODULES: Registry[type[DraftHead]] = Registry(
    "target of speculative method mtp",
    "quire.models.drafters",
    {
        "DeepseekV3ForCausalLM": "mtp:Mtp",
        "DeepseekV32ForCausalLM": "mtp:DeepseekV32Mtp",
        "Glm4MoeForCausalLM": "mtp:Glm4MoeMtp",
        "Glm4MoeLiteForCausalLM": "mtp:Glm4MoeLiteMtp",
        "GlmMoeDsaForCausalLM": "mtp:GlmMoeDsaMtp",
        "Qwen3NextForCausalLM": "mtp:Qwen3NextMtp",
        "Qwen3_5ForCausalLM": "mtp:Qwen35Mtp",
        "Qwen3_5MoeForCausalLM": "mtp:Qwen35MoeMtp",
    },
)
