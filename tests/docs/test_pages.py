"""The pages keep pace with the tree: packages, paths and links that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs", ROOT / "benchmarks" / "notes")
PAGES = [
    *(page for folder in FOLDERS for page in sorted(folder.rglob("*.md"))),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = sorted(path.parent.name for path in (ROOT / "quire").glob("*/__init__.py"))


def test_every_package_is_on_the_map() -> None:
    rows = re.findall(r"^\| `quire/(\w+)` \|", ARCHITECTURE, flags=re.M)
    assert sorted(rows) == PACKAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:quire|tests|tools|docs|benchmarks)/[\w/.-]+)`", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [name for name in paths if not (ROOT / name).exists()]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert missing == []
