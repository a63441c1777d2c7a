"""Lines of the core, the kernels and the surfaces; the core has a budget.

Lines that are not blank count, with docstrings and comments, in Python and C++: nobody should have to join paragraphs
to keep to a budget. A package that is named nowhere below counts as core, so that code cannot leave it by moving.

Usage: python tools/line_budget.py [ROOT]; prints the sums and exits with 1 if the core is over its budget.
"""

from __future__ import annotations

import sys
from pathlib import Path

CORE_LINES = 13_500
GROUPS = {
    "kernels": ("kernels",),
    "surfaces": ("server", "frontend", "parsers", "structured", "cli", "bench"),
    "others": ("loader", "config", "metrics", "utils"),
}
SUFFIXES = (".py", ".cpp", ".h", ".def")


def lines_of(root: Path) -> dict[str, tuple[int, int]]:
    """Lines that are not blank, and all lines, of each group of packages."""
    group_of = {package: group for group, packages in GROUPS.items() for package in packages}
    found = {"core": (0, 0), **dict.fromkeys(GROUPS, (0, 0))}
    for path in sorted((root / "quire").rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        package, *inside = path.relative_to(root / "quire").parts
        lines = path.read_text(encoding="utf-8").splitlines()
        group = group_of.get(package, "core") if inside else "others"
        written, every = found[group]
        found[group] = written + sum(bool(line.strip()) for line in lines), every + len(lines)
    return found


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = lines_of(root)
    for group, (written, every) in found.items():
        budget = f", budget {CORE_LINES:,}" if group == "core" else ""
        print(f"{group:<9} {written:>7,} lines ({every:,} with blank ones){budget}")
    if found["core"][0] <= CORE_LINES:
        return 0
    print(f"the core has {found['core'][0]:,} lines, at most {CORE_LINES:,}; find what is written twice")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
