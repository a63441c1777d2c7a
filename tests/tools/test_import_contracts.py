"""The import contracts of pyproject.toml hold for the tree, and break when somebody breaks them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.check import LINT_IMPORTS, ROOT

CONTRACTS = [
    contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
]

# One forbidden import per contract at least: file, line.
BAD_IMPORTS = [
    ("quire/types/bad.py", "import quire.config.engine"),
    ("quire/sched/bad.py", "import torch"),
    ("quire/kv/bad.py", "def later() -> None:\n    import quire.models"),
    ("quire/layers/bad.py", "import quire.kv"),
    ("quire/frontend/bad.py", "import quire.worker"),
    ("quire/runner/bad.py", "import quire.kernels.cpu.library"),
    ("quire/server/anthropic/bad.py", "import quire.server.openai.router"),
    ("quire/utils/bad.py", "from quire.types.request import EngineRequest"),
    ("quire/models/bad.py", "from transformers import AutoModel"),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "quire", tmp_path / "quire", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(root: Path) -> tuple[int, dict[str, str]]:
    """The exit code, and KEPT or BROKEN for each contract."""
    done = subprocess.run([sys.executable, "-c", LINT_IMPORTS], cwd=root, capture_output=True, text=True)
    found = re.findall(r"^(.+) (KEPT|BROKEN)\b", done.stdout, flags=re.M)
    verdicts = {name: verdict for name, verdict in found if name in CONTRACTS}
    return done.returncode, verdicts


def test_contracts_hold_in_a_copy_and_each_can_break(copy: Path) -> None:
    assert lint(copy) == (0, dict.fromkeys(CONTRACTS, "KEPT"))
    for name, line in BAD_IMPORTS:
        (copy / name).write_text(f"{line}\n")
    assert lint(copy) == (1, dict.fromkeys(CONTRACTS, "BROKEN"))


def test_a_new_package_must_be_given_a_layer(copy: Path) -> None:
    (copy / "quire" / "surprise").mkdir()
    (copy / "quire" / "surprise" / "__init__.py").touch()
    code, verdicts = lint(copy)
    assert code == 1
    assert verdicts["Imports go downwards"] == "BROKEN"


def test_future_packages_have_their_place(copy: Path) -> None:
    for package in ("server", "parsers", "structured", "kernels", "parallel", "metrics"):
        (copy / "quire" / package).mkdir(exist_ok=True)
        (copy / "quire" / package / "__init__.py").touch()
    assert lint(copy)[0] == 0
    for package in ("parsers", "structured"):
        (copy / "quire" / package / "bad.py").write_text("import torch\n")
    (copy / "quire" / "server" / "bad.py").write_text("import quire.sched\n")
    code, verdicts = lint(copy)
    assert code == 1
    assert verdicts["Scheduling, caching and the types know no tensors"] == "BROKEN"
    assert verdicts["The frontend reaches the engine through its client only"] == "BROKEN"
