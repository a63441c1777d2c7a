"""GLM-4-MoE-Lite (GLM-4.7-Flash): DeepSeek-V3 with other defaults."""

from __future__ import annotations

from typing import Any

from quire.models.deepseek_v3 import DeepseekV3
from quire.models.dots1 import grouped_experts


class Glm4MoeLite(DeepseekV3):
    @classmethod
    def experts(cls, config: dict[str, Any]) -> dict[str, Any]:
        defaults = {"norm_topk_prob": True, "routed_scaling_factor": 1.8}
        return grouped_experts(config, first_k_dense_replace=1, n_shared_experts=1, **defaults)
