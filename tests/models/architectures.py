"""Which of the registered architectures generate; encoders, which pool, are tested in tests/e2e/test_encoders.py.

And the keys that some of them must have in a config that is for all of them.
"""

from __future__ import annotations

from typing import Any

from quire.models.registry import ARCHITECTURES
from tests.models.zoo import STATE_KEYS

GENERATORS = [name for name in ARCHITECTURES if "generates" in ARCHITECTURES.get(name).capabilities]
_MIXED = ["mamba", "attention", "mamba", "mamba"]
_DEBERTA = {"relative_attention": True, "share_att_key": True}
_NOMIC = {"num_experts": None}  # those that have some are in tests/e2e/test_nomic_experts.py
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("DebertaV2ForMaskedLM", "DebertaV2Model"), _DEBERTA),
    **dict.fromkeys(("NomicBertForMaskedLM", "NomicBertModel"), _NOMIC),
    "LongcatFlashForCausalLM": {"num_layers": 4},
    "Llama4ForCausalLM": {"num_experts_per_tok": 1, "layer_types": None},
    "GraniteMoeHybridForCausalLM": {"layers_block_type": _MIXED, "layer_types": _MIXED},
    "NemotronHForCausalLM": {key: value for key, value in STATE_KEYS.items() if key != "head_dim"},
}


def own_keys(architecture: str, num_layers: int = 4) -> dict[str, Any]:
    found = _OWN.get(architecture, {})
    return {key: value[:num_layers] if isinstance(value, list) else value for key, value in found.items()}
