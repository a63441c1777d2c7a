"""tools/source_rules.py finds what it forbids, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.source_rules import FILE_LINES, FUNCTION_LINES, MODEL_FILE_LINES, main, offences


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def function(lines: int) -> str:
    return "def long():\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("quire/sched/scheduler.py", FILE_LINES),
        ("quire/models/blocks.py", FILE_LINES),
        ("quire/models/llama.py", MODEL_FILE_LINES),
        ("tests/e2e/test_run.py", FILE_LINES),
    ],
)
def test_file_sizes(tmp_path: Path, name: str, limit: int) -> None:
    write(tmp_path, "quire/models/registry.py", 'MODELS = {"LlamaForCausalLM": "llama:Llama"}\n')
    write(tmp_path, name, "x = 1\n" * limit)
    assert list(offences(tmp_path)) == []
    write(tmp_path, name, "x = 1\n" * limit + "x = 2")
    assert list(offences(tmp_path)) == [f"{name}: {limit + 1} lines, at most {limit}"]


def test_function_sizes_count_methods_and_coroutines(tmp_path: Path) -> None:
    write(tmp_path, "quire/a.py", function(FUNCTION_LINES))
    assert list(offences(tmp_path)) == []
    method = "class A:\n    async def b(self):\n" + "        x = 1\n" * FUNCTION_LINES
    write(tmp_path, "quire/a.py", method)
    assert list(offences(tmp_path)) == ["quire/a.py:2: b has 101 lines, at most 100"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("quire/sched/a.py", "# TODO: later"),
        ("quire/sched/a.py", "# FIXME"),
        ("quire/sched/a.py", "raise NotImplementedError"),
        ("quire/sched/a.py", "raise Exception('no')"),
        ("quire/worker/a.py", "x = tensor.cuda()"),
        ("quire/worker/a.py", "fast = device.type == 'cpu'"),
        ("quire/config/args.py", "home = os.environ['HOME']"),
        ("quire/types/a.py", "import pydantic"),
    ],
)
def test_marks(tmp_path: Path, name: str, line: str) -> None:
    write(tmp_path, name, f"{line}\n")
    (found,) = offences(tmp_path)
    assert found.startswith(f"{name}:1: ")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("quire/platform/cuda.py", "x = tensor.cuda()"),
        ("quire/kernels/triton/a.py", "x = torch.cuda.device_count()"),
        ("quire/config/env.py", "home = os.environ['HOME']"),
        ("quire/server/a.py", "import pydantic"),
        ("quire/sched/a.py", "raise TypeError('x')"),
        ("tests/test_a.py", "# TODO is fine in a string of a test"),
    ],
)
def test_places_where_a_mark_is_allowed(tmp_path: Path, name: str, line: str) -> None:
    write(tmp_path, name, f"{line}\n")
    assert list(offences(tmp_path)) == []


def test_hollow_functions(tmp_path: Path) -> None:
    write(
        tmp_path,
        "quire/a.py",
        "class Shape(Protocol):\n"
        "    def area(self) -> float: ...\n"
        "class Base(ABC):\n"
        "    @abstractmethod\n"
        "    def step(self) -> None: ...\n"
        "class Null(Base):\n"
        "    def step(self) -> None:\n"
        "        '''Nothing to do: there is no stream.'''\n",
    )
    assert list(offences(tmp_path)) == []
    write(tmp_path, "quire/a.py", "def empty():\n    pass\ndef other():\n    ...\n")
    assert [line.split(": ")[1] for line in offences(tmp_path)] == [
        "empty has an empty body",
        "other has an empty body",
    ]


def test_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "quire/a.py", "x = 1\n")
    assert main([str(tmp_path)]) == 0
    write(tmp_path, "quire/a.py", "# TODO\n")
    assert main([str(tmp_path)]) == 1
    assert "unfinished work" in capsys.readouterr().out
