"""Every way to run on a GPU over the covering array of features: CUDA graphs give the bits of eager steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.runner.cuda_graphs import CudaGraphs
from tests.e2e.test_structured import ROWS, content, params_of, prompt_of, start
from tests.e2e.tiny import make_model
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.gpu.helpers import ROOMY_CACHE, SIZES, needs_gpu
from tests.runner.engines import spy_on

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("ways") / "model", "llama", **SIZES)
    write_tokenizer(folder)
    return folder


def answers(model: Path, way: str, *, at_once: int) -> list[object]:
    settings = {"device": "cuda", "deterministic": True, "kv_cache_memory": ROOMY_CACHE, "max_num_seqs": 8}
    llm, core = start(model, way=way, **settings)
    spy = spy_on(core)
    found: list[object] = []
    with llm:
        for first in range(0, len(ROWS), at_once):
            part = range(first, min(first + at_once, len(ROWS)))
            prompts, params = [prompt_of(index) for index in part], [params_of(ROWS[index], index) for index in part]
            found += map(content, llm.generate(prompts, params, use_tqdm=False))
    assert isinstance(spy.way, CudaGraphs) == (way == "fastest")
    assert {shape.is_decode for shape in spy.ran} == {False, True}
    return found


def test_every_way_gives_the_bits_of_eager_steps(model: Path) -> None:
    alone = answers(model, "eager", at_once=1)
    assert answers(model, "fastest", at_once=len(ROWS)) == alone
    assert answers(model, "eager", at_once=len(ROWS)) == alone
