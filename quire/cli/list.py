"""`quire list`: the models on this machine, in Quire's folder and in the hub's cache."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

from quire.cli.table import print_table
from quire.loader.local import local_models, models_folder
from quire.utils.units import format_bytes


@dataclass(frozen=True)
class Entry:
    name: str
    num_bytes: int
    modified: float
    path: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    own = [Entry(model.name, model.num_bytes, model.path.stat().st_mtime, model.path) for model in local_models()]
    entries = [*own, *hub_entries()]
    if args.json:
        print(json.dumps([{**vars(entry), "path": str(entry.path)} for entry in entries], indent=2))
        return 0
    rows = [[entry.name, format_bytes(entry.num_bytes), age(entry.modified), str(entry.path)] for entry in entries]
    print_table(["NAME", "SIZE", "MODIFIED", "WHERE"], rows)
    if not entries:
        print(
            f"No models yet. `quire pull smollm2` downloads one; .gguf files in {models_folder()} are found by name."
        )
    return 0


def hub_entries() -> list[Entry]:
    """The models of Hugging Face's cache that Quire could load."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [repo for repo in repos if repo.repo_type == "model"]
    return [
        Entry(repo.repo_id, repo.size_on_disk, repo.last_modified, Path(repo.repo_path))
        for repo in sorted(models, key=lambda repo: repo.repo_id.lower())
        if any(file.file_name == "config.json" for revision in repo.revisions for file in revision.files)
    ]


def age(moment: float) -> str:
    """How long ago something was, for people."""
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count != 1 else ''} ago"
    return "now"
