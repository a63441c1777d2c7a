"""Make a folder of wheels for a machine without network that already has PyTorch.

    python tools/wheel_folder.py [--out wheels] [--python 3.12] [--extra test] [--have torch triton ...]

There: `python -m pip install --no-deps --no-index wheels/*.whl`, and run Quire from its source tree. Packages that
the machine has, PyTorch and what comes with it, are left out, with all that only they need.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
# What an image with PyTorch for GPUs brings along.
HAVE = ("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface-hub", "accelerate")
# For a test run on a GPU; the rest of the test extra checks sources and servers.
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(pyproject: Path, extra: str | None) -> list[Requirement]:
    """Quire's own requirements; with the extra "test", what tests on a GPU need besides."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines: list[str] = list(project["dependencies"])
    if extra is not None:
        wanted = project["optional-dependencies"][extra]
        lines += [line for line in wanted if extra != "test" or normal(Requirement(line).name) in TESTS]
    return [Requirement(line) for line in lines]


def installed_needs(name: str) -> list[Requirement]:
    """What the package installed here under this name requires; nothing if it is not installed."""
    try:
        return [Requirement(line) for line in requires(name) or ()]
    except PackageNotFoundError:
        return []


def closure(
    roots: Iterable[Requirement], have: Iterable[str], python: str, needs: Callable[[str], list[Requirement]]
) -> list[Requirement]:
    """All requirements that apply on Linux with that Python, each once, without those the machine has."""
    environment: dict[str, str] = {key: str(value) for key, value in default_environment().items()}
    environment |= {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    found: dict[str, Requirement] = {}
    skipped = {normal(name) for name in have}
    open_ends = list(roots)
    while open_ends:
        requirement = open_ends.pop()
        name = normal(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        if name in skipped or name in found:
            continue
        found[name] = requirement
        open_ends += needs(requirement.name)
    return [found[name] for name in sorted(found)]


def download(requirements: list[Requirement], out: Path, python: str) -> None:
    lines = [f"{requirement.name}{requirement.specifier}" for requirement in requirements]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--python-version", python, "--dest", str(out), *lines], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "wheels")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine")
    parser.add_argument("--extra", default=None, help="also this extra of Quire's; test: what tests on a GPU need")
    parser.add_argument("--have", nargs="*", default=list(HAVE), help="packages that the machine has")
    args = parser.parse_args()
    requirements = closure(declared(ROOT / "pyproject.toml", args.extra), args.have, args.python, installed_needs)
    args.out.mkdir(parents=True, exist_ok=True)
    download(requirements, args.out, args.python)
    print(f"{len(list(args.out.glob('*.whl')))} wheels in {args.out}")


if __name__ == "__main__":
    main()
