"""Models with latent attention run as captured steps: lists of kernel calls give the bits of eager steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kernels.cpu import library
from quire.runner.kernel_list import KernelList
from tests.e2e.tiny import make_engine
from tests.models.zoo import LATENTS, RECURRENT, Tiny
from tests.runner.engines import run_eagerly, runner_of, spy_on
from tests.runner.test_kernel_list import answers

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")

# Experts that give what they read, and gates of whole heads, are computed by torch.
EAGER = ("longcat-flash", "bailing-hybrid")
HYBRIDS = [tiny for tiny in RECURRENT if tiny.name in ("kimi-linear", "bailing-hybrid")]


@pytest.mark.parametrize("tiny", [*LATENTS, *HYBRIDS], ids=lambda tiny: tiny.name)
def test_tokens_and_logprobs_are_those_of_eager_steps(tiny: Tiny, tmp_path: Path) -> None:
    tiny.make(tmp_path)
    core, eager = (make_engine(tmp_path, max_model_len=64, max_num_batched_tokens=32) for _ in range(2))
    way = runner_of(core).ways[0]
    assert isinstance(way, KernelList)
    assert way.is_recorded == (tiny.name not in EAGER)
    spy = spy_on(core)
    run_eagerly(eager)
    assert answers(core, temperature=0.0, logprobs=1) == answers(eager, temperature=0.0, logprobs=1)
    assert not (spy.ran if tiny.name in EAGER else spy.refused)
    assert {shape.num_rows for shape in (*spy.ran, *spy.refused) if shape.is_decode} >= {1, 2, 3, 4}
