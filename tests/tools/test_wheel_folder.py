"""Which packages go into a folder of wheels: all that is needed, and nothing that the machine has."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement

from tools.wheel_folder import closure, declared

NEEDS = {
    "a": ["b>=1", "torch>=2"],
    "b": ["a", "old; python_version < '3.12'", "extra-only; extra == 'more'"],
    "torch": ["nvidia-everything"],
}


def needs(name: str) -> list[Requirement]:
    return [Requirement(line) for line in NEEDS.get(name, ())]


def names(roots: list[str], have: list[str], python: str = "3.12") -> list[str]:
    found = closure([Requirement(root) for root in roots], have, python, needs)
    return [requirement.name for requirement in found]


def test_what_is_needed_by_what_is_needed_once() -> None:
    assert names(["a"], ["torch"]) == ["a", "b"]
    assert names(["a"], ["Torch"], "3.11") == ["a", "b", "old"]
    assert names(["a"], []) == ["a", "b", "nvidia-everything", "torch"]


def test_the_project_declares_what_a_gpu_machine_lacks() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    plain = {requirement.name for requirement in declared(pyproject, None)}
    tested = {requirement.name for requirement in declared(pyproject, "test")}
    assert {"msgspec", "pyzmq", "torch"} <= plain
    assert tested - plain == {
        "pytest",
        "pytest-asyncio",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
        "jsonschema",
    }
