"""The pages keep pace with the tree: packages, paths and links that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.architecture_picture import BANDS

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs", ROOT / "benchmarks" / "notes")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for folder in FOLDERS for page in sorted(folder.rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = sorted(path.parent.name for path in (ROOT / "quire").glob("*/__init__.py"))


def test_every_package_is_on_the_map() -> None:
    rows = re.findall(r"^\| `quire/(\w+)` \|", ARCHITECTURE, flags=re.M)
    assert sorted(rows) == PACKAGES


def test_ten_files_to_read_first() -> None:
    section = ARCHITECTURE.partition("### Ten files, in this order")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. `(quire/[\w/]+\.py)`", section, flags=re.M)
    assert len(set(files)) == 10
    lines = sum((ROOT / name).read_text(encoding="utf-8").count("\n") for name in files)
    assert lines < 2500, "an evening's reading"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(((?!\.\.)[^)]+\.md)\)", index))


def test_the_picture_shows_packages_that_exist() -> None:
    shown = [package for band in BANDS for row in band.rows for package, _ in row]
    assert len(shown) == len(set(shown))
    assert set(PACKAGES) - set(shown) == {"config", "metrics", "parallel", "types", "utils"}, "those that all may use"
    assert set(shown) <= set(PACKAGES)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:quire|tests|tools|docs|benchmarks)/[\w/.-]+)`", text)
    missing = [name for name in paths if not (ROOT / name).exists()]
    for first, others in re.findall(r"`(quire/[\w/]+)/\w+\.py`[^\n]*\n\|([^|\n]+) beside it \|", text):
        missing += [name for name in re.findall(r"`([\w.]+)`", others) if not (ROOT / first / name).exists()]
    for link, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]+))?\)", text):
        target = page.parent / link if link else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            missing.append(f"{link}#{anchor}")
    assert missing == []
