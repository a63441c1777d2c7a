"""`quire show MODEL`: what a model on this machine is, from its headers alone."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from quire.loader.aliases import ALIASES
from quire.loader.hub import ModelSource, resolve_model
from quire.loader.local import find_local
from quire.types.errors import ModelNotFoundError
from quire.utils.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name of `quire list`, a folder, or a .gguf file")
    parser.add_argument("--template", action="store_true", help="print the chat template and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    source = local_source(args.model)
    if args.template:
        print(template_of(source))
        return 0
    from quire.loader.describe import describe_model  # imports numpy: only when it is needed

    described = describe_model(source)
    if args.json:
        print(json.dumps({"path": str(source.path), **asdict(described)}, indent=2))
        return 0
    lines = {
        "architecture": described.architecture,
        "family": described.family,
        "parameters": described.parameter_size,
        "quantization": described.quantization,
        "context length": str(described.context_length or ""),
        "embedding length": str(described.embedding_length or ""),
        "size": format_bytes(described.num_bytes),
        "format": described.format,
        "path": str(source.path),
    }
    print(args.model)
    for name, value in lines.items():
        if value:
            print(f"  {name:<18}{value}")
    return 0


def local_source(name: str) -> ModelSource:
    """The model, if it is on this machine: nothing is downloaded."""
    if name in ALIASES and (local := find_local(name)) is None:
        raise ModelNotFoundError(f"{name} is not here yet; `quire pull {name}` downloads it")
    if (local := find_local(name)) is not None:
        return ModelSource(local.path, local.kind, name)
    from huggingface_hub import constants

    online, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        return resolve_model(name)
    finally:
        constants.HF_HUB_OFFLINE = online


def template_of(source: ModelSource) -> str:
    from quire.frontend.tokenizer import load_tokenizer

    return load_tokenizer(source.path).chat_templates.get("default", "")
