"""What `import quire` costs and offers, and which processes stay free of torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import quire

HEAVY = {"torch", "transformers", "numpy", "tokenizers", "jinja2", "msgspec", "huggingface_hub", "rich"}


def in_new_process(code: str) -> object:
    """The JSON that `code` prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_quire_imports_nothing_heavy() -> None:
    loaded = in_new_process("import sys, json, quire; print(json.dumps(sorted(sys.modules)))")
    assert isinstance(loaded, list)
    assert HEAVY & set(loaded) == set()


def test_import_quire_is_fast() -> None:
    # The bound is generous for a busy machine; benchmarks hold the real figure.
    seconds = in_new_process(
        "import time; begin = time.perf_counter(); import quire; print(time.perf_counter() - begin)"
    )
    assert isinstance(seconds, float)
    assert seconds < 0.5


@pytest.mark.parametrize("module", ["types.sampling", "types.step", "types.messages", "config.args", "utils.log"])
def test_modules_for_every_process_import_no_torch(module: str) -> None:
    loaded = in_new_process(f"import sys, json, quire.{module}; print(json.dumps('torch' in sys.modules))")
    assert loaded is False


def test_every_public_name_resolves() -> None:
    assert dir(quire) == sorted(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    names: dict[str, object] = {}
    exec("from quire import *", names)
    assert set(quire.__all__) <= set(names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLLM'"):
        quire.__getattr__("LLLM")
