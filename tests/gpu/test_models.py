"""Every architecture on the GPU gives the logits of the CPU, in float32 without TF32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.worker.direct import DirectModel
from tests.gpu.helpers import needs_gpu
from tests.models.zoo import ARCHITECTURES, LENGTH, MIXTURES, RECURRENT, Tiny

pytestmark = needs_gpu
TOKENS = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()
TOLERANCE = 1e-3


def logits_on(folder: Path, tiny: Tiny, device: str, **settings: Any) -> Tensor:
    flat = {"dtype": "float32", "max_model_len": tiny.max_model_len, "kv_cache_memory": 1 << 22, **settings}
    config = EngineConfig.from_flat(model=str(folder), device=device, **flat)
    with torch.inference_mode():
        return DirectModel(config).logits(TOKENS).float().cpu()


# Heads of fewer features than a matrix unit takes, as models made for tests have them.
NARROW = Tiny("narrow heads", "LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8})


# A machine with a GPU may have an older transformers than the project's tests ask for.
KNOWN = [tiny for tiny in (*ARCHITECTURES, *MIXTURES, *RECURRENT, NARROW) if hasattr(transformers, tiny.config)]


@pytest.mark.parametrize("tiny", KNOWN, ids=lambda tiny: tiny.name)
def test_logits_of_the_cpu(tiny: Tiny, tmp_path: Path) -> None:
    tiny.make(tmp_path)
    expected = logits_on(tmp_path, tiny, "cpu", attention_backend="torch_ref")
    assert not torch.backends.cuda.matmul.allow_tf32
    for deterministic in (False, True):
        actual = logits_on(tmp_path, tiny, "cuda", deterministic=deterministic)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
        best = expected.topk(2).values
        clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE
        assert torch.equal(actual.argmax(-1)[clear], expected.argmax(-1)[clear])


def test_a_model_wide_enough_for_tiles_and_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matmuls of such models have kernels of their own, and leave their parts to the norms after them."""
    from quire.kernels.triton import norm

    sizes = {"hidden_size": 1024, "intermediate_size": 1152, "num_hidden_layers": 2, "initializer_range": 0.04}
    tiny = Tiny("wide", "LlamaConfig", sizes)
    tiny.make(tmp_path)
    expected = logits_on(tmp_path, tiny, "cpu", attention_backend="torch_ref")
    merged, merge = [], norm.add_rms_norm_split_k
    monkeypatch.setattr(
        norm, "add_rms_norm_split_k", lambda *given: (merged.append(given[0].shape[0]), merge(*given))[1]
    )
    fast, deterministic = (
        logits_on(tmp_path, tiny, "cuda", dtype="bfloat16", deterministic=mode) for mode in (False, True)
    )
    assert len(merged) == 2 * sizes["num_hidden_layers"]
    assert min(merged) > 1
    for actual in (fast, deterministic):
        assert float((actual - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("settings", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=["weights", "cache"])
def test_fp8_stays_near(settings: dict[str, Any], tmp_path: Path) -> None:
    """Three bits of mantissa: a matmul is off by a few percent of its norm, and logits by some times as much."""
    tiny = next(tiny for tiny in ARCHITECTURES if tiny.name.startswith("llama"))
    tiny.make(tmp_path)
    plain = logits_on(tmp_path, tiny, "cuda", dtype="bfloat16")
    actual = logits_on(tmp_path, tiny, "cuda", **{"dtype": "bfloat16", **settings})
    error = float((actual - plain).norm() / plain.norm())
    assert 0.0 < error < 0.3
