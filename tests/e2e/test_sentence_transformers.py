"""The built-in embedder beside sentence-transformers itself, which is installed into a folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quire import LLM
from quire.loader.hub import resolve_model
from tests.e2e.test_minilm import TEXTS

# Without their dependencies, which would bring another torch: the rest is here already.
PACKAGES = (
    "sentence-transformers",
    "scikit-learn",
    "scipy",
    "joblib",
    "threadpoolctl",
    "cloudpickle",
    "loky",
    "narwhals",
)
ENCODE = """
import json, sys
import numpy as np
from sentence_transformers import SentenceTransformer

folder, out = sys.argv[1:]
np.save(out, SentenceTransformer(folder, device="cpu").encode(json.load(sys.stdin)))
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "packages")]
    subprocess.run([*install, *PACKAGES], check=True, timeout=500)
    out = tmp_path / "vectors.npy"
    subprocess.run(
        [sys.executable, "-c", ENCODE, str(resolve_model("minilm").path), str(out)],
        input=json.dumps(TEXTS),
        text=True,
        check=True,
        timeout=300,
        env={"PYTHONPATH": str(tmp_path / "packages"), "HF_HUB_OFFLINE": "1"},
    )
    with LLM("minilm") as llm:
        mine = np.array([output.outputs.embedding for output in llm.embed(TEXTS)], np.float64)
    theirs = np.load(out).astype(np.float64)
    cosines = (mine * theirs).sum(1) / np.linalg.norm(mine, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosines.min() > 1 - 1e-5
    np.testing.assert_allclose(mine, theirs, atol=1e-4)
