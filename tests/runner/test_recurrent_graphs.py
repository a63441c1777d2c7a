"""Hybrid models by the kernels of CUDA in Triton's interpreter, captured: the tokens of eager steps on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.layers.state import StateCache
from quire.platform.cpu import CpuPlatform
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.kernels.device import NATIVE
from tests.kernels.triton.paged import needs_triton
from tests.runner.engines import Rerun, capture_steps, spy_on, worker_of

pytestmark = [needs_triton, pytest.mark.skipif(NATIVE, reason="runs kernels in Triton's interpreter")]
PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
# A prompt of more than one chunk, one beside rows that decode, and one that goes on from a checkpoint of the first.
LONG = [3 + 5 * index % 190 for index in range(70)]
PROMPTS = [LONG, [7, 8, 9], [*LONG[:64], 11, 12]]
DELTA = {  # as in Qwen3-Next and Qwen3.5, without experts
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 2},
    **{"linear_num_key_heads": 1, "num_hidden_layers": 2},
}
MAMBA2 = {"num_hidden_layers": 1, "state_size": 16, "num_heads": 2, "head_dim": 16, "n_groups": 1, "hidden_size": 16}
MODELS = {"qwen3_5_text": DELTA, "mamba2": MAMBA2}  # with gated attention; without any


def answers(folder: Path, backend: str) -> tuple[list[list[int]], int]:
    """The tokens of all prompts, which come a step after each other, and how many steps were captured."""
    core = make_engine(
        folder, attention_backend=backend, max_num_seqs=4, max_model_len=128, kv_cache_memory=1 << 22, dtype="float32"
    )
    spy, driver = spy_on(core), Driver(core)
    for layer in worker_of(core).model.cached_layers():
        if isinstance(layer, StateCache):
            layer.cache.fill_(float("nan"))  # what a state slot held before belongs to nobody
    for index, prompt in enumerate(PROMPTS):
        driver.add(str(index), prompt, PARAMS)
        driver.step()
    found = driver.finish()
    assert all(answer.error is None for answer in found.values())
    return [answer.token_ids for answer in found.values()], len(spy.ran)


@pytest.mark.parametrize("kind", ["mamba2", pytest.param("qwen3_5_text", marks=pytest.mark.nightly)])
def test_same_tokens_as_eager_steps_on_the_cpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path, kind, **MODELS[kind])
    expected, _ = answers(folder, "torch_ref")
    from quire.kernels.triton import chunked_states

    kept, chunks = chunked_states.fold_tokens, []
    monkeypatch.setattr(
        chunked_states, "fold_tokens", lambda *given: (chunks.append(given[0].values.shape[0]), kept(*given))[1]
    )
    capture_steps(monkeypatch, mixed=(16, 80))
    monkeypatch.setattr(CpuPlatform, "name", "cuda")
    found, captured = answers(folder, "triton")
    assert found == expected
    assert captured >= 4
    assert Rerun.captured >= 3
    assert 80 in chunks, "prompts are cut into chunks"
