"""Written checkpoints in transformers: its loader, with compressed-tensors, gets the logits that Quire gets. Nightly.

compressed-tensors is installed beside the test environment, without what it depends on, which is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.cli.main import main
from tests.e2e.tiny import make_model
from tests.loader.test_quantize import MIXTURES, logits

READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM
with torch.inference_mode():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
    print(json.dumps(model(torch.tensor([[3, 9, 27, 81, 43]])).logits[0].float().tolist()))
"""
# The dtype in which transformers reads it, and how far its logits may be off: it rounds activations of W8A8 to 8 bits
# where Quire rounds others, and multiplies unpacked FP4 in bfloat16.
DENSE = {
    "w8a8-int8": ("float32", 0.03),
    "w8a8-fp8": ("float32", 0.08),
    "w8a16": ("float32", 1e-3),
    "w4a16": ("float32", 1e-3),
    "nvfp4": ("bfloat16", 0.02),
    "mxfp4": ("bfloat16", 0.02),
}
# Not w4a16-asym: compressed-tensors 0.20 writes packed zero points, and expects unpacked ones where transformers
# builds the model without storage. Nor gpt-oss and Granite-MoE, of which transformers has all experts of a layer in
# one tensor, nor other schemes of experts: transformers 5.23 takes W8A8 int8 for packed integers, and leaves out the
# second scale of NVFP4.
CASES = [
    *(("qwen2", scheme, *how) for scheme, how in DENSE.items()),
    *((kind, "w4a16", "float32", 3e-3) for kind in ("qwen3_moe", "qwen2_moe", "mixtral")),
    *(("qwen3_moe", scheme, *DENSE[scheme]) for scheme in ("w8a16", "w8a8-fp8", "mxfp4")),
]


@pytest.fixture(scope="module")
def compressed_tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    packages = ["compressed-tensors", "loguru"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *packages]
    subprocess.run(install, check=True, capture_output=True)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "scheme", "dtype", "bound"), CASES)
def test_transformers_reads_it(
    kind: str, scheme: str, dtype: str, bound: float, compressed_tensors: Path, tmp_path: Path
) -> None:
    settings = MIXTURES[kind][0] if kind in MIXTURES else {}
    model = make_model(tmp_path / "model", kind, dtype="bfloat16", **{"initializer_range": 0.05, **settings})
    folder = tmp_path / "out"
    assert main(["quantize", str(model), "--scheme", scheme, "--out", str(folder)]) == 0
    environment = {**os.environ, "PYTHONPATH": str(compressed_tensors)}
    command = [sys.executable, "-c", READ, str(folder), dtype]
    read = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found, expected = torch.tensor(json.loads(read.stdout.splitlines()[-1])), logits(folder)
    assert (found - expected).norm() < bound * expected.norm()
