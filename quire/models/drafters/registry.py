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
_LIKE_DEEPSEEK = ("DeepseekV3", "DeepseekV32", "Glm4Moe", "Glm4MoeLite", "GlmMoeDsa")
_LIKE_QWEN = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
MTP_MODULES: Registry[type[DraftHead]] = Registry(
    "target of speculative method mtp",
    "quire.models.drafters",
    {
        **dict.fromkeys((f"{name}ForCausalLM" for name in _LIKE_DEEPSEEK), "mtp:Mtp"),
        **dict.fromkeys((f"{name}ForCausalLM" for name in _LIKE_QWEN), "mtp:Qwen3NextMtp"),
        "LongcatFlashForCausalLM": "mtp:LongcatMtp",
    },
)
