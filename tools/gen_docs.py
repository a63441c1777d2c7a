"""Writes the pages that are generated from code; with --check, only says whether they are up to date.

Usage: python tools/gen_docs.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from quire.config import args  # noqa: E402  (this tree's quire, not an installed one)
from quire.loader.quantized import catalog as quantization  # noqa: E402
from quire.metrics import catalog  # noqa: E402
from tools import api_reference, architecture_picture, command_reference, model_reference  # noqa: E402

PAGES = {
    "docs/reference/settings.md": args.reference_markdown,
    "docs/reference/metrics.md": catalog.reference_markdown,
    "docs/reference/commands.md": command_reference.reference_markdown,
    "docs/reference/api.md": api_reference.reference_markdown,
    "docs/images/architecture.svg": architecture_picture.draw,
    "docs/reference/supported-models.md": model_reference.reference_markdown,
    "docs/reference/supported-quantization.md": quantization.reference_markdown,
}


def stale(root: Path = ROOT) -> list[str]:
    return [
        name
        for name, generate in PAGES.items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != generate()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages under docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    out_of_date = stale()
    for name in out_of_date:
        if check:
            print(f"{name} is out of date; run python tools/gen_docs.py")
        else:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(PAGES[name](), encoding="utf-8")
            print(f"wrote {name}")
    return 1 if check and out_of_date else 0


if __name__ == "__main__":
    sys.exit(main())
