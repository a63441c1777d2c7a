from __future__ import annotations

import gguf
import pytest

from quire.loader.gguf_names import ARCHITECTURES, ROPE_TABLES, hf_tensor_name
from tests.loader.gguf_tiny import TINY_MODELS, tiny_hf_model


@pytest.mark.parametrize("name", TINY_MODELS)
def test_names_of_gguf_py_lead_back_to_those_of_transformers(name: str) -> None:
    spec = TINY_MODELS[name]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == spec.arch)
    model = tiny_hf_model(name)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for hf_name in dict(model.named_parameters()):  # without a tied lm_head
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert hf_tensor_name(ARCHITECTURES[spec.arch], gguf_name) == hf_name


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_chexps.weight", "blk.0.attn_q.scale", "v.patch.weight", "output", ""]
)
def test_other_names_have_no_place(name: str) -> None:
    assert hf_tensor_name(ARCHITECTURES["llama"], name) is None


def test_rope_tables_are_not_weights() -> None:
    assert all(hf_tensor_name(arch, table) is None for arch in ARCHITECTURES.values() for table in ROPE_TABLES)
