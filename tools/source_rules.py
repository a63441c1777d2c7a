"""Rules that no linter knows: sizes of files and functions, marks of unfinished work, who may name a device.

Usage: python tools/source_rules.py [ROOT]; prints one line per offence and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_LINES = 600
FUNCTION_LINES = 100
MODEL_FILE_LINES = 119
MODEL_REGISTRY = "quire/models/registry.py"  # its lines name the model files: "LlamaForCausalLM": "llama:Llama"
FOLDERS = ("quire", "tests", "tools", "benchmarks")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mark:
    """Text that must not appear in quire/, except in the files that `allowed` matches from the path's start."""

    pattern: str
    reason: str
    allowed: str = r"(?!)"


MARKS = (
    Mark(r"TODO|FIXME|NotImplementedError", "unfinished work"),
    Mark(r"\braise (Exception|BaseException)\b", "an untyped error; see quire/types/errors.py"),
    Mark(r"\bos\.(environ|getenv)\b", "reads the environment; add a function to config/env.py", r"config/env\.py"),
    Mark(
        r"\.cuda\(|\btorch\.cuda\b|device(\.type)? *== *[\"']",
        "names a device; ask quire/platform",
        r"(kernels|platform)/",
    ),
    Mark(r"^from pydantic|^import pydantic", "pydantic stays at the HTTP edge", r"server/"),
)


def offences(root: Path) -> Iterator[str]:
    model_files = find_model_files(root)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            text = path.read_text(encoding="utf-8")
            yield from size_offences(name, text, MODEL_FILE_LINES if name in model_files else FILE_LINES)
            if folder == "quire":
                yield from mark_offences(name, text)
                yield from hollow_offences(name, text)


def size_offences(name: str, text: str, limit: int) -> Iterator[str]:
    lines = text.count("\n") + (not text.endswith("\n") and text != "")
    if lines > limit:
        yield f"{name}: {lines} lines, at most {limit}"
    for function in functions(ast.parse(text)):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{name}:{function.lineno}: {function.name} has {length} lines, at most {FUNCTION_LINES}"


def find_model_files(root: Path) -> set[str]:
    registry = root / MODEL_REGISTRY
    modules = re.findall(r'"(\w+):\w+"', registry.read_text(encoding="utf-8")) if registry.is_file() else []
    return {f"quire/models/{module}.py" for module in modules}


def mark_offences(name: str, text: str) -> Iterator[str]:
    inner = name.removeprefix("quire/")
    marks = [mark for mark in MARKS if not re.match(mark.allowed, inner)]
    for number, line in enumerate(text.splitlines(), start=1):
        for mark in marks:
            found = re.search(mark.pattern, line)
            if found:
                yield f"{name}:{number}: {found.group()!r}: {mark.reason}"


def hollow_offences(name: str, text: str) -> Iterator[str]:
    """Functions of `pass` or `...` alone; a null object's method says in a docstring why it does nothing."""
    tree = ast.parse(text)
    protocols = {id(item) for node in ast.walk(tree) if is_protocol(node) for item in ast.walk(node)}
    for function in functions(tree):
        if id(function) not in protocols and is_hollow(function):
            yield f"{name}:{function.lineno}: {function.name} has an empty body"


def is_protocol(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


def is_hollow(function: Function) -> bool:
    decorators = {ast.unparse(item).rpartition(".")[2] for item in function.decorator_list}
    if decorators & {"abstractmethod", "overload"}:
        return False
    return all(
        isinstance(statement, ast.Pass)
        or (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and statement.value.value is Ellipsis
        )
        for statement in function.body
    )


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = list(offences(root))
    print("\n".join(found) or "no offence")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
