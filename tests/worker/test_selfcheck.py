"""After the self-check every matmul of a model gives a row the same bits at every admitted batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.layers.linear import Linear
from quire.layers.quant.plain import PlainLinear
from quire.models.base import CausalLM
from quire.ops import invariance
from quire.ops.invariance import MIN_ROWS, MatmulRecipe
from quire.planning.engine_plan import plan_engine
from quire.types.sampling import SamplingParams
from quire.worker.selfcheck import make_invariant
from quire.worker.worker import load_model
from tests.e2e.tiny import make_engine, make_model, run_alone
from tests.runner.engines import worker_of

MAX_TOKENS, MAX_SAMPLES = 130, 20

pytestmark = pytest.mark.usefixtures("torch_kernels")  # native matmuls need no recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 500}
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", **sizes)


def load(folder: Path, **settings: Any) -> CausalLM:
    config = EngineConfig.from_flat(model=str(folder), **settings)
    return load_model(plan_engine(config), config)


@torch.inference_mode()
def assert_rows_equal(layer: torch.nn.Module, inner: int, ladder: list[int], dtype: torch.dtype) -> None:
    rows = torch.randn(ladder[-1], inner, generator=torch.Generator().manual_seed(7)).to(dtype)
    whole = layer(rows)
    for size in ladder:
        for first in (0, (ladder[-1] - size) // 2, ladder[-1] - size):
            assert torch.equal(layer(rows[first : first + size].contiguous()), whole[first : first + size])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_matmul_is_invariant(tmp_path: Path, folder: Path, dtype: str, tied: bool) -> None:
    if tied:
        folder = make_model(tmp_path, "qwen2", hidden_size=128, num_hidden_layers=1, tie_word_embeddings=True)
    model = load(folder, dtype=dtype)
    token_ladder, sample_ladder = make_invariant(model, MAX_TOKENS, MAX_SAMPLES)
    assert token_ladder[-1] >= MAX_TOKENS
    assert sample_ladder[-1] >= MAX_SAMPLES
    head = model.lm_head.projection
    layers = [layer for layer in model.modules() if isinstance(layer, Linear) and layer is not head]
    assert layers
    methods = [layer.method for layer in (*layers, head)]
    found = [method.recipe.min_rows for method in methods if isinstance(method, PlainLinear)]
    assert len(found) == len(methods)
    assert max(found[:-1]) <= token_ladder[0]
    assert found[-1] <= sample_ladder[0]
    for layer in layers:
        assert_rows_equal(layer, layer.in_features, token_ladder, getattr(torch, dtype))
    assert_rows_equal(model.lm_head, 128, sample_ladder, getattr(torch, dtype))


def test_layers_of_one_shape_share_a_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    from quire.worker import selfcheck

    def find(matmul: Any, row: torch.Tensor, max_rows: int) -> MatmulRecipe:
        searched.append(max_rows)
        return MatmulRecipe(8)

    monkeypatch.setattr(selfcheck, "find_recipe", find)
    token_ladder, sample_ladder = make_invariant(load(folder), MAX_TOKENS, MAX_SAMPLES)
    assert searched == [MAX_TOKENS] * 4 + [MAX_SAMPLES], "qkv, o, gate_up, down and the head"
    assert (token_ladder[0], sample_ladder[0]) == (8, 8)


def test_an_engine_whose_matmuls_need_tiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where no padding makes matmuls invariant, rows are cut into tiles; the answers stay right."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [list(range(3, 40)), list(range(50, 55))]
    expected = [run_alone(make_engine(folder), prompt, params) for prompt in prompts]
    monkeypatch.setattr(invariance, "all_rows_equal", lambda run, row, sizes: False)
    for chunk in (64, 5):
        core = make_engine(folder, max_num_batched_tokens=chunk, max_num_seqs=2)
        found = [run_alone(core, prompt, params) for prompt in prompts]
        assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    tile = MatmulRecipe(MIN_ROWS[-1], row_tile=MIN_ROWS[-1])
    model = worker_of(core).model
    methods = [module.method for module in model.modules() if isinstance(module, Linear)]
    assert {method.recipe for method in methods if isinstance(method, PlainLinear)} == {tile}
