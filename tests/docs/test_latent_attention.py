"""docs/internals/latent-attention.md is true: what `quire fit` prints of DeepSeek-V3's config, and its picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "internals" / "latent-attention.md").read_text(encoding="utf-8")
CONFIG = {  # deepseek-ai/DeepSeek-V3
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16"},
    **{"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "hidden_act": "silu"},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    **{"vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000},
    **{"bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 1, "tie_word_embeddings": False},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
        "original_max_position_embeddings": 4096,
    },
}


def test_what_fit_prints_of_deepseek_v3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "DeepSeek-V3").mkdir()
    (tmp_path / "DeepSeek-V3" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    command = re.search(r"^\$ quire (fit .*)\n(weights .*)\n(KV blocks .*)$", PAGE, flags=re.M)
    assert command is not None
    main(command[1].split())
    printed = "".join(capsys.readouterr())
    assert command[3] in printed
    assert command[2].split()[2] in printed  # the parameters; their bytes differ with the instructions of a machine
    bits = re.search(r"M parameters of ([0-9.]+) bits", printed)
    assert bits is not None
    assert 8 <= float(bits[1]) < 10, "the config says that matrices are fp8"
    (saved,) = re.findall(r"^latent cache: .*$", PAGE, flags=re.M)
    assert saved in printed.splitlines(), "also where the machine is too small"


def test_what_the_page_says_of_sizes() -> None:
    line, heads = 512 + 64, 128 * (128 + 64 + 128)
    of_token = {"69 KiB": 2 * 61 * line / 2**10, "4.8 MiB": 2 * 61 * heads / 2**20}
    for said, number in {**of_token, "19.1 GiB": 4112 * 2 * 61 * heads / 2**30}.items():
        assert f" {said}" in PAGE
        assert f"{number:.1f}".startswith(said.split()[0]) or round(number) == int(said.split()[0])


def test_its_picture_is_there() -> None:
    for picture in re.findall(r"!\[.*\]\((.*)\)", PAGE):
        assert (ROOT / "docs" / "internals" / picture).resolve().is_file()
