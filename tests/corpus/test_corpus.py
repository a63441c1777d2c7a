"""The corpus gives the digests that were recorded: a refactoring changes no token and no log-probability."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.kernels.cpu import library
from tests.corpus.record import RECORDED, child
from tests.kernels.device import NATIVE
from tests.needs import lacking

AGAIN = 'record it with `python -m tests.corpus.record --reason "..."` for other kernels, versions or processors'


@pytest.mark.parametrize("path", ["portable", "avx2", pytest.param("avx512vnni", marks=pytest.mark.nightly), "cuda"])
def test_digests(path: str, tmp_path: Path) -> None:
    found = library.load()
    if path == "cuda" and not NATIVE:
        pytest.skip("needs a GPU, and QUIRE_TEST_GPU=1")
    if path != "cuda" and (found is None or path not in found.instruction_sets):
        pytest.skip(f"needs a C++ compiler and a processor with {path}")
    child(path, tmp_path / "found.json")
    ((key, digests),) = json.loads((tmp_path / "found.json").read_text()).items()
    recorded = json.loads(RECORDED.read_text())["digests"]
    version = key.split(", ")[1]
    others = [kept for name, kept in recorded.items() if name.startswith(f"{path}, {version}, ")]
    if key not in recorded and digests in others:
        return  # on a processor that is not known, the bits of one that is
    if key not in recorded and others:
        lacking(f"nothing is recorded for {key}: torch's functions have other bits on other processors; {AGAIN}")
    assert key in recorded, f"nothing is recorded for {key}; {AGAIN}"
    differing = {
        model: [request for request in wanted if digests[model][request] != wanted[request]]
        for model, wanted in recorded[key].items()
    }
    assert not any(differing.values()), f"requests of {key} with other digests: {differing}; {AGAIN}"
