"""Lines of the core, the kernels and the surfaces; the core has a budget.

All lines count, with docstrings, comments and blank ones, in Python and C++. A package that is named nowhere below
counts as core, so that code cannot leave it by moving. The budget is that of the core with every capability that the
architecture has room for.

Usage: python tools/line_budget.py [ROOT]; prints the sums and exits with 1 if the core is over its budget.
"""

from __future__ import annotations

import sys
from pathlib import Path

CORE_LINES = 35_400
GROUPS = {
    "kernels": ("kernels",),
    "surfaces": ("server", "frontend", "parsers", "structured", "cli", "bench", "replay"),
    "others": ("loader", "config", "metrics", "utils"),
}
SUFFIXES = (".py", ".cpp", ".h", ".def")


def lines_of(root: Path) -> dict[str, tuple[int, int]]:
    """All lines, and those that are not blank, of each group of packages."""
    group_of = {package: group for group, packages in GROUPS.items() for package in packages}
    found = {"core": (0, 0), **dict.fromkeys(GROUPS, (0, 0))}
    for path in sorted((root / "quire").rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        package, *inside = path.relative_to(root / "quire").parts
        lines = path.read_text(encoding="utf-8").splitlines()
        group = group_of.get(package, "core") if inside else "others"
        every, written = found[group]
        found[group] = every + len(lines), written + sum(bool(line.strip()) for line in lines)
    return found


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = lines_of(root)
    for group, (every, written) in found.items():
        budget = f", budget {CORE_LINES:,}" if group == "core" else ""
        print(f"{group:<9} {every:>7,} lines ({written:,} without blank ones){budget}")
    if found["core"][0] <= CORE_LINES:
        return 0
    print(f"the core has {found['core'][0]:,} lines, at most {CORE_LINES:,}; find what is written twice")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
