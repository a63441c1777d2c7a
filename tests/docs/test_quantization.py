"""docs/guides/quantization.md is true: its method works in one file and one line, and every block of it runs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quire.layers.quant
import quire.loader.quantized
from quire.kernels.cpu.matrix import BLOCK_TYPES
from quire.layers.quant.registry import METHODS
from quire.layers.scheme import as_tensor
from quire.loader.checkpoint import Checkpoint, TensorInfo
from quire.loader.quantized.registry import QUANTIZED, logical

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "quantization.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_works_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contexts: ExitStack
) -> None:
    package, folder = tmp_path / "quant", tmp_path / "model"
    package.mkdir()
    folder.mkdir()
    monkeypatch.setattr(quire.layers.quant, "__path__", [*quire.layers.quant.__path__, str(package)])
    contexts.enter_context(METHODS.with_entries({}))
    names: dict[str, object] = {"folder": folder}
    kinds = []
    for match in re.finditer(r"^```python([^\n]*)\n(.*?)^```$", TEXT, flags=re.M | re.S):
        kind, _, value = match[1].strip().partition("=")
        kinds.append(kind)
        if kind in ("decorator", "line"):
            continue  # see the next test
        if kind == "file":
            (package / value).write_text(match[2])
        elif kind == "registry":
            for name, target in ast.literal_eval(match[2]).items():
                assert name not in METHODS, f"{name} exists by now; the page needs another example"
                METHODS.register(name, target)
        else:
            # Padded, so that a traceback names the line of the page.
            padding = "\n" * (TEXT[: match.start()].count("\n") + 1)
            exec(compile(padding + match[2], str(PAGE), "exec"), names)
    assert kinds == ["file", "registry", "", "", "decorator", "line"]


class Stored(Checkpoint):
    """One matrix of 3 x 64 in words, and what a tool left behind."""

    def __init__(self) -> None:
        self.config = {"quantization_config": {"quant_method": "words4"}}
        self.data = {
            "proj.weight_packed": torch.full((3, 8), 0x11111119, dtype=torch.int32),
            "proj.weight_scale": torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float16),
            "proj.weight_shape": torch.tensor([3, 64]),
            "proj.weight_observer": torch.zeros(1),
            "norm.weight": torch.ones(64),
        }

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(x.shape), x.dtype, x.nbytes) for name, x in self.data.items()}

    def get(self, name: str) -> Tensor:
        return self.data[name]


def test_its_decorator_is_one_file_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contexts: ExitStack
) -> None:
    found = dict(re.findall(r"^```python (decorator|line)\n(.*?)^```$", TEXT, flags=re.M | re.S))
    line = ast.literal_eval(found["line"])
    (tmp_path / "words4.py").write_text(found["decorator"])
    monkeypatch.setattr(quire.loader.quantized, "__path__", [*quire.loader.quantized.__path__, str(tmp_path)])
    contexts.enter_context(QUANTIZED.with_entries(line, only=True))
    checkpoint = logical(Stored())
    assert list(checkpoint.tensors()) == ["norm.weight", "proj.weight"]
    row = torch.tensor([1.0] + [-7.0] * 7).repeat(8) * torch.tensor([1.0] * 32 + [2.0] * 32)
    assert torch.equal(as_tensor(checkpoint.stored("proj.weight")), row.expand(3, 64))


def test_every_method_and_every_packed_type_is_on_the_page() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.M)
    assert sorted(listed) == sorted([*METHODS, "auto"])
    assert all(type_name in TEXT for type_name in BLOCK_TYPES)


def test_the_table_of_schemes_is_that_of_the_result_file() -> None:
    report = json.loads((PAGE.parents[2] / "benchmarks" / "results" / "quantization.json").read_text())
    keys = ("file_mb", "memory_mb", "perplexity", "percent", "prefill_tok_s", "decode_tok_s")
    for scheme, found in report["results"]["schemes"].items():
        (line,) = re.findall(rf"^\| {re.escape(scheme)} \|(.*)\|$", TEXT, flags=re.M)
        shown = [cell.strip(" %+").replace(",", "") for cell in line.split("|")]
        for key, cell in zip(keys, shown, strict=True):
            digits = len(cell.partition(".")[2])
            assert not cell or abs(float(cell) - found[key]) <= 0.51 * 10**-digits, (scheme, key)
